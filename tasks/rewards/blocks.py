"""Finds tagged blocks, such as an answer or evidence, in what the policy itself wrote.

Each call is read by itself: a block that opens in one call and closes in another would enclose an observation, which
the policy did not write. Observations are never read, so no passage can hold a block.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from tasks import text
from tasks.types import Trajectory

EVIDENCE = "original_evidence"


def blocks(trajectory: Trajectory, tag: str) -> list[str]:
    """The stripped contents of all pairs of this tag, in order; pairs do not nest.

    R-Search qa_f1.py:82 (QingFei1/R-Search@ecba08d; docs/methods/r_search.md)
    """
    return [content.strip() for turn in trajectory.turns for content in _pair(tag).findall(turn.text)]


def is_well_formed(trajectory: Trajectory, tag: str) -> bool:
    """Whether there is exactly one opening and one closing tag, they make a pair, and its content is not blank.

    R-Search Section 3.2.2 (arXiv 2506.04185; docs/methods/r_search.md)
    """
    found = blocks(trajectory, tag)
    return len(found) == 1 and bool(found[0]) and _counts(trajectory, (f"<{tag}>", f"</{tag}>")) == [1, 1]


def evidence_of(trajectory: Trajectory) -> str:
    """The evidence that is scored, empty if there is none."""
    found = blocks(trajectory, EVIDENCE) if trajectory.num_searches else []
    return found[-1] if found else ""


def is_verbatim(trajectory: Trajectory, evidence: str) -> bool:
    """Whether the evidence stands in one retrieved passage word for word; False without evidence.

    It pays nothing. Evidence that mixes words of several passages has a large `copied_share` and is not verbatim.
    """
    words = f" {' '.join(words_of(evidence))} "
    passages = (hit.text for turn in trajectory.turns for hit in turn.hits)
    return bool(words.strip()) and any(words in f" {' '.join(words_of(passage))} " for passage in passages)


def words_of(passage: str) -> list[str]:
    """The words of a text, normalised as answers are."""
    return text.normalize(passage).split()


def _counts(trajectory: Trajectory, strings: Sequence[str]) -> list[int]:
    return [sum(turn.text.count(string) for turn in trajectory.turns) for string in strings]


@functools.cache
def _pair(tag: str) -> re.Pattern[str]:
    return re.compile(f"<{tag}>(.*?)</{tag}>", re.DOTALL)
