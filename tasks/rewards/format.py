"""Is a response well formed? The structure rule of Search-R1 v0.3 (search_r1 section 3)."""

from __future__ import annotations

import re

from tasks.agent.grammar import TAGS

_TAG = re.compile(r"<(/?)(" + "|".join(TAGS) + r")>")
_NEXT = {
    "start": {"think"},
    "think": {"search", "answer"},
    "search": {"information"},
    "information": {"think"},
    "answer": set(),
}


def is_well_formed(response: str) -> bool:
    """Blocks think, search, information, think, ..., think, answer, closed, with only white space between them.

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
