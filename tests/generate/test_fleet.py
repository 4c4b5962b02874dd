"""One, two and three generators play the same trajectories, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import identity
from tasks.crew import CrewError
from tasks.generate import Sampling, WeightsError
from tasks.generate.fleet import FleetConf, FleetGenerator
from tasks.generate.rows import RowsGenerator
from tasks.model import export_folder
from tests.agent.test_free_play import Slow, play
from tests.generate.test_plain import PROMPTS
from tests.tiny import make_model, make_policy

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
    """A random model that often writes tags. Its weights say so, because another process reads them from a file.

    Number 0 of a hidden state is the same for all tokens and layers, so the output head can add to a token's logit.
    """
    model = make_model(tokenizer, seed=3, tied=False)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.3
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        head[:, 0] = 0.0
        for tag, weight in {" <search>": 4.0, " </search>": 4.5, " <answer>": 2.0, " </answer>": 3.5}.items():
            (token,) = tokenizer.encode(tag)
            head[token, 0] = weight / 1.5
    return model


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

        weights = {name: tensor.clone() for name, tensor in policy.weights()}
        weights["model.layers.1.mlp.up_proj.weight"] += 0.5
        with pytest.raises(WeightsError, match=r"generator 0 computes log-probabilities that are up to \S+ from the"):
            made.update_weights(weights.items())
        del weights["lm_head.weight"]
        with pytest.raises(
            CrewError, match=r"worker [01] on localhost, in end_weights: new weights: lm_head.weight is"
        ):
            made.update_weights(weights.items())


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
