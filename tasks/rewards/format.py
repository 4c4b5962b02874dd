"""Is a response well formed? The rules of Search-R1's script v0.3 and of StepSearch."""

from __future__ import annotations

import re

from tasks.agent.grammar import TAGS
from tasks.types import Trajectory

_TAG = re.compile(r"<(/?)(" + "|".join(TAGS) + r")>")
_THOUGHT = re.compile(r"<think>((?:(?!<search>).)*?)</think>", re.DOTALL)
_NEXT = {
    "start": {"think"},
    "think": {"search", "answer"},
    "search": {"information"},
    "information": {"think"},
    "answer": set(),
}


def is_well_formed(response: str) -> bool:
    """Whether closed blocks think, search, information, think, ..., answer follow each other, white space between them.

    Search-R1 qa_em_format.py:49 (PeterGriffinJin/Search-R1@a14dc3a; docs/methods/search_r1.md)

    >>> is_well_formed("<think>a</think> <answer>b</answer>")
    True
    >>> is_well_formed("<think>a</think> so <answer>b</answer>")
    False
    """
    state, inside, position = "start", False, 0
    for tag in _TAG.finditer(response):
        closes, name = bool(tag[1]), tag[2]
        if inside:
            if not closes or name != state:
                return False
        elif closes or name not in _NEXT[state] or response[position : tag.start()].strip():
            return False
        state, inside, position = name, not closes, tag.end()
    return state == "answer" and not inside and not response[position:].strip()


def follows_search_rule(trajectory: Trajectory) -> bool:
    """StepSearch's format: queries only in proper search pairs, a thought before some search, one answer at the end.

    It reads what the policy wrote in its own turns and the environment's record of executed searches, so that a forged
    observation proves nothing. A broken tag such as `</search)` makes no pair. The thought must be closed, hold a
    letter or a digit, and stand before an executed search in the same turn. Only white space may follow the answer.
    (The released code demands only an answer pair at the end.)
    StepSearch Section 2.3.1 (arXiv 2505.15107; docs/methods/stepsearch.md)
    """
    searches = [turn.text for turn in trajectory.turns if turn.executed]
    if trajectory.status != "answered" or not any(map(_thinks_first, searches)):
        return False
    written = "".join(turn.text for turn in trajectory.turns)
    return (
        written.count("<search") == written.count("</search") == len(searches)
        and written.count("<answer") == written.count("</answer") == 1
        and written.rstrip().endswith("</answer>")
    )


def _thinks_first(text: str) -> bool:
    """Whether a search of this turn follows a closed thought that holds a letter or a digit."""
    thoughts = ((match[1].rpartition("<think>")[2], match.end()) for match in _THOUGHT.finditer(text))
    return any(any(map(str.isalnum, thought)) and "<search>" in text[end:] for thought, end in thoughts)
