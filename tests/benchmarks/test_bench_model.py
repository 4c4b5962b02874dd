"""The arithmetic of the benchmark of a given model, and its parts at their smallest size."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.rl.experience import shared_microbatches
from tasks.store import DataError
from tests.benchmarks import step, training
from tests.benchmarks.bench_model import QUICK, chosen, decoding_table, model_folder, tiny_llama, training_table
from tests.benchmarks.bench_trl import Meter, positions_counted, run_ours
from tests.benchmarks.decoding import READING, Shape, by_generate, by_session, random_texts, rates
from tests.benchmarks.machine import ROOT, processor
from tests.benchmarks.scripted import Prompter, Script, ScriptedGenerator
from tests.benchmarks.test_bench import CHAT_TEMPLATE
from tests.tiny import make_model, make_tokenizer

CALL = Shape(prompts=2, copies=2, prompt=10, turns=1, written=5)
TURNS = Shape(prompts=2, copies=2, prompt=10, turns=3, written=4, observed=6)
SHAPES = {"call": CALL, "turns": TURNS}


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    tokenizer = make_tokenizer()
    return make_model(tokenizer), tokenizer


def positions(model: Any, play: Any, shape: Shape) -> int:
    """What the decoder computes in one play."""
    meter = Meter()
    with positions_counted(model, meter, lambda: True):
        assert play(random_texts(shape, 100, 0), shape) > 0
    return meter.positions


def test_generate_reads_everything_again_unless_its_cache_is_kept(tiny: tuple[Any, Any]) -> None:
    model = tiny[0]
    again = [10, 10 + 4 + 6, 10 + 8 + 12]  # Tokens of a row before each turn.
    assert positions(model, by_generate(model), TURNS) == 4 * sum(read + 3 for read in again)
    assert positions(model, by_generate(model, keeps_cache=True), TURNS) == 4 * (TURNS.total - 1)
    assert positions(model, by_generate(model), CALL) == 4 * (CALL.total - 1)


def test_our_session_reads_a_prompt_once(tiny: tuple[Any, Any]) -> None:
    generator = PlainGenerator(*tiny)
    generator.eos_ids = frozenset()
    read = 2 * (TURNS.prompt - 1) + 4 * (TURNS.total - TURNS.prompt)
    assert positions(tiny[0], by_session(generator.open), TURNS) == read


def test_a_call_that_ends_early_is_no_measurement(tiny: tuple[Any, Any]) -> None:
    generator = PlainGenerator(*tiny)
    generator.eos_ids = frozenset(range(len(tiny[1])))
    with pytest.raises(ValueError, match="found calls of 0 to 0 tokens, expected 5 in each"):
        by_session(generator.open)(random_texts(CALL, 100, 0), CALL)


def found(**seconds: list[float]) -> dict[str, Any]:
    """`ours` is twice as fast in the call, less where a player is given."""
    call = {"ours": [1.5, 1.5], "generate": [2.5, 2.5]}
    reading = {"ours": [0.5, 0.5], "generate": [0.5, 0.5]}
    turns = {"ours": [1.0, 1.0], "generate": [5.0, 5.0], **seconds}
    return {"dtype": "torch.float32", "seconds": {READING: reading, "call": call, "turns": turns}}


def test_rates_are_tokens_over_seconds() -> None:
    alone, call, turns = rates(found(), SHAPES)
    assert alone == ("call, decoding alone", {"ours": [16.0, 16.0], "generate": [8.0, 8.0]})
    assert call[1]["ours"] == pytest.approx([20 / 1.5] * 2)
    assert turns[1]["generate"] == pytest.approx([48 / 5] * 2)


def test_the_verdict_takes_the_worst_row_order_and_peer() -> None:
    assert decoding_table(found(), SHAPES)[1] == pytest.approx(2.5 / 1.5)
    assert decoding_table(found(ours=[1.0, 4.0]), SHAPES)[1] == pytest.approx(1.25)
    text, worst = decoding_table(found(kept=[1.1, 5.0]), SHAPES)
    assert worst == pytest.approx(1.1)
    assert text.splitlines()[-1].split() == ["turns", "kept", "44", "10", "1.10"]


def test_the_share_of_the_limit_is_that_of_the_slower_run() -> None:
    side = {"seconds": [2.0, 4.0], "positions": 90, "limit": 1.0}
    text = training_table({"dtype": "d", "tokens": 100, "trained": 10, "separate": side, "shared": side})
    assert text.splitlines()[-1].split()[-2:] == ["25%", "25%"]
    assert text.splitlines()[-3].split()[-2:] == ["25", "25"]


# Training -------------------------------------------------------------------------------------------------------------


def test_rollouts_are_laid_out_as_their_shape_says() -> None:
    batch = training.experience(TURNS, 100)
    assert batch.ids.shape == (4, TURNS.total)
    assert batch.prefix_lengths.tolist() == [10] * 4
    assert batch.loss_mask[0].tolist() == [False] * 10 + ([True] * 4 + [False] * 6) * 2 + [True] * 4
    assert torch.equal(batch.ids[0, :10], batch.ids[1, :10])
    assert not torch.equal(batch.ids[1, :10], batch.ids[2, :10])


@pytest.mark.parametrize("most", [30, 60, 1000])
def test_positions_are_those_that_the_model_reads(tiny: tuple[Any, Any], most: int) -> None:
    from tasks.rl.experience import shared_prefixes
    from tasks.shared_prefix import attention_to_prefixes, hidden_states

    batch = training.experience(TURNS, 100)
    meter = Meter()
    with positions_counted(tiny[0], meter, lambda: True), attention_to_prefixes(tiny[0].get_decoder()), torch.no_grad():
        for rows in shared_microbatches(batch, range(4), most):
            part = batch.rows(rows)
            hidden_states(tiny[0].get_decoder(), part.ids, part.lengths, shared_prefixes(part))
    assert training._positions(batch, most, share=True) == meter.positions
    assert training._positions(batch, most, share=False) == 4 * (TURNS.total - 1)


def test_the_limit_has_every_matrix_of_the_decoder(tiny: tuple[Any, Any]) -> None:
    assert training.matrices(tiny[0].get_decoder()) == {(32, 32): 8, (64, 32): 4, (32, 64): 2}
    body, head = training.limits(tiny[0], 8, torch.float32)
    assert min(body, head) > 0


# The step -------------------------------------------------------------------------------------------------------------

PROMPT, OTHER = (5, 6, 7), (8, 9)
SCRIPT = Script({PROMPT: (((20, 1), (21, 1)), ((30, 31, 1),)), OTHER: (((20, 1), (22, 1)), ((40, 1),))})


def test_our_session_writes_the_script(tiny: tuple[Any, Any]) -> None:
    generator = ScriptedGenerator(*tiny)
    generator.eos_ids = frozenset({1})
    generator.script = SCRIPT
    session = generator.open([PROMPT, OTHER], 2, Sampling(1.0, 1.0, (), 0), 40)
    calls = session.generate(range(4), [9] * 4)
    assert [call.token_ids for call in calls] == [(20,), (30, 31), (20,), (40,)]
    expected = tiny[0](torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)[20]
    assert calls[0].logprobs[0] == pytest.approx(expected.item(), abs=1e-4)
    session.append([0, 2], [[1, 3], [1, 4]])
    assert [call.token_ids for call in session.generate([0, 2], [9, 9])] == [(21,), (22,)]


def drive(prompter: Prompter, rows: list[tuple[int, ...]]) -> list[list[int]]:
    """What `generate` would write for these left-padded rows."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    process = prompter.processor(ids, mask)
    written: list[list[int]] = [[] for _ in rows]
    for _ in range(process.tokens.shape[1]):
        tokens = process(ids, torch.randn(len(rows), 50)).argmax(-1)
        ids = torch.cat([ids, tokens[:, None]], 1)
        for row, token in zip(written, tokens.tolist(), strict=True):
            if 1 not in row:
                row.append(token)
    return written


