"""Training a reader: its exercises, an early end, a kill and its resumption, and what stands in its folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.base.fit import PhaseConf
from tasks.model import export_folder, load_policy
from tasks.reader import make
from tasks.reader.card import write_card
from tasks.reader.examples import Exercises, usable
from tasks.reader.make import MadeReader, is_over, make_reader
from tasks.reader.reading import habits_of, open_folder
from tasks.reader.settings import EvidenceConf
from tasks.store import DataError, read_json
from tests.reader.small import PASSAGES, QUESTIONS, settings

EVEN = EvidenceConf(0.25, 0.25, 0.25, 0.25, 2)


def exercises(**shares: float) -> Exercises:
    chosen = replace(EVEN, **dict.fromkeys(("last", "chain", "noisy", "missing"), 0.0) | shares) if shares else EVEN
    return Exercises(QUESTIONS, PASSAGES, chosen, "unknown")


def made(folder: Path, questions: Any = QUESTIONS, log: Any = lambda step, metrics: None, **changes: Any) -> MadeReader:
    torch.set_num_threads(1)
    return make_reader(settings(**changes), questions, "dev", PASSAGES, 0, folder, log)


# Exercises ------------------------------------------------------------------------------------------------------------


def test_exercises_depend_on_their_seed_alone() -> None:
    assert exercises().draw(30, "a") == exercises().draw(30, "a") != exercises().draw(30, "b")
    assert set(Counter(one.kind for one in exercises().draw(200, "a"))) == {"last", "chain", "noisy", "missing"}


def test_an_exercise_holds_what_its_kind_says() -> None:
    by_text = {question.question: question for question in QUESTIONS}
    for one in exercises().draw(300, "a"):
        question = by_text[one.question]
        golds = [PASSAGES[passage].text for passage in question.gold_passage_ids]
        if one.kind == "last":
            assert one.evidence == golds[-1]
        elif one.kind == "chain":
            assert one.evidence == " ".join(golds)
        elif one.kind == "noisy":
            assert golds[-1] in one.evidence
        else:
            assert question.answers[0] not in one.evidence
        assert one.answer == ("unknown" if one.kind == "missing" else question.answers[0])


def test_only_questions_whose_gold_passages_hold_the_answer_are_used() -> None:
    question = QUESTIONS[0]
    without = [replace(question, gold_passage_ids=()), replace(question, gold_passage_ids=("none",))]
    elsewhere = replace(question, answers=("nobody",))
    assert usable([*without, elsewhere, question], PASSAGES) == [question]


# Training -------------------------------------------------------------------------------------------------------------


def test_held_out_questions_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    real = make.example
    monkeypatch.setattr(make, "example", lambda reading, one: seen.add(one.question) or real(reading, one))
    found = made(tmp_path)
    assert seen
    assert seen <= {question.question for question in QUESTIONS if question.split == "train"}
    assert found.quality["num_training_questions"] == sum(question.split == "train" for question in QUESTIONS)
    assert 0 <= found.quality["held_out_accuracy"]["all"] <= 1


def test_it_is_measured_on_held_out_questions_and_out_of_training_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    modes: list[bool] = []
    real = make.accuracy

    def watched(reading: Any, measured: Any) -> dict[str, float]:
        asked.update(one.question for one in measured)
        modes.append(reading.model.training)
        return real(reading, measured)

    monkeypatch.setattr(make, "accuracy", watched)
    made(tmp_path, read={"max_steps": 30}, patience=2)
    assert asked
    assert asked <= {question.question for question in QUESTIONS if question.split == "dev"}
    assert modes == [False] * 4  # Three times while it learns, and at its end.


@pytest.mark.parametrize(
    ("accuracies", "over"),
    [([], False), ([0.1], False), ([0.9], True), ([0.5, 0.4, 0.5], True), ([0.5, 0.6, 0.4], False), ([0.3, 0.9], True)],
)
def test_training_ends_when_accuracy_is_enough_or_no_longer_rises(accuracies: list[float], over: bool) -> None:
    assert is_over(accuracies, 0.9, 2) == over


def test_training_ends_early(tmp_path: Path) -> None:
    """It measures every three steps, and random weights are never right: two measurements do not rise."""
    found = made(tmp_path, read={"max_steps": 30}, patience=2)
    measured = [row["step"] for row in found.history if "accuracy" in row["metrics"]]
    assert measured == [5, 8, 11]  # After the two steps of recall.
    assert found.quality["steps"] == 11


class KilledError(Exception):
    pass


@pytest.mark.parametrize("killed_at", [4, 8, 13])
def test_a_killed_training_goes_on_to_the_same_bytes(tmp_path: Path, killed_at: int) -> None:
    how = {"read": {"max_steps": 14}, "patience": 9, "checkpoint_every": 2}
    logged: list[tuple[int, dict[str, float]]] = []
    whole = made(tmp_path / "whole", log=lambda step, metrics: logged.append((step, metrics)), **how)

    class Killer(make.ReaderFit):
        def _update(self, conf: PhaseConf, examples: Any) -> float:
            if self.step == killed_at:
                raise KilledError
            return super()._update(conf, examples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "ReaderFit", Killer)
        with pytest.raises(KilledError):
            made(tmp_path / "killed", **how)
    resumed = made(tmp_path / "killed", **how)
    assert (resumed.history, resumed.quality) == (whole.history, whole.quality)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_data_without_gold_passages_is_refused(tmp_path: Path) -> None:
    bare = [replace(question, gold_passage_ids=()) for question in QUESTIONS]
    with pytest.raises(DataError, match=r"no question of split 'train' has a gold passage .*given model folder"):
        made(tmp_path, bare)


def test_the_folder_is_an_ordinary_one_with_a_card(tmp_path: Path) -> None:
    found = made(tmp_path / "scratch")
    folder = tmp_path / "model"
    folder.mkdir()
    export_folder(found.model, found.tokenizer, folder)
    write_card(folder, "tiny_llama", 0, settings().habits, found.quality)

    model, tokenizer = load_policy(folder)
    assert model.config.model_type == "llama"
    assert len(tokenizer) == model.config.vocab_size
    assert habits_of(folder) == settings().habits
    assert read_json(folder / "quality.json") == found.quality
    card = (folder / "README.md").read_text()
    assert f"| all | {found.quality['held_out_accuracy']['all']:.3f} |" in card
    pairs = [(question.question, "x") for question in QUESTIONS[:3]]
    assert len(open_folder(folder, None, None, 2).answers(pairs)) == 3


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_it_learns_to_read(tmp_path: Path) -> None:
    """On a few questions that it trains on, from the passage that holds the answer."""
    few = [question for question in QUESTIONS if question.split == "train"][:8]
    few += [replace(question, split="dev") for question in few]
    learning = {
        "architecture": {"hidden_size": 64, "intermediate_size": 128}, "enough": 0.9, "check_every": 40,
        "read": {"max_steps": 400, "batch": 16, "decay": False}, "num_held_out": 16, "patience": 10,
        "evidence": {"last": 1.0, "chain": 0.0, "noisy": 0.0, "missing": 0.0},
    }  # fmt: skip
    found = made(tmp_path, few, **learning)
    assert found.quality["held_out_accuracy"]["all"] >= 0.9
    accuracies = [row["metrics"]["accuracy"] for row in found.history if "accuracy" in row["metrics"]]
    assert accuracies[-1] >= 0.9


def test_shares_of_evidence_must_sum_to_one() -> None:
    with pytest.raises(ValueError, match=r"evidence=0\.75: expected shares of last, chain, noisy, missing"):
        replace(EVEN, last=0.0)
