"""vLLM on CPU, for real: one engine for the whole file, against plain transformers and against `plain.py`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks import conf, parts
from tasks.generate import Call, Sampling, WeightsError, load
from tasks.generate.vllm import VllmConf, VllmGenerator, folder_logprobs
from tasks.model import load_policy
from tasks.train.loop import Trainer
from tests import skips, tiny

pytestmark = [pytest.mark.slow, pytest.mark.long, skips.needs_vllm]

ROOT = Path(__file__).parents[2]
GREEDY = Sampling(temperature=0.0, top_p=1.0, stop=(), seed=0)
SAMPLED = Sampling(temperature=1.0, top_p=1.0, stop=(), seed=7)
BUDGET = 160
CONF = VllmConf(
    max_model_len=8192,  # More than the model's positions: the smaller one holds.
    gpu_memory_utilization=0.3,
    cpu_kv_cache_gib=0.25,
    tensor_parallel_size=1,
    enforce_eager=True,
    block_size=32,
)
TEXT = ["<think> who wrote it </think> <search> the author of the book </search>", "<answer> Paris </answer>"]


def make_policy(folder: Path, seed: int, tied: bool, **sizes: Any) -> Path:
    """A random Qwen2 with a byte-level BPE tokenizer; weights large enough that logprobs differ clearly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(TEXT * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    torch.manual_seed(seed)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        **(small | {"num_key_value_heads": 1, "initializer_range": 0.12} | sizes),
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def perturb(source: Path, folder: Path, size: float) -> Path:
    """What an optimizer step does to a saved policy, without the optimizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def largest_gap(folder: Path, prompt: list[int], call: Call) -> float:
    """Against one plain transformers forward over prompt + call."""
    (expected,) = folder_logprobs(folder, [[*prompt, *call.token_ids]])
    tail = expected[len(prompt) - 1 :]
    assert len(tail) == len(call.logprobs) == len(call.token_ids)
    return max(abs(a - b) for a, b in zip(tail, call.logprobs, strict=True))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), seed=0, tied=True)


@pytest.fixture(scope="module")
def tokenizer(policy: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy)


def weights_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(sorted(load_file(folder / "model.safetensors").items()))


@dataclasses.dataclass
class Believed:
    """The reference: logprobs of the policy in the folder that a test says is the generator's."""

    folder: Path

    def __call__(self, probes: Sequence[Sequence[int]]) -> list[list[float]]:
        return folder_logprobs(self.folder, probes)


@pytest.fixture(scope="module")
def believed(policy: Path) -> Believed:
    return Believed(policy)


@pytest.fixture(scope="module")
def engine(policy: Path, believed: Believed) -> Iterator[VllmGenerator]:
    generator = VllmGenerator(policy, CONF, reference=believed)
    yield generator
    generator.shutdown()


@pytest.fixture
def generator(engine: VllmGenerator, policy: Path, believed: Believed) -> Iterator[VllmGenerator]:
    """The engine with the weights of `policy`, whatever a test loads meanwhile."""
    yield engine
    engine.wake()
    believed.folder = policy
    engine.update_weights(weights_of(policy))


def prompts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    ids = tokenizer(" ".join(TEXT * 12))["input_ids"]
    return [ids[n : n + length] for n in range(count)]


def test_logprobs_are_those_of_temperature_one(generator: VllmGenerator, policy: Path, tokenizer: Any) -> None:
    starts = prompts(tokenizer, 2, 20)
    for sampling in (GREEDY, SAMPLED, dataclasses.replace(SAMPLED, temperature=0.6, top_p=0.7)):
        session = generator.open(starts, 2, sampling, BUDGET)
        calls = session.generate([0, 1, 2, 3], [24, 24, 24, 24])
        for row, call in enumerate(calls):
            assert call.token_ids
            assert largest_gap(policy, starts[row // 2], call) < 1e-4


def test_greedy_equals_transformers(generator: VllmGenerator, policy: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    start = prompts(tokenizer, 1, 12)[0]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    ids = torch.tensor([start])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    written = wanted[0, len(start) :].tolist()
    if tokenizer.eos_token_id in written:
        written = written[: written.index(tokenizer.eos_token_id)]
    (call,) = generator.open([start], 1, GREEDY, BUDGET).generate([0], [40])
    assert list(call.token_ids) == written


def test_a_call_ends_with_the_token_that_completes_the_stop_string(generator: VllmGenerator, tokenizer: Any) -> None:
    start, rows = prompts(tokenizer, 1, 12)[0], range(16)
    frees = generator.open([start], 16, SAMPLED, BUDGET).generate(rows, [40] * 16)
    row, stop = next(found for r in rows for found in stops_inside(tokenizer, r, frees[r].token_ids))
    written = frees[row].token_ids
    wanted = next(n for n in range(1, 41) if stop in tokenizer.decode(written[:n]))
    stopping = dataclasses.replace(SAMPLED, stop=("never written", stop))
    call = generator.open([start], 16, stopping, BUDGET).generate(rows, [40] * 16)[row]
    assert call.stopped
    assert call.token_ids == written[:wanted]
    assert call.logprobs == pytest.approx(frees[row].logprobs[:wanted], abs=1e-5)


def stops_inside(tokenizer: Any, row: int, ids: tuple[int, ...]) -> Iterator[tuple[int, str]]:
    """Strings that begin in one written token and end before the last character of a later one."""
    pieces = [tokenizer.decode([i]) for i in ids]
    for n in range(4, len(ids)):
        text = "".join(pieces[n - 2 : n + 1])
        if text.isascii() and text.isprintable() and len(pieces[n]) > 1:
            yield row, text[:-1]


def test_end_of_text_is_not_part_of_a_call(generator: VllmGenerator, tokenizer: Any) -> None:
    (start,) = prompts(tokenizer, 1, 12)
    session = generator.open([start], 32, SAMPLED, BUDGET)
    calls = session.generate(range(32), [120] * 32)
    ended = [call for call in calls if len(call.token_ids) < 120]
    assert ended, "no row met the end of text: choose another seed"
    assert not any(call.stopped for call in calls)
    assert all(tokenizer.eos_token_id not in call.token_ids for call in calls)
    assert session.num_generated == sum(len(call.token_ids) for call in calls) + len(ended)


def test_turns_continue_exactly_what_was_written_and_appended(
    generator: VllmGenerator, policy: Path, tokenizer: Any
) -> None:
    starts = prompts(tokenizer, 2, 40)
    seen = tokenizer("<information> a book </information>")["input_ids"]
    session = generator.open(starts, 2, SAMPLED, BUDGET)
    first = session.generate([0, 1, 2, 3], [10, 9, 8, 7])
    session.close([1])
    session.append([0, 3], [seen, seen[:3]])
    before = session.num_prefilled
    second = session.generate([3, 0], [12, 12])
    read = session.num_prefilled - before
    for row, added, call in ((3, seen[:3], second[0]), (0, seen, second[1])):
        context = [*starts[row // 2], *first[row].token_ids, *added]
        assert largest_gap(policy, context, call) < 1e-4
    priors = [40 + len(first[row].token_ids) for row in (3, 0)]
    # All but the last token of each is cached, in whole blocks.
    assert read == sum(n - 32 * ((n - 1) // 32) for n in priors) + 3 + len(seen)
    with pytest.raises(ValueError, match="row 1: closed, 3 other rows are open"):
        session.generate([1], [4])


def test_a_prompt_group_is_prefilled_once(generator: VllmGenerator, tokenizer: Any) -> None:
    (start,) = prompts(tokenizer, 1, 97)
    session = generator.open([start], 8, SAMPLED, BUDGET)
    session.generate(range(8), [4] * 8)
    assert session.num_prefilled <= 97 + 7 * 1


def test_a_fork_reads_less_than_a_block_and_draws_like_its_own_row(
    generator: VllmGenerator, policy: Path, tokenizer: Any
) -> None:
    (start,) = prompts(tokenizer, 1, 97)
    seen = tokenizer("<information> a book </information>")["input_ids"]
    session = generator.open([start], 1, SAMPLED, BUDGET)
    (first,) = session.generate([0], [8])
    session.append([0], [seen])
    prefix = [*start, *first.token_ids, *seen]
    assert session.fork(0, 3) == [1, 2, 3]
    before = session.num_prefilled
    calls = session.generate([0, 1, 2, 3], [12] * 4)
    # At most the first of the four reads what is not in the cache yet; each of the others less than one block.
    assert session.num_prefilled - before <= len(prefix) - 96 + 3 * 32
    assert len({call.token_ids for call in calls}) == 4
    for call in calls:
        assert largest_gap(policy, prefix, call) < 1e-4
    alone = generator.open([start], 4, SAMPLED, BUDGET)
    alone.generate([3], [1])  # Its first call, as that of the forked row.
    alone._ids[3] = list(prefix)
    assert alone.generate([3], [12])[0].token_ids == calls[3].token_ids
    session.close([2])
    with pytest.raises(ValueError, match="row 2: closed, 3 other rows are open"):
        session.fork(2, 1)
    with pytest.raises(ValueError, match="found times=0"):
        session.fork(1, 0)
    session.close([0, 1, 3])
    with pytest.raises(ValueError, match="row 1: the session is closed"):
        session.fork(1, 1)


def test_draws_follow_the_seed_and_the_row(generator: VllmGenerator, tokenizer: Any) -> None:
    (start,) = prompts(tokenizer, 1, 12)

    def play(sampling: Sampling) -> list[tuple[int, ...]]:
        return [c.token_ids for c in generator.open([start], 4, sampling, BUDGET).generate(range(4), [16] * 4)]

    once = play(SAMPLED)
    assert play(SAMPLED) == once
    assert len(set(once)) == 4
    assert play(dataclasses.replace(SAMPLED, seed=8)) != once


def test_rows_never_exceed_their_budget(generator: VllmGenerator, tokenizer: Any) -> None:
    (start,) = prompts(tokenizer, 1, 20)
    session = generator.open([start], 2, dataclasses.replace(SAMPLED, seed=3), 30)
    calls = session.generate([0, 1], [500, 4])
    assert len(calls[0].token_ids) <= 10
    assert len(calls[1].token_ids) <= 4
    with pytest.raises(ValueError, match=r"row 1: 520 tokens|row 1: .* exceed max_total_tokens=30"):
        session.append([1], [start * 25])
    full = 30 - 20 - len(calls[1].token_ids)
    session.append([1], [start[:full]])
    with pytest.raises(ValueError, match="room for 0 tokens"):
        session.generate([1], [1])
    with pytest.raises(ValueError, match="max_position_embeddings=256 is below"):
        generator.open([start], 1, GREEDY, 257)
    with pytest.raises(ValueError, match="prompt 0: found 20 tokens"):
        generator.open([start], 1, GREEDY, 20)


def test_new_weights_are_really_used(
    generator: VllmGenerator, believed: Believed, policy: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """The head of a tied model is the part that a reload leaves old on CPU."""
    (start,) = prompts(tokenizer, 1, 65)
    open_before = generator.open([start], 2, SAMPLED, BUDGET)
    old = open_before.generate([0, 1], [20, 20])
    believed.folder = new_policy = perturb(policy, tmp_path / "new", 0.03)
    assert generator.parity_gap() > 0.1  # The engine still holds the old weights.
    generator.update_weights(weights_of(new_policy))
    assert generator.parity_gap() < 1e-4
    with pytest.raises(WeightsError, match="changed while this session was open"):
        open_before.generate([0], [4])
    session = generator.open([start], 1, SAMPLED, BUDGET)
    (call,) = session.generate([0], [20])
    assert session.num_prefilled == 65, "states of the old weights were reused"
    assert largest_gap(new_policy, start, call) < 1e-4
    assert largest_gap(new_policy, start, old[0]) > 1e-2


def test_three_rl_steps_with_vllm(
    generator: VllmGenerator, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are handed over after each update; generator and trainer agree on every token of every step."""
    model, tokenizer = load_policy(policy)
    trained = tiny.make_policy(model, tokenizer, conf=tiny.optimizer(lr=3e-3))
    monkeypatch.setattr(generator, "_reference", trained.sequence_logprobs)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    budgets = {"max_turns": 1, "max_call_tokens": 6, "max_prompt_tokens": 120, "max_total_tokens": 150}
    method = dataclasses.replace(tiny.make_method("grpo", tokenizer), rewards=(tiny.EvenFirst(),))
    trainer = Trainer(
        conf=tiny.train_conf(num_steps=3, minibatches=2, old_logprobs="sampler"), method=method, policy=trained,
        critic=None, generator=generator, player=tiny.make_player(generator, tokenizer, **budgets),
        validator=tiny.make_player(generator, tokenizer, **budgets), questions=[tiny.question(i) for i in range(16)],
        validation=[], seed=0, scratch=tmp_path, log=lambda step, metrics: None,
    )  # fmt: skip
    gaps = [row["metrics"]["logprob_gap_max"] for row in trainer.run().history]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    assert max(float((tensor - before[name]).abs().max()) for name, tensor in model.state_dict().items()) > 1e-3
    assert not list(tmp_path.rglob("*.safetensors.partial")) + list(tmp_path.rglob("weights"))
    trained.export(tmp_path / "now")
    assert generator.parity_gap() < 1e-4
    monkeypatch.setattr(generator, "_reference", Believed(policy))
    assert generator.parity_gap() > 1e-3
    probes = generator._probes
    ours, theirs = trained.sequence_logprobs(probes), folder_logprobs(tmp_path / "now", probes)
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_more_prompts_than_are_read_at_once(generator: VllmGenerator, tokenizer: Any) -> None:
    """None is read in pieces: on a CPU vLLM ends at a piece of a row that draws with a seed of its own."""
    texts = prompts(tokenizer, 150, 150)
    session = generator.open(texts, 1, Sampling(temperature=1.0, top_p=1.0, stop=(), seed=0), BUDGET)
    calls = session.generate(range(len(texts)), [2] * len(texts))
    assert session.num_prefilled > 4096, "vLLM's default on a CPU"
    assert len(calls) == len(texts)
    assert session.num_generated >= len(texts)


def test_ten_rl_steps_in_bfloat16_of_a_model_with_a_hundred_million_weights(tmp_path: Path) -> None:
    """Qwen2.5's shape at the size of the small scale: bfloat16 on both sides, weights proved after each update."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    folder = make_policy(tmp_path / "start", 0, True, **sizes, num_key_value_heads=3, initializer_range=0.02)
    model, tokenizer = load_policy(folder)
    assert sum(weight.numel() for weight in model.parameters()) > 100_000_000
    trained = tiny.make_policy(model, tokenizer, conf=tiny.optimizer(lr=1e-4), dtype="auto")
    before = {name: weight.detach().clone() for name, weight in trained.trained.items()}
    conf = tiny.train_conf(num_steps=10, rollouts_per_step=4, old_logprobs="sampler", dtype="auto", checkpoint_every=99)
    generator = dataclasses.replace(CONF, cpu_kv_cache_gib=0.25).start(folder, "auto", trained)
    try:
        assert generator.precision == ("bfloat16" if trained.dtype == torch.bfloat16 else "float32")
        budgets = {"max_turns": 1, "max_call_tokens": 6, "max_prompt_tokens": 120, "max_total_tokens": 150}
        trainer = Trainer(
            conf=conf, method=dataclasses.replace(tiny.make_method("grpo", tokenizer), rewards=(tiny.EvenFirst(),)),
            policy=trained, critic=None, generator=generator,
            player=tiny.make_player(generator, tokenizer, **budgets),
            validator=tiny.make_player(generator, tokenizer, **budgets),
            questions=[tiny.question(i) for i in range(16)], validation=[], seed=0, scratch=tmp_path / "scratch",
            log=lambda step, metrics: None,
        )  # fmt: skip
        history = [row["metrics"] for row in trainer.run().history]
        assert len(history) == 10
        assert not any(torch.equal(weight, before[name]) for name, weight in trained.trained.items())
        assert max(row["logprob_gap_mean"] for row in history) < 0.02
        assert generator.parity_gap() <= generator.tolerance
    finally:
        generator.shutdown()


def test_an_update_without_effect_is_caught(
    generator: VllmGenerator,
    believed: Believed,
    policy: Path,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    believed.folder = new_policy = perturb(policy, tmp_path / "new", 0.03)
    with monkeypatch.context() as patch:
        patch.setattr(generator._llm, "collective_rpc", lambda *_, **__: [None])  # Success, and nothing done.
        with pytest.raises(WeightsError, match=r"differ from the policy's by up to .* at most 0\.001 in float32"):
            generator.update_weights(weights_of(new_policy))
    (start,) = prompts(tokenizer, 1, 12)
    with pytest.raises(WeightsError, match="holds unknown weights"):
        generator.open([start], 1, GREEDY, BUDGET)
    generator.update_weights(weights_of(new_policy))
    assert generator.open([start], 1, GREEDY, BUDGET).generate([0], [2])[0].token_ids


def test_a_source_that_is_not_the_policy_leaves_the_engine_as_it_is(
    generator: VllmGenerator, policy: Path, tokenizer: Any
) -> None:
    session = generator.open(prompts(tokenizer, 1, 12), 1, GREEDY, BUDGET)
    weights = list(weights_of(policy))
    (name, first), *others = weights
    for spoiled, words in (
        (others, f"{name} is missing"),
        ([*weights, weights[1]], "comes twice"),
        ([*weights, ("more", first)], "more is unknown"),
        ([(name, first[:1]), *others], f"{name} has shape"),
    ):
        with pytest.raises(WeightsError, match=words):
            generator.update_weights(iter(spoiled))
    assert session.generate([0], [2])[0].token_ids


def test_nothing_plays_between_sleep_and_proof(generator: VllmGenerator, policy: Path, tokenizer: Any) -> None:
    """Also on a CPU, where the weights survive: an update lets it play again, and nothing else does."""
    start = prompts(tokenizer, 1, 12)
    session = generator.open(start, 1, GREEDY, BUDGET)
    played = session.generate([0], [9])
    generator.sleep()
    generator.sleep()
    with pytest.raises(WeightsError, match=r"sleeps\. Wake it"):
        generator.open(start, 1, GREEDY, BUDGET)
    with pytest.raises(WeightsError, match="sleeps and cannot take weights"):
        generator.update_weights(weights_of(policy))
    generator.wake()
    generator.wake()
    with pytest.raises(WeightsError, match="changed while this session was open"):
        session.generate([0], [2])
    with pytest.raises(WeightsError, match="holds unknown weights: it slept"):
        generator.open(start, 1, GREEDY, BUDGET)
    generator.update_weights(weights_of(policy))
    assert generator.open(start, 1, GREEDY, BUDGET).generate([0], [9]) == played


def test_weights_lost_in_sleep_are_asked_for(
    generator: VllmGenerator, policy: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where vLLM frees them."""
    start, calls = prompts(tokenizer, 1, 12), []
    monkeypatch.setattr(VllmGenerator, "_frees_memory", True)
    monkeypatch.setattr(generator._llm, "sleep", lambda level: calls.append(f"sleep {level}"))
    monkeypatch.setattr(generator._llm, "wake_up", lambda: calls.append("wake"))
    generator.sleep()
    generator.wake()
    with pytest.raises(WeightsError, match="holds unknown weights: it slept"):
        generator.open(start, 1, GREEDY, BUDGET)
    generator.update_weights(weights_of(policy))
    assert generator.open(start, 1, GREEDY, BUDGET).generate([0], [2])
    assert calls == ["sleep 2", "wake"]


def test_agrees_with_the_plain_generator(generator: VllmGenerator, policy: Path, tokenizer: Any) -> None:
    plain = pytest.importorskip("tasks.generate.plain")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    other = plain.PlainGenerator(model, tokenizer)
    starts, seen = prompts(tokenizer, 3, 30), tokenizer("<information> a book </information>")["input_ids"]
    (free,) = generator.open([starts[0]], 1, GREEDY, BUDGET).generate([0], [30])
    pieces = [tokenizer.decode([i]) for i in free.token_ids]
    stop = next(p for p in pieces[3:] if p.isascii() and p.isprintable())
    played = []
    for player in (generator, other):
        session = player.open(starts, 2, dataclasses.replace(GREEDY, stop=(stop,)), BUDGET)
        first = session.generate([0, 2, 4], [30, 30, 5])
        session.append([0, 4], [seen, seen[:2]])
        played.append([*first, *session.generate([0, 4], [30, 30])])
    assert any(call.stopped for call in played[0])
    for fast, slow in zip(*played, strict=True):
        assert (fast.token_ids, fast.stopped) == (slow.token_ids, slow.stopped)
        assert fast.logprobs == pytest.approx(slow.logprobs, abs=1e-4)


def _running(pids: set[int]) -> list[int]:
    """Those that still run; Python's own resource tracker lives as long as we do."""
    import psutil

    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline()):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def test_untied_embeddings_and_shutdown(tmp_path: Path) -> None:
    """A second engine, because tied and untied heads take different ways through a reload."""
    import psutil

    believed = Believed(make_policy(tmp_path / "policy", seed=2, tied=False))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    generator = VllmGenerator(believed.folder, CONF, reference=believed)
    started = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert started
    try:
        for number in range(2):
            believed.folder = perturb(believed.folder, tmp_path / f"new-{number}", 0.03)
            generator.update_weights(weights_of(believed.folder))
            assert generator.parity_gap() < 1e-4
    finally:
        generator.shutdown()
        generator.shutdown()
    deadline = time.monotonic() + 30  # vLLM kills a process that lingers; the kernel may need a moment to end it.
    while _running(started) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _running(started)
    with pytest.raises(WeightsError):
        generator.open([[1, 2]], 1, GREEDY, BUDGET)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("dtype", "float32", "unknown key 'dtype'"),
        ("block_size", 20, "a multiple of 16"),
        ("gpu_memory_utilization", 1.5, "more than 0, at most 1"),
        ("max_modellen", 5, "unknown key 'max_modellen'. Did you mean 'max_model_len'"),
    ],
)
def test_settings_are_strict(key: str, value: object, words: str) -> None:
    tree = {**conf.section("generator", "vllm", ROOT), key: value}
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        parts.make("generate", tree, "conf/generator/vllm.yaml")


def test_the_shipped_settings_fill() -> None:
    settings = load("vllm", ROOT)
    assert isinstance(settings, VllmConf)
    assert settings.enforce_eager


def test_a_folder_without_tokenizer_is_refused_before_anything_starts(policy: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        os.link(policy / name, tmp_path / name)
    with pytest.raises(ValueError, match="no tokenizer found"):
        VllmGenerator(tmp_path, CONF)
