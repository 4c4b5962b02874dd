"""The funnel of the stage `augment` in `results.md` and on the page, and summaries that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.report.augmentation import augmentation_line, funnel, read_augmentation
from tasks.report.page import page_data
from tasks.report.table import Results, markdown
from tasks.store import DataError, read_json, write_json
from tests.report.fake_artifacts import augmentation


def test_every_step_that_left_something_out_has_a_line(results: Results, artifacts: Path) -> None:
    header, rows = funnel(augmentation())
    assert header == ["step", "count"]
    assert rows == [
        ["questions", "2,000"],
        ["- without decomposition", "5"],
        ["- rejected: final answer", "5"],
        ["questions kept", "1,990"],
        ["sub-questions", "4,900"],
        ["queries written for them", "14,700"],
        ["- duplicate", "4,800"],
        ["queries sent to every source", "9,900"],
        ["valid in index", "9,890"],
        ["valid in bm25_exact", "9,800"],
        ["- valid in too few sources", "10"],
        ["queries kept", "9,890"],
        ["sub-questions left without a query", "2"],
    ]
    assert augmentation_line(augmentation()) == "Written by rules. 2.02 queries a sub-question."
    assert "## Augmentation\n\nWritten by rules." in markdown(results)
    data = page_data(results, artifacts, {}, {}, 2)
    assert data["augmentation"]["steps"][3] == ["questions kept", "1,990"]
    assert "augment" in [stage["stage"] for stage in data["data_stages"]]


@pytest.mark.parametrize("num_duplicates", [0, 287])
def test_nothing_that_was_left_out_takes_one_sentence(num_duplicates: int) -> None:
    """A query that was written twice is no loss; one that no source can answer is."""
    tree = augmentation()
    tree["questions"] |= {"read": 120, "without_decomposition": 0, "kept": 120, "rejected": {}}
    tree["hops"] = {"kept": 287, "without_query": 0}
    valid = {"index": 574, "bm25_exact": 574}
    tree["queries"] |= {"written": 574 + num_duplicates, "duplicate": num_duplicates, "checked": 574, "kept": 574}
    tree["queries"] |= {"blank": 0, "surplus": 0, "too_few_sources": 0, "valid": valid}
    assert funnel(tree)[1] == []
    said = "Nothing was left out of 120 questions, 287 sub-questions and 574 different queries."
    assert augmentation_line(tree) == f"Written by rules. 2.00 queries a sub-question. {said}"
    for part, lost in (("queries", {"valid": valid | {"index": 570}}), ("hops", {"without_query": 1})):
        missed = tree | {part: tree[part] | lost}
        assert len(funnel(missed)[1]) > 5
        assert "Nothing" not in augmentation_line(missed)


def test_what_found_nothing_says_so() -> None:
    nothing = augmentation() | {"note": "there is nothing to augment", "hops": {"kept": 0, "without_query": 0}}
    assert augmentation_line(nothing) == "Written by rules. Note: there is nothing to augment."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions": {}}, r"questions\.read=None, expected a count\. Run the stage `augment` again"),
        ({"hops": {"kept": -1, "without_query": 0}}, r"hops\.kept=-1"),
        ({"queries": []}, r"queries\.written=None"),
        ({"queries": augmentation()["queries"] | {"valid": 3}}, r"queries\.valid=3, expected counts by name"),
    ],
)
def test_a_summary_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "summary.json"
    write_json(path, augmentation() | changes)
    with pytest.raises(DataError, match=rf"summary\.json: {message}"):
        read_augmentation(path)
    write_json(path, [])
    with pytest.raises(DataError, match="found list, expected a JSON object"):
        read_augmentation(path)
    write_json(path, augmentation())
    assert read_augmentation(path) == read_json(path)