def test_a_batch_of_the_peer_writes_the_script() -> None:
    """Rows of a later turn are fewer, and two of them begin alike; a new batch of prompts begins anew."""
    prompter = Prompter(SCRIPT)
    for _ in range(2):
        assert drive(prompter, [PROMPT, PROMPT, OTHER, OTHER]) == [[20, 1], [30, 31, 1], [20, 1], [40, 1]]
        assert drive(prompter, [(*OTHER, 20, 1, 3, 3), (*PROMPT, 20, 1, 3)]) == [[22, 1], [21, 1]]


def test_a_text_that_the_peer_has_changed_is_an_error() -> None:
    prompter = Prompter(SCRIPT)
    drive(prompter, [PROMPT, PROMPT])
    with pytest.raises(ValueError, match="continues no rollout of the script"):
        drive(prompter, [(*PROMPT, 20, 2, 3)])


@pytest.mark.slow
def test_our_side_of_the_step_writes_and_searches_what_the_script_says(tmp_path: Path) -> None:
    step.prepare(tmp_path / "step", QUICK.step, CHAT_TEMPLATE, tiny_llama(tmp_path / "model"))
    script = Script.read(tmp_path / "step")
    assert script is not None
    calls = [call for rollouts in script.calls.values() for rollout in rollouts for call in rollout]
    measured = run_ours(tmp_path / "step", QUICK.step)
    assert measured.generated == sum(map(len, calls))
    assert measured.searches == len(calls) - measured.rollouts > 0
    assert (tmp_path / "step/policy/model.safetensors").is_symlink()


