"""Two workers of DeepSpeed (ZeRO-3, gloo) hand their weights to vLLM on a CPU, to one engine and to a fleet of two."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tasks import cluster, parts
from tasks.crew import CrewError
from tasks.engine import Objective, Policy
from tasks.engine.deepspeed import DeepSpeedEngine
from tasks.generate import Call, Generator, WeightsError, handover
from tasks.generate.fleet import FleetConf, FleetGenerator
from tasks.generate.vllm import VllmGenerator
from tasks.model import LoraConf, load_tokenizer
from tasks.rl.losses import Normalizer
from tasks.train.handing import Handed
from tasks.train.loop import Trainer
from tests import forked, skips, tiny
from tests.engine.test_deepspeed import EXACT, TRAINING
from tests.engine.test_plain import batch_of
from tests.generate.test_vllm import BUDGET, CONF, SAMPLED, _running, make_policy, prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    skips.needs_vllm,
]
MATRIX = 64 * 64 * 4
"""Bytes of the smallest matrix of a layer."""


@contextmanager
def workers(folder: Path, forking: Path, lora: LoraConf = LoraConf()) -> Iterator[Policy]:  # noqa: B008
    """A policy that two processes divide, forked ones; each has a part of every weight."""
    training = dataclasses.replace(TRAINING, critic=None, lora=lora)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # Generators, which start vLLM, are not forked.
            patch.setattr(cluster, "load", lambda: forked.cluster_of(forking))
            policy, _ = stack.enter_context(DeepSpeedEngine(workers=2, stage=3).open(folder, training))
        yield policy


def rising(batch: Any, logprobs: Tensor, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that moves all weights; workers import it from here."""
    return logprobs.square().sum(), {}


def learn(policy: Policy) -> None:
    batch = batch_of(7)
    policy.update(batch, EXACT, Objective(rising, Normalizer.of(batch.loss_mask)))


