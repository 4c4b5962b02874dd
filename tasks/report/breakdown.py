"""The result table in full for each dataset and number of hops; the page draws the same cells."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.report.table import Cell, Results, Section, groups, show
from tasks.types import ALL

METRICS = ("em", "f1", "answer_in_passage", "recall", "searches", "generated_tokens", "prefill_tokens")
"""The columns, in order."""

HEADER = (
    "dataset", "hops", "questions", "policy", "EM", "F1", "answer in passage", "gold recall", "searches",
    "generated tokens", "read tokens",
)  # fmt: skip
LEAD = (
    "Greedy play. Answer in passage: share of questions for which a passage that the policy's searches returned holds "
    "a gold answer. Gold recall: share of the annotated passages that were returned. Both are empty where they cannot "
    "be told."
)


def parts(results: Results) -> Iterator[tuple[str, str]]:
    """(dataset, hops) of every part that has questions: the pairs, or the hop counts where there is one dataset."""
    for dataset, hops, _ in groups(results.runs[0].scores["greedy"]):
        if hops != ALL and (dataset != ALL or only_dataset(results)):
            yield dataset, hops


def only_dataset(results: Results) -> str:
    """The name of the dataset where all questions are of one, which has no cells of its own pairs; empty elsewhere."""
    names = {row.dataset for row in results.runs[0].scores["greedy"]}
    return names.pop() if len(names) == 1 else ""


def section(results: Results) -> Section:
    """One line for each part and policy."""
    rows = []
    for dataset, hops in parts(results):
        for policy in results.policies:
            cells = [results.find(policy, metric, dataset=dataset, hops=hops) for metric in METRICS]
            count = cells[0].num_questions if cells[0] else 0
            shown = (_shown(metric, cell) for metric, cell in zip(METRICS, cells, strict=True))
            rows.append([only_dataset(results) or dataset, hops, str(count), results.title(policy), *shown])
    return Section("parts", "By dataset and number of hops", LEAD, HEADER, rows)


def _shown(metric: str, cell: Cell | None) -> str:
    if metric in ("em", "f1", "answer_in_passage"):
        return show(cell)
    return show(cell, digits={"recall": 3, "searches": 2}.get(metric, 0), interval=False)
