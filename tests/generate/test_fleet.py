"""One, two and three generators play the same trajectories, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks import identity
from tasks.crew import CrewError
from tasks.generate import Sampling, WeightsError, handover
from tasks.generate.fleet import FleetConf, FleetGenerator
from tasks.generate.rows import RowsConf, RowsGenerator
from tasks.model import export_folder
from tasks.train.handing import Handed
from tests.agent.test_free_play import Slow, play
from tests.generate.test_plain import PROMPTS
from tests.tiny import let_search, make_model, make_policy

pytestmark = pytest.mark.usefixtures("forked_workers")
DRAWN = Sampling(1.0, 1.0, (), 5)


@contextmanager
def fleet(folder: Path, generators: int, trainee: Any = None) -> Iterator[FleetGenerator]:
    made = FleetConf(generators).start(folder, "float32", trainee)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    export_folder(searching(tokenizer), tokenizer, path)
    return path


def searching(tokenizer: Any) -> Any:
    return let_search(make_model(tokenizer, seed=3, tied=False), tokenizer, softness=1.5)


def test_any_number_of_generators_plays_the_same(folder: Path, tokenizer: Any) -> None:
    alone = RowsGenerator(searching(tokenizer), tokenizer)
    wanted, lock_step, _ = play(alone, tokenizer, Slow(0, 0), 0)
    assert sum(t.num_searches for t in wanted) > 3
    for generators in (1, 2, 3):
        with fleet(folder, generators) as made:
            for overlap, rows in ((0, 64), (0, 8), (4, 64), (6, 8)):
                found, player, _ = play(made, tokenizer, Slow(0.03, generators), overlap, rows)
                assert found == wanted
                assert player.cost == lock_step.cost


def test_forks_and_closed_rows(folder: Path, tokenizer: Any) -> None:
    def forked(generator: Any) -> list[Any]:
        session = generator.open(PROMPTS, 2, DRAWN, 64)
        calls = session.generate(range(8), [4] * 8)
        session.append([3], [[7, 8]])
        new = session.fork(3, 2)
        session.close([0, 1])
        calls += session.generate([3, *new, 7], [5] * 4)
        session.close([*range(2, 8), *new])
        return calls

    wanted = forked(RowsGenerator(searching(tokenizer), tokenizer))
    with fleet(folder, 2) as made:
        assert forked(made) == wanted
        assert forked(made) == wanted


def test_new_weights_reach_every_generator_and_are_proved(folder: Path, tokenizer: Any) -> None:
    policy = make_policy(make_model(tokenizer, seed=8, tied=False), tokenizer)
    with fleet(folder, 2, policy) as made:
        made.update_weights(policy.weights())
        found = made.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4)
        other = RowsGenerator(make_model(tokenizer, seed=8, tied=False), tokenizer)
        assert found == other.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4)


def test_a_weight_that_is_stale_missing_or_not_sent_to_the_end_is_named(folder: Path, tokenizer: Any) -> None:
    """And nothing plays before all generators have proved new weights."""
    model = searching(tokenizer)
    policy = make_policy(model, tokenizer)
    stale = "model.layers.1.mlp.up_proj.weight"

    with fleet(folder, 2, policy) as made:
        old = {name: tensor.clone() for name, tensor in policy.weights()}
        moved(model)
        weights = {name: tensor.clone() for name, tensor in policy.weights()}
        names = list(handover.stored_shapes(folder))
        sources = (
            (
                (weights | {stale: old[stale]}).items(),
                rf"generator 0 computes .* up to \S+ from the policy's .*proof: {stale}\.",
            ),
            ([(name, weights[name]) for name in names[:-1]], f"{names[-1]} is missing, and 0 others"),
            ([(name, weights[name]) for name in names[:9]], f"{names[9]} is missing, and {len(names) - 10} others"),
            ([(name, weights[name][:1]) for name in names], f"{names[0]} has shape .*not a shard of it"),
        )
        for source, words in sources:
            with pytest.raises(WeightsError, match=words):
                made.update_weights(source)
            with pytest.raises(WeightsError, match="holds unknown weights: it slept, or its last update failed"):
                made.open(PROMPTS, 1, DRAWN, 64)

        made.update_weights(weights.items())
        computed = made.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4)
        assert computed == RowsGenerator(model, tokenizer).open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4)


def moved(model: Any, size: float = 0.05) -> None:
    """What an update does to the weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def test_nothing_plays_between_sleep_and_proof(folder: Path, tokenizer: Any) -> None:
    policy = make_policy(searching(tokenizer), tokenizer)
    with fleet(folder, 2, policy) as made:
        wanted = made.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4)
        made.sleep()
        with pytest.raises(WeightsError, match=r"the fleet sleeps\. Wake it"):
            made.open(PROMPTS, 1, DRAWN, 64)
        with pytest.raises(WeightsError, match="sleeps and cannot take weights"):
            made.update_weights(policy.weights())
        made.wake()
        with pytest.raises(WeightsError, match="holds unknown weights: it slept"):
            made.open(PROMPTS, 1, DRAWN, 64)
        made.update_weights(policy.weights())
        assert made.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4) == wanted


def kill(made: FleetGenerator, rank: int) -> None:
    os.kill(made.crew.members[rank].process.pid, signal.SIGKILL)


