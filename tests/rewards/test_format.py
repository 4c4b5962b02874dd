"""The structure rule of Search-R1 v0.3 against a second implementation, one regular expression."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.agent.grammar import TAGS
from tasks.rewards.format import follows_search_rule, is_well_formed
from tasks.types import Action, Trajectory, Turn

_INSIDE = r"(?:(?!</?(?:think|search|information|answer)>).)*"


def _block(name):
    return rf"<{name}>{_INSIDE}</{name}>\s*"


WHOLE = re.compile(
    rf"\s*(?:{_block('think')}{_block('search')}{_block('information')})*{_block('think')}{_block('answer')}", re.DOTALL
)
BLOCKS = [f"<{name}> x </{name}>" for name in TAGS]
PIECES = [*BLOCKS * 3, *(f"<{slash}{name}>" for name in TAGS for slash in ("", "/")), " ", "\n", "x", "<THINK>", "<"]
TURN = '<think> a </think>\n<search>q</search>\n\n<information>Doc 1(Title: "t") x\n</information>\n\n'
END = "<think>\nb\n</think> <answer>c</answer>"


@pytest.mark.parametrize("text", [END, TURN + END, TURN * 4 + END, f"\n {END} \n", "<think></think><answer></answer>"])
def test_well_formed(text):
    assert is_well_formed(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        TURN,
        "x" + END,
        END + "x",
        END + END,
        "<answer>c</answer>",
        "<think>b</think>",
        "<think>b</think> so <answer>c</answer>",
        "<think>b</think><think>b</think><answer>c</answer>",
        "<think>b</think><search>q</search>" + END,  # a search that was never answered
        "<think>b</think><information>i</information>" + END,
        "<think>b</think><search>q</search><information>i</information><answer>c</answer>",
        "<think>b<answer>c</answer></think>",
        "<think>b</think><answer>c",
        "<think>b<answer>c</answer>",
        "b</think><answer>c</answer>",
        "<think>b</think><answer><search>c</search></answer>",
        "<think>b</think><answer>c</answer></answer>",
        "<think>b <think> b</think></think><answer>c</answer>",
        "<Think>b</Think><answer>c</answer>",
        END + "<think>b</think>",
    ],
)
def test_not_well_formed(text):
    assert not is_well_formed(text)


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.booleans(), st.integers(0, 2))
def test_agrees_with_one_regular_expression(middle, is_ended, num_turns):
    text = TURN * num_turns + middle + (END if is_ended else "")
    assert is_well_formed(text) == (WHOLE.fullmatch(text) is not None)


# StepSearch's rule -------------------------------------------------------------------------------------------------


def trajectory(*texts):
    """Turns with these texts; a turn with a proper search was executed, unless the text says `invalid`."""
    turns = []
    for text in texts:
        is_search = re.search(r"<search>.*?</search>", text, re.DOTALL) is not None
        kind = "search" if is_search else "answer" if "</answer>" in text else "invalid"
        turns.append(Turn(Action(kind), 0, 1, 1, text=text, executed=is_search))
    status = "answered" if turns[-1].action.kind == "answer" else "open"
    return Trajectory("q", "g", (), (1,), (True,), (0.0,), tuple(turns), status, "x")


SEARCH = "<think> need it </think> <search> q </search>"
ANSWER = "<think> so </think> <answer> x </answer>"


def slow_rule(t):
    """Letter by letter: the tags of each turn in order, broken ones included."""
    if t.status != "answered":
        return False
    thought = False
    for number, turn in enumerate(t.turns):
        is_last = number == len(t.turns) - 1
        tags = re.findall(r"</?(?:search|answer)[>\W]?", turn.text)
        if turn.executed:
            if tags != ["<search>", "</search>"]:
                return False
            before = turn.text[: turn.text.index("<search>")]
            for start in range(len(before)):
                if before.startswith("<think>", start):
                    stop = before.find("</think>", start)
                    if stop >= 0 and "<think>" not in before[start + 7 : stop]:
                        thought |= re.search(r"[^\W_]", before[start + 7 : stop]) is not None
        elif is_last:
            if tags != ["<answer>", "</answer>"] or turn.text.rstrip()[-9:] != "</answer>":
                return False
        elif tags:
            return False
    return thought


@pytest.mark.parametrize(
    ("texts", "holds"),
    [
        ((SEARCH, ANSWER), True),
        ((SEARCH, "nothing to see", SEARCH, ANSWER), True),
        (("<search> q </search>", SEARCH, ANSWER), True),
        ((SEARCH, "<answer> x </answer> \n"), True),
        ((ANSWER,), False),
        (("<search> q </search>", ANSWER), False),  # The only thought is the answer's.
        (("<think></think> <search> q </search>", ANSWER), False),
        (("<think> \n </think> <search> q </search>", ANSWER), False),
        (("<think>\u200b\u2060</think> <search> q </search>", ANSWER), False),  # Nothing that one can see.
        (("<think> . _ </think> <search> q </search>", ANSWER), False),
        (("<think><think></think> <search> q </search>", ANSWER), False),
        (("<think> _ </think> <think> 東 </think> <search> q </search>", ANSWER), True),
        (("<think> a <search> q </search>", "</think> <answer> x </answer>"), False),
        (("<search> q </search> <think> late </think>", ANSWER), False),
        ((SEARCH, "<search> q </search)", ANSWER), False),  # a broken closing tag
        ((SEARCH, "<search) q </search)", ANSWER), False),
        ((SEARCH, "<answer> y <answer> x </answer>"), False),
        ((SEARCH, "<answer> x </answer> and so on"), False),
        ((SEARCH, SEARCH), False),
    ],
)
def test_search_rule_by_hand(texts, holds):
    t = trajectory(*texts)
    assert follows_search_rule(t) is holds
    assert slow_rule(t) is holds


WORDS = [
    "<think>",
    "</think>",
    "<think> a </think>",
    "<search> q </search>",
    "<search)",
    "</search",
    "x",
    " ",
    "<answer>",
]


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join), max_size=4))
def test_search_rule_agrees_with_the_slow_one(texts):
    turns = [text for text in texts if text.count("<search>") <= 1]
    t = trajectory(*turns, ANSWER)
    assert follows_search_rule(t) is slow_rule(t)