def test_a_call_over_its_budget_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    short = replace(QUICK.step, call_tokens=3)
    with pytest.raises(ValueError, match=r"a call of the script has .* tokens, expected at most 3"):
        step.prepare(tmp_path / "step", short, CHAT_TEMPLATE, tiny_llama(tmp_path / "model"))
    assert not (tmp_path / "step").exists()


# The command ----------------------------------------------------------------------------------------------------------


def test_parts_are_checked() -> None:
    assert chosen("", is_quick=False) == ["decode", "vllm", "step", "training"]
    assert chosen("step, decode", is_quick=True) == ["step", "decode"]
    with pytest.raises(ValueError, match="--parts: found 'steps', expected some of decode, vllm, step, training"):
        chosen("decode,steps", is_quick=False)


def test_the_model_is_one_that_has_a_folder() -> None:
    with pytest.raises(ValueError, match=r"--model: unknown model 'smollm'\. Did you mean"):
        model_folder("smollm")
    with pytest.raises(ValueError, match=r"conf/model/tiny\.yaml: found kind 'tiny', expected 'pretrained'"):
        model_folder("tiny")


def test_a_model_folder_that_is_missing_is_refused_before_any_part(tmp_path: Path) -> None:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    with pytest.raises(DataError, match=r"models/Qwen2\.5-7B-Instruct: the model folder is missing"):
        model_folder("qwen2.5-7b", tmp_path)


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: Some CPU\n\nmodel\t: 3\n")
    assert processor(cpuinfo) == "Some CPU (family 26, model 2)"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_parts_run_to_their_tables() -> None:
    """Without TRL its part says so; vLLM is left out of a quick run."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_model", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for part in ("## decode", "## step", "## training", "share of that limit", "load average"):
        assert part in done.stdout, done.stdout + done.stderr
    assert "turns, decoding" not in done.stdout
    assert ("trl is not installed" in done.stdout) != ("CPU-seconds" in done.stdout), done.stdout + done.stderr
    assert "its process ended" not in done.stdout, done.stderr
