"""StepSearch's own part, the reward on sub-answers, and its values as released."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.rewards.answer import AnswerReward
from tasks.rewards.key import KeyReward
from tasks.rewards.search_turns import SearchTurnReward
from tasks.rewards.sub_answer import SubAnswerReward
from tasks.types import Hop, Scores
from tests.papers import golden
from tests.tiny import Shelf, load_method, make_grammar, play_script, question

ROOT = Path(__file__).parents[2]
ASKED = replace(question(), decomposition=(Hop("Which town?", "New Hask"), Hop("Who rules it?", "Bristow")))
SEARCH = "<think> so </think> <search> Hask </search>"
END = "<think> so </think> <answer> Bristow </answer>"
FIRST, SECOND = "<sub_answer1> New Hask </sub_answer1>", "<sub_answer2> Bristow </sub_answer2>"


def score(tokenizer: Any, *lines: str) -> Scores:
    t = play_script(tokenizer, lines, make_grammar("stepsearch", tokenizer), Shelf(), ASKED)
    (found,) = SubAnswerReward(0.618)([t], [ASKED])
    assert [place for place, _ in found.placed] == [t.last_generated]
    return found


@pytest.mark.parametrize("row", golden("stepsearch", "Sub-answers"))
def test_golden_sub_answers(tokenizer: Any, row: dict[str, Any]) -> None:
    said = [f"<sub_answer{i}> {text} </sub_answer{i}>" for i, text in enumerate(row["sub-answers"], 1) if text]
    found = score(tokenizer, SEARCH, f"<think> so </think> {''.join(said)} {END}")
    assert found.components["sub_answer"] == pytest.approx(row["score"], abs=1e-6)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (FIRST + SECOND, 1.0),
        (FIRST, 0.5),  # a missing one scores 0
        (SECOND + FIRST, 1.0),
        (FIRST.replace("New ", "") + SECOND, (2 / 3 + 1) / 2),
        (FIRST.replace("1", "2") + SECOND.replace("2", "1"), 0.0),
        ("<sub_answer1> x </sub_answer1>" + FIRST, 0.5),  # the last of a number
        (FIRST + "<sub_answer1> x </sub_answer1>", 0.0),
        ("<sub_answer1> New Hask </sub_answer2>", 0.0),
        ("<sub_answer1> New Hask", 0.0),
        ("<sub_answer3> Bristow </sub_answer3>", 0.0),
        ("<sub_answer> New Hask </sub_answer>", 0.0),
    ],
)
def test_sub_answers(tokenizer: Any, said: str, value: float) -> None:
    found = score(tokenizer, SEARCH, f"<think> so </think> {said} {END}")
    assert found.outcome == pytest.approx(0.618 * value)
    assert found.components["sub_answer"] == pytest.approx(value)


def test_sub_answers_of_several_turns_and_of_a_wrong_format(tokenizer: Any) -> None:
    assert score(tokenizer, FIRST + SEARCH, SECOND + END).outcome == pytest.approx(0.618)
    assert score(tokenizer, FIRST + SECOND + END).outcome == 0.0  # not searched
    assert score(tokenizer, FIRST + SEARCH, SECOND + END + " so").outcome == 0.0


def test_no_decomposition(tokenizer: Any) -> None:
    t = play_script(tokenizer, [SEARCH, FIRST + END], make_grammar("stepsearch", tokenizer), Shelf())
    assert SubAnswerReward(0.618)([t], [question()])[0].outcome == 0.0


def test_as_written_down() -> None:
    rewards = {name: load_method(name, "paper").rewards for name in (
        "stepsearch", "ppo_f1", "stepsearch_ow_key", "stepsearch_ow_steps", "stepsearch_wo_penalty",
    )}  # fmt: skip
    answer = AnswerReward("f1", gated=True)
    assert rewards["stepsearch"] == (answer, KeyReward(0.618), SearchTurnReward(1.0, 1.0, 1.0))
    assert rewards["ppo_f1"] == (answer,)
    assert rewards["stepsearch_ow_key"] == (answer, KeyReward(0.618))
    assert rewards["stepsearch_ow_steps"] == (answer, SearchTurnReward(1.0, 1.0, 1.0))
    assert rewards["stepsearch_wo_penalty"] == (answer, KeyReward(0.618), SearchTurnReward(1.0, 0.0, 1.0))


def test_as_released_is_four_values(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    path = tmp_path / "conf" / "method" / "released.yaml"
    rewards = {
        "answer": {"wrong_format": -1.0},
        "key": {"as_released": True},
        "search_turns": {"scale": 1.6, "as_released": True},
    }
    path.write_text(yaml.safe_dump({"extends": "stepsearch", "title": "x", "rewards": rewards}))
    method = load_method("released", "laptop", root=tmp_path)
    assert method.rewards == (
        AnswerReward("f1", gated=True, wrong_format=-1.0), KeyReward(0.618, as_released=True),
        SearchTurnReward(1.0, 1.0, 1.6, as_released=True),
    )  # fmt: skip
