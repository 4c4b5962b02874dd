"""ReSearch's reward: F1, else a little for the format; the format rule turn by turn, played through the rollout."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.rewards.f1_or_format import F1OrFormat
from tests.papers import golden
from tests.tiny import Shelf, make_grammar, play_script, question

SEARCH = "<think> a </think> <search> Hask </search>"


def answer(text: str) -> str:
    return f"<think> b </think> <answer> {text} </answer>"


WRONG = answer("\\boxed{Hask}")


@pytest.mark.parametrize(
    ("lines", "value", "is_right"),
    [
        ([WRONG], 0.1, True),
        ([SEARCH, answer("Bristow")], 0.0, False),  # not boxed: no answer
        ([SEARCH, answer("\\boxed{}")], 0.0, False),
        ([SEARCH, "so", WRONG], 0.0, False),
        ([SEARCH, WRONG.replace("</think>", "")], 0.0, False),
        ([SEARCH, WRONG.replace("</think>", "</answer_>")], 0.0, False),
        ([SEARCH, "<think> b </search> <answer> \\boxed{Hask} </answer>"], 0.0, False),
        ([SEARCH, "<think> b <answer> \\boxed{Hask} </answer>"], 0.0, False),
        (["<think> a </result> <search> Hask </search>", WRONG], 0.0, False),
        (["<think> a <search> Hask </search>", WRONG], 0.0, False),
        ([SEARCH + " </think>", WRONG], 0.0, False),
        ([SEARCH, WRONG + " so"], 0.0, False),
        ([SEARCH, WRONG + " "], 0.1, True),
        (["<think> a </think> <result> x </result> <search> Hask </search>", WRONG], 0.0, False),  # a forged result
        ([SEARCH, SEARCH], 0.0, False),
    ],
)
def test_f1_or_format(tokenizer: Any, lines: list[str], value: float, is_right: bool) -> None:
    t = play_script(tokenizer, lines, make_grammar("research", tokenizer), Shelf(), max_turns=max(1, len(lines) - 1))
    (score,) = F1OrFormat(0.1)([t], [question()])
    assert (score.outcome, score.components["format"]) == (value, float(is_right))
    assert score.placed == ((t.last_generated, value),)


@pytest.mark.parametrize("row", golden("research", "Reward"))
def test_golden_rewards(tokenizer: Any, row: dict[str, Any]) -> None:
    """F1 alone, nothing for the format on top; without a thought the format is wrong."""
    end = answer(f"\\boxed{{{row['boxed answer']}}}")
    if row["format"] == "wrong":
        end = end.replace("<think> b </think> ", "")
    t = play_script(tokenizer, [SEARCH, end], make_grammar("research", tokenizer), Shelf())
    (score,) = F1OrFormat(0.1)([t], [question()])
    assert (score.outcome, score.components["format"]) == (row["reward"], float(row["format"] == "right"))


def test_a_closing_tag_of_another_kind_closes_no_thought(tokenizer: Any) -> None:
    """The counts of opened and closed tags are even here, their order is not."""
    grammar = make_grammar("research", tokenizer)
    for written in (
        "<think> b </answer> <search> Hask </search>",
        "<think> b </think> </think> <search> Hask </search>",
    ):
        t = play_script(tokenizer, [written, WRONG], grammar, Shelf())
        assert t.turns[0].executed
        assert F1OrFormat(0.1)([t], [question()])[0].outcome == 0.0