@pytest.mark.parametrize("after", [0, 1, 3, 7])
def test_the_others_play_the_rows_of_a_generator_that_dies(after: int, folder: Path, tokenizer: Any) -> None:
    """In whatever call it dies, texts and counts are those of a fleet in which none does."""
    alone = RowsGenerator(searching(tokenizer), tokenizer)
    wanted, lock_step, _ = play(alone, tokenizer, Slow(0, 0), 0)
    with fleet(folder, 3) as made:
        hear, heard = made.crew.hear, []

        def killing() -> Any:
            heard.append(len(heard))
            if len(heard) == after + 1:
                kill(made, 1)
            return hear()

        made.crew.hear = killing  # type: ignore[method-assign]
        found, player, _ = play(made, tokenizer, Slow(0.03, 1), 4, 64)
        assert found == wanted
        assert player.cost == lock_step.cost
        assert made.crew.there == [0, 2]
        # Nothing trains here, so the next session has three again.
        assert play(made, tokenizer, Slow(0.03, 2), 4, 64)[0] == wanted
        assert made.crew.there == [0, 1, 2]


def test_forks_and_observations_survive_a_death(folder: Path, tokenizer: Any) -> None:
    def forked(generator: Any, die: Any) -> list[Any]:
        session = generator.open(PROMPTS, 2, DRAWN, 64)
        calls = session.generate(range(8), [4] * 8)
        session.append([3], [[7, 8]])
        new = session.fork(3, 2)
        die()
        calls += session.generate([3, *new, 7], [5] * 4)
        session.close([*range(8), *new])
        return [*calls, session.num_prefilled, session.num_generated]

    wanted = forked(RowsGenerator(searching(tokenizer), tokenizer), lambda: None)
    for rank in (0, 1):
        with fleet(folder, 2) as made:
            assert forked(made, partial(kill, made, rank)) == wanted


def test_a_generator_that_is_lost_is_replaced_with_the_next_weights(folder: Path, tokenizer: Any) -> None:
    policy = make_policy(make_model(tokenizer, seed=8, tied=False), tokenizer)
    other = RowsGenerator(make_model(tokenizer, seed=8, tied=False), tokenizer)
    wanted = other.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4)
    with fleet(folder, 2, policy) as made:
        made.update_weights(policy.weights())
        kill(made, 1)
        assert made.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4) == wanted
        assert made.crew.there == [0]
        made.update_weights(policy.weights())
        assert made.crew.there == [0, 1]
        assert made.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4) == wanted


def test_the_last_generator_that_dies_is_named(folder: Path) -> None:
    with fleet(folder, 2) as made:
        session = made.open(PROMPTS, 4, DRAWN, 400)
        for rank in (0, 1):
            kill(made, rank)
        with pytest.raises(CrewError, match=r"worker [01] on localhost, in advance: it was ended by signal 9"):
            session.generate(range(16), [300] * 16)


def test_a_plan_names_the_files_of_the_generators() -> None:
    modules = identity.modules_of(FleetConf(2))
    assert modules == {"tasks.generate.fleet", "tasks.generate.rows"}
    assert "tasks/generate/fleet_worker.py" in identity.Sources(identity.ROOT).closure(modules)


@pytest.mark.parametrize("generators", [0, 2])
def test_adapters_alone_are_handed_over_and_proved(generators: int, folder: Path, tokenizer: Any) -> None:
    """To a copy in this process, or to a fleet: it then plays what it plays with whole weights."""
    policy = make_policy(searching(tokenizer), tokenizer, rank=2, reference=False)
    given = policy.adapters()
    assert given is not None
    with torch.no_grad():
        for name, factor in given.factors:
            if name.endswith("/B"):  # These begin at 0, and A at random.
                factor += 0.1 * torch.randn(factor.shape, generator=torch.Generator().manual_seed(len(name)))

    told = SimpleNamespace(causal_lm=None, sequence_logprobs=policy.sequence_logprobs)
    start = FleetConf(generators).start if generators else RowsConf().start
    made = start(folder, "float32", None if generators else told)
    try:
        made.update_weights(policy.weights())
        expected = made.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4)
        if isinstance(made, FleetGenerator):
            made.trainee = policy

        handed = Handed()
        handed.over(policy, made)
        num_bytes = handed.take()["handed_bytes"]
        assert num_bytes == sum(factor.nbytes for _, factor in policy.adapters().factors)  # type: ignore[union-attr]
        assert num_bytes < 0.2 * sum(tensor.nbytes for _, tensor in policy.weights())
        played = made.open(PROMPTS, 1, DRAWN, 64).generate(range(4), [8] * 4)
        assert [call.token_ids for call in played] == [call.token_ids for call in expected]
        for call, other in zip(played, expected, strict=True):
            assert call.logprobs == pytest.approx(other.logprobs, abs=1e-5)

        (name, first), *others = policy.adapters().factors  # type: ignore[union-attr]
        for factors, words in (
            (others, f"new weights: {name} is missing, and 0 others"),
            ([(name, first[:1]), *others], f"new weights: {name} has shape .*not a shard"),
        ):
            with pytest.raises(WeightsError, match=words):
                made.update_weights(replace(given, factors=factors))
        if isinstance(made, FleetGenerator):
            wrong = replace(given, factors=policy.adapters().factors, scale=given.scale / 2)  # type: ignore[union-attr]
            with pytest.raises(WeightsError, match=r"generator 0 computes log-probabilities that are up to"):
                made.update_weights(wrong)
    finally:
        made.shutdown()
