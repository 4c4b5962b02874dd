"""The structure rule of Search-R1 v0.3 against a second implementation, one regular expression."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.agent.grammar import TAGS
from tasks.rewards.format import is_well_formed

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
