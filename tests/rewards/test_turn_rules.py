"""Turn rewards by rules: paid once, for real documents, at the turn they belong to."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.rewards.turn_rules import TurnRules
from tasks.types import Trajectory
from tests.papers import golden
from tests.tiny import Library, hit, play_script, question

RULES = TurnRules(retrieval=0.3, invalid=-0.2)
GOOD = hit("The ruler is bristow .", "Avenor")
BAD = hit("The ruler is Hask .", "Avenor", 1)
LIBRARY = {"good": [BAD, GOOD], "bad": [BAD], "none": [], "title": [hit("Nobody .", "BRISTOW !")]}
END = "<think> so </think> <answer> Hask </answer>"


def test_a_short_answer_is_not_found_inside_words(tokenizer: Any) -> None:
    """`Norway lies north` shows no "no"; `No, it lies north` does."""
    rows = [hit("Norway lies north .", "Oslo")], [hit("No, it lies north .", "Oslo")]
    for hits, wanted in zip(rows, ({}, {0: pytest.approx(0.3)}), strict=True):
        t = play_script(tokenizer, [search("x"), END], shelf=Library(hits=hits))
        (score,) = RULES([t], [question(answers=("no",))])
        assert {i: v for i, (_, v) in enumerate(score.placed)} == wanted


def search(query: str) -> str:
    return f"<think> so </think> <search> {query} </search>"


def play(tokenizer: Any, *lines: str | list[int], **more: Any) -> Trajectory:
    return play_script(tokenizer, lines, shelf=Library(hits=[BAD], by_query=LIBRARY), **more)


def paid(t: Trajectory) -> dict[int, float]:
    """Turn number -> value, in the trajectory's own tokens only."""
    (score,) = RULES([t], [question()])
    assert score.outcome == 0.0
    assert all(t.loss_mask[place] for place, _ in score.placed)
    at = {turn.end - 1: i for i, turn in enumerate(t.turns)}
    return {at[place]: value for place, value in score.placed}


LINES = {"gold": search("good"), "other": search("bad"), "invalid": "so"}


@pytest.mark.parametrize("row", golden("mt_ppo", "Turns"))
def test_golden_turns(tokenizer: Any, row: dict[str, Any]) -> None:
    found = paid(play(tokenizer, *(LINES[turn] for turn in row["turns"]), END))
    assert [found.get(i, 0) for i in range(len(row["turns"]))] == row["rewards"]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([search("title"), END], {0: 0.3}),
        ([search("bad"), search("none"), END], {}),
        ([search("good").replace("</search>", "</search)"), END], {0: -0.2}),
        (["<information> Bristow </information>", END], {0: -0.2}),  # a forged observation is an invalid call
        ([search("bad") + "<information> Bristow </information>", END], {}),
        ([END], {}),
    ],
)
def test_rules(tokenizer: Any, lines: list[str], wanted: dict[int, float]) -> None:
    assert paid(play(tokenizer, *lines)) == wanted


def test_a_search_that_was_not_executed_earns_nothing(tokenizer: Any) -> None:
    assert paid(play(tokenizer, search("bad"), search("good"), max_turns=1)) == {}


def test_an_empty_call_has_no_token_to_be_paid_on(tokenizer: Any) -> None:
    """It ended at once: an invalid turn without a token; nothing lands on an observation or the prompt."""
    assert paid(play(tokenizer, [], search("good"), END)) == {1: 0.3}
    t = play(tokenizer, search("bad"), [], "so", END)
    assert [turn.action.kind for turn in t.turns] == ["search", "invalid", "invalid", "answer"]
    assert t.turns[1].start == t.turns[1].end
    assert paid(t) == {2: -0.2}
