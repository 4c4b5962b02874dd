"""Another model's answers and what it gains from evidence, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tasks.records.read_answers import ReadAnswer
from tasks.store import DataError
from tasks.tool.answers import answered
from tasks.tool.gains import EVIDENCE, HEADER, gains, markdown, plain
from tasks.types import Question

HOPS = (1, 2, 2)
QUESTIONS = [Question(f"q{i}", "world", "test", f"Q {i}?", (f"answer {i}",), hops) for i, hops in enumerate(HOPS)]


def rows(ems: dict[str, str]) -> list[ReadAnswer]:
    """Source -> exact match of each question, a digit each; F1 is the same."""
    return [
        ReadAnswer(question_id=f"q{i}", hops=HOPS[i], source=source, answer="x", em=float(one), f1=float(one))
        for source, digits in ems.items()
        for i, one in enumerate(digits)
    ]


def test_gains_are_paired_with_the_best_plain_search():
    found = {(one.source, one.hops): one for one in gains([rows({plain(1): "001", plain(3): "000", EVIDENCE: "111"})])}
    by_source = {key: one.em_gain and one.em_gain.mean for key, one in found.items()}
    assert by_source[EVIDENCE, "all"] == pytest.approx(2 / 3)
    assert by_source[EVIDENCE, "1"] == 1.0
    assert by_source[EVIDENCE, "2"] == pytest.approx(1 / 2)
    assert by_source[plain(1), "all"] is by_source[plain(1), "2"] is None
    assert by_source[plain(3), "all"] == pytest.approx(-1 / 3)
    assert found[EVIDENCE, "all"].em.low < found[EVIDENCE, "all"].em.mean == 1.0, "three questions prove little"


def test_seeds_are_averaged_and_one_plain_search_is_the_best_of_all():
    # Of plain(1) 2/3 and 0, of plain(3) 1/3 and 2/3: the second is better in the mean. Gains 0 1 1 and 0 0 0, by
    # question 0, 0.5, 0.5 and in the mean 1/3. Of three questions drawn anew all are the first in 1/27, more than 2.5%.
    first, second = {plain(1): "110", plain(3): "100", EVIDENCE: "111"}, {plain(1): "000", plain(3): "110"}
    found = {(one.source, one.hops): one for one in gains([rows(first), rows(second | {EVIDENCE: "110"})])}
    assert found[plain(3), "all"].em_gain is None
    gain = found[EVIDENCE, "all"].em_gain
    assert gain is not None
    assert (gain.mean, gain.low, gain.high, gain.num_questions) == (pytest.approx(1 / 3), 0.0, 0.5, 3)


def test_seeds_with_other_questions_are_refused():
    one = rows({plain(1): "001", EVIDENCE: "111"})
    with pytest.raises(DataError, match=r"answers\.jsonl: seeds differ in their questions or sources"):
        gains([one, [*one[:-1], replace(one[-1], question_id="other")]])


def test_the_table_has_a_line_for_each_source_and_number_of_hops():
    lines = markdown(gains([rows({plain(1): "001", EVIDENCE: "111"})])).splitlines()
    assert lines[0] == f"| {' | '.join(HEADER)} |"
    assert len(lines) == 2 + 2 * 3
    assert lines[2].endswith("| - |")


def test_a_reader_is_asked_only_where_there_is_something_to_read():
    asked: list[tuple[str, str]] = []

    class Repeats:
        def answers(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
            asked.extend(pairs)
            return [evidence for _, evidence in pairs]

    found = answered(QUESTIONS, {EVIDENCE: ["answer 0", "", "answer x"]}, Repeats())
    assert asked == [("Q 0?", "answer 0"), ("Q 2?", "answer x")]
    assert [(row.answer, row.em, row.f1) for row in found] == [
        ("answer 0", 1.0, 1.0), (None, 0.0, 0.0), ("answer x", 0.0, 0.5)
    ]  # fmt: skip