def copied(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def train(policy: Policy, generator: Generator, tokenizer: Any, scratch: Path, log: Any) -> list[float]:
    """Three steps, each with an update and a hand-over; the largest gap between the log-probabilities of each."""
    budgets = {"max_turns": 1, "max_call_tokens": 6, "max_prompt_tokens": 120, "max_total_tokens": 150}
    conf = tiny.train_conf(
        num_steps=3, policy=tiny.optimizer(lr=3e-3), old_logprobs="sampler", checkpoint_every=99, record_trajectories=0
    )
    trainer = Trainer(
        conf=conf, method=dataclasses.replace(tiny.make_method("grpo", tokenizer), rewards=(tiny.EvenFirst(),)),
        policy=policy, critic=None, generator=generator, player=tiny.make_player(generator, tokenizer, **budgets),
        validator=tiny.make_player(generator, tokenizer, **budgets), questions=[tiny.question(i) for i in range(16)],
        validation=[], seed=0, scratch=scratch, log=log,
    )  # fmt: skip
    return [row["metrics"]["logprob_gap_max"] for row in trainer.run().history]


def gap(policy: Policy, starts: Sequence[list[int]], calls: Sequence[Call]) -> float:
    """Largest distance of a reported logprob of a written token from what the policy computes."""
    texts = [[*start, *call.token_ids] for start, call in zip(starts, calls, strict=True)]
    computed = policy.sequence_logprobs(texts)
    return max(
        abs(a - b)
        for start, call, logprobs in zip(starts, calls, computed, strict=True)
        for a, b in zip(call.logprobs, logprobs[len(start) - 1 :], strict=True)
    )


def files(folder: Path) -> set[Path]:
    """Those that could hold a weight."""
    return {path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= MATRIX}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the start policy, and with all temporary files of the processes that are started here."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        make_policy(folder / "policy", seed=0, tied=True)
        yield folder


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    return load_tokenizer(base / "policy")


@pytest.fixture(scope="module")
def handed(base: Path, forking: Path) -> Iterator[tuple[Policy, VllmGenerator]]:
    with workers(base / "policy", forking) as policy:
        generator = CONF.start(base / "policy", "float32", policy)
        yield policy, generator
        generator.shutdown()


def test_each_update_reaches_vllm_through_memory(
    handed: tuple[Policy, VllmGenerator], base: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, generator = handed
    llm, paths, new_files = generator._llm, [], []
    call, before, start = llm.collective_rpc, files(base), copied(policy)

    def watched(method: str, args: Any) -> Any:
        paths.append(str(Path(args[0]).readlink()))
        return call(method, args=args)

    monkeypatch.setattr(llm, "collective_rpc", watched)
    gaps = train(policy, generator, tokenizer, base / "run", lambda *_: new_files.append(files(base) - before))
    assert len(gaps) == 3
    assert max(gaps) < 1e-4

    # Steps 2 and 3 were played with weights that were handed over; the last weights are played here.
    assert len(paths) == 3
    assert all(path.startswith("/memfd:weights") for path in paths)
    assert new_files == [set()] * len(new_files)
    starts = [prompt for prompt in prompts(tokenizer, 2, 20) for _ in range(2)]
    calls = generator.open(starts[::2], 2, SAMPLED, BUDGET).generate(range(4), [16] * 4)
    assert gap(policy, starts, calls) < 1e-4
    assert max(float((tensor - start[name]).abs().max()) for name, tensor in policy.weights()) > 1e-3


def test_a_weight_that_is_withheld_stale_or_not_sent_to_the_end_is_named(
    handed: tuple[Policy, VllmGenerator], base: Path, tokenizer: Any
) -> None:
    policy, generator = handed
    old = copied(policy)
    generator.update_weights(old.items())
    learn(policy)
    new = copied(policy)
    names, stale = list(handover.stored_shapes(base / "policy")), "model.layers.1.mlp.down_proj.weight"
    half = names[: len(names) // 2]
    missed = f"{names[len(half)]} is missing, and {len(names) - len(half) - 1} others"

    missing = [(name, tensor) for name, tensor in new.items() if name != stale]
    for source, words in (
        (missing, f"new weights: {stale} is missing, and 0 others"),
        ([(name, new[name]) for name in half], f"new weights: {missed}"),
        ([(names[0], new[names[0]][:9])], f"new weights: {names[0]} has shape .*not a shard"),
    ):
        with pytest.raises(WeightsError, match=words):
            generator.update_weights(iter(source))

    for name in (stale, "model.embed_tokens.weight"):
        with pytest.raises(
            WeightsError, match=rf"differ from the policy's by up to .*Unchanged since the last proof: {name}\."
        ):
            generator.update_weights((new | {name: old[name]}).items())
        with pytest.raises(WeightsError, match="holds unknown weights"):
            generator.open(prompts(tokenizer, 1, 12), 1, SAMPLED, BUDGET)
    generator.update_weights(policy.weights())
    assert generator.open(prompts(tokenizer, 1, 12), 1, SAMPLED, BUDGET).generate([0], [2])


def test_only_adapters_go_over_where_only_adapters_are_trained(
    handed: tuple[Policy, VllmGenerator], base: Path, forking: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's worker adds them to the start policy, which it reads from the folder again."""
    _, generator = handed
    call, names = generator._llm.collective_rpc, []

    def watched(method: str, args: Any) -> Any:
        with safe_open(args[0], framework="pt") as file:
            names.append(set(file.keys()))
        return call(method, args=args)

    monkeypatch.setattr(generator._llm, "collective_rpc", watched)
    with workers(base / "policy", forking, LoraConf(rank=2)) as policy:
        monkeypatch.setattr(generator, "_reference", policy.sequence_logprobs)
        counter, start = Handed(), prompts(tokenizer, 2, 20)
        for number in range(3):
            if number:
                learn(policy)
            counter.over(policy, generator)
            adapters = policy.adapters()
            assert adapters is not None
            factors = {name: factor.clone() for name, factor in adapters.factors}
            assert names[-1] == factors.keys()
            assert counter.take() == {"handed_bytes": sum(factor.nbytes for factor in factors.values())}
            calls = generator.open(start, 1, SAMPLED, BUDGET).generate([0, 1], [16, 16])
            assert gap(policy, start, calls) < 1e-4

        learn(policy)
        stale = f"{adapters.names[0]}/B"
        newer = {name: factor.clone() for name, factor in policy.adapters().factors}  # type: ignore[union-attr]
        for given, words in (
            (newer | {stale: factors[stale]}, rf"differ from the policy's .*proof: {stale}\."),
            ({name: factor for name, factor in newer.items() if name != stale}, f"{stale} is missing, and 0 others"),
        ):
            with pytest.raises(WeightsError, match=words):
                generator.update_weights(dataclasses.replace(adapters, factors=given.items()))


def play(generator: Generator, tokenizer: Any, after: Callable[[], object] = lambda: None) -> list[Any]:
    """Two turns of eight rows; `after` runs between them, when every row has read an observation."""
    seen = tokenizer("<information> a book </information>")["input_ids"]
    session = generator.open(prompts(tokenizer, 4, 20), 2, dataclasses.replace(SAMPLED, seed=3), BUDGET)
    calls = session.generate(range(8), [12] * 8)
    session.append([0, 3, 6], [seen, seen[:3], seen])
    after()
    calls += session.generate(range(8), [12] * 8)
    session.close(range(8))
    return calls


def assert_equal(played: Sequence[Call], wanted: Sequence[Call]) -> None:
    """The same texts. Log-probabilities may differ in their last bits with what is computed beside a row."""
    assert [call.token_ids for call in played] == [call.token_ids for call in wanted]
    for one, other in zip(played, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def process_of(made: FleetGenerator, rank: int) -> Any:
    import psutil

    return psutil.Process(made.crew.members[rank].process.pid)


def kill_engine(made: FleetGenerator, rank: int) -> None:
    """vLLM's own process; its parent, the generator, lives on and would wait for it."""
    (engine,) = [child for child in process_of(made, rank).children() if "EngineCore" in " ".join(child.cmdline())]
    engine.kill()


def require_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 60
    while _running(pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _running(pids)


def test_two_engines_play_what_one_plays_and_leave_nothing_when_they_die(
    base: Path, forking: Path, tokenizer: Any
) -> None:
    """That another one takes a lost one's place is tested with plain generators, whose start takes no minute."""
    conf = FleetConf(2, {parts.KIND: "vllm", **dataclasses.asdict(CONF)})
    with workers(base / "policy", forking) as policy:
        made = conf.start(base / "policy", "float32", policy)
        try:
            first = play(made, tokenizer)
            assert len({call.token_ids for call in first}) > 8

            old = copied(policy)
            learn(policy)
            stale = "model.layers.0.self_attn.v_proj.weight"
            with pytest.raises(WeightsError, match=rf"generator 0: .* differ from the policy's .*proof: {stale}\."):
                made.update_weights((copied(policy) | {stale: old[stale]}).items())
            with pytest.raises(WeightsError, match="the fleet holds unknown weights"):
                play(made, tokenizer)
            made.update_weights(policy.weights())
            wanted = play(made, tokenizer)
            assert [call.token_ids for call in wanted] != [call.token_ids for call in first]

            # A generator dies between two turns of its rows; the other one plays them again, and then is alone.
            of_lost = {child.pid for child in process_of(made, 1).children(recursive=True)}
            assert of_lost
            killed = made.crew.members[1].process.pid
            assert_equal(play(made, tokenizer, lambda: os.kill(killed, signal.SIGKILL)), wanted)
            assert made.crew.there == [0]
            require_gone(of_lost)
            assert_equal(play(made, tokenizer), wanted)

            # Now the engine of the last one.
            of_lost = {child.pid for child in process_of(made, 0).children(recursive=True)}
            with pytest.raises(CrewError, match="worker 0 on localhost, in "):
                play(made, tokenizer, lambda: kill_engine(made, 0))
            require_gone(of_lost)
        finally:
            made.shutdown()
