"""The reward model as a service: its scores, what it cannot read, and a model that was exchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks import parts
from tasks.reward_model.model import load, place_logits
from tasks.reward_model.reading import encode
from tasks.services import Resources
from tasks.services.reward_model import FrozenRewardModel, InProcessRewardModel
from tasks.store import DataError
from tasks.trained import Trained
from tasks.types import Action, Question, Trajectory, Turn
from tests.reward_model.small import start, stored

QUESTION = Question("q", "toy", "train", "Who is 1 ?", ("Hask",), 1)
SEARCH = Turn(Action("search", "x"), text=" look 1", observation=" found", executed=True)
INVALID = Turn(Action("invalid"), text=" so", observation=" again")
ANSWER = Turn(Action("answer", "Hask"), text=" answer Hask")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def model(root: Path) -> Trained:
    return stored(root, "small", 3, start(root / "start"))


def played(*turns: Turn) -> Trajectory:
    return Trajectory("q", "g", (1,), (1,), (True,), (0.0,), turns, "answered", "Hask")


def opened(root: Path, model: Trained) -> FrozenRewardModel:
    with InProcessRewardModel("small").opened(Resources(root, root, models={"small": model})) as service:
        return service


def test_each_turn_has_the_probability_at_its_place(root: Path, model: Trained) -> None:
    service = opened(root, model)
    plays = [played(SEARCH, INVALID, SEARCH, ANSWER), played(ANSWER), played(SEARCH)]
    found = service.probabilities(plays, [QUESTION] * 3)
    assert [tuple(f is None for f in one.after) for one in found] == [(False, True, False, False), (False,), (False,)]
    again, tokenizer = load(root / model.folder, is_new=False)
    one = encode(tokenizer, service.card.placeholder_id, QUESTION.question, plays[0].turns, 600)
    with torch.no_grad():
        (logits,) = place_logits(again, [one])
    wanted = logits.sigmoid().tolist()
    assert [found[0].before, *(f for f in found[0].after if f is not None)] == pytest.approx(wanted, abs=1e-6)
    assert len(set(wanted)) == 4
    assert found[0].before == pytest.approx(found[1].before, abs=1e-6)


def test_turns_beyond_the_length_that_it_reads_have_no_score(root: Path, model: Trained) -> None:
    service = opened(root, model)
    long = played(SEARCH, replace(SEARCH, text=" look" * 700), ANSWER)
    (found,) = service.probabilities([long], [QUESTION])
    assert [f is None for f in found.after] == [False, True, True]


def test_a_model_that_was_exchanged_is_refused(root: Path, model: Trained) -> None:
    with pytest.raises(DataError, match=r"artifacts/models/small-3/manifest\.json: found \w+, expected sha256 0"):
        opened(root, Trained(model.folder, "0" * 64))


def test_it_names_a_model() -> None:
    with pytest.raises(ValueError, match="model='': expected the name of a file of conf/reward_model/"):
        parts.make("services", {"kind": "reward_model", "model": ""}, "x")
