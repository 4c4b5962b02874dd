"""Checks that written hops fit their question: their number, their completeness, their chain and the final answer.

The check is the same for all writers. A question whose answer is not that of its last hop (such as a comparison of two
hops) fails it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.augment import Rejection
from tasks.data.decomposition import REFERENCE
from tasks.text import normalize
from tasks.types import Hop, Question


def fault(question: Question, hops: Sequence[Hop]) -> Rejection | None:
    """The first thing that is wrong with the hops written for a question, None if they are coherent.

    `hop_count`: other than in the decomposition. `empty_text`: a sub-question, sub-answer or all queries of a hop
    normalise to nothing. `unresolved`: a `#k` is left. `missing_link`: the decomposition's hop refers to an earlier
    answer and the sub-question does not name it. `final_answer`: the last sub-answer is no gold answer.
    """
    given = question.decomposition
    if len(hops) != len(given):
        return Rejection("coherence", "hop_count", f"found {len(hops)} hops, expected {len(given)}")
    for number, (hop, old) in enumerate(zip(hops, given, strict=True), 1):
        if found := _hop_fault(hop, old, hops[: number - 1]):
            return Rejection("coherence", *found, hop=number)
    if normalize(hops[-1].answer) not in set(map(normalize, question.answers)):
        detail = f"found {hops[-1].answer!r}, expected one of {list(question.answers)!r:.200}"
        return Rejection("coherence", "final_answer", detail, hop=len(hops))
    return None


def _hop_fault(hop: Hop, given: Hop, before: Sequence[Hop]) -> tuple[str, str] | None:
    """Reason and detail."""
    for name, texts in (("question", [hop.question]), ("answer", [hop.answer]), ("queries", hop.queries)):
        if not any(map(normalize, texts)):
            return "empty_text", f"{name}: found {list(texts)!r:.200}, expected a letter or digit"
    for text in (hop.question, hop.answer, *hop.queries):
        if REFERENCE.search(text):
            return "unresolved", f"found {text!r:.200}, expected the answer that #k stands for"
    for number in map(int, REFERENCE.findall(given.question)):
        if not 1 <= number <= len(before):
            return "unresolved", f"the decomposition refers to #{number}, expected an earlier hop"
        # At the start of a word: normalisation makes "Bern's" to "berns".
        if f" {normalize(before[number - 1].answer)}" not in f" {normalize(hop.question)}":
            return "missing_link", f"found {hop.question!r:.200}, expected it to name {before[number - 1].answer!r}"
    return None
