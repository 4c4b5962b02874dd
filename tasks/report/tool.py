"""Whether the evidence of trained agents helps another model (stage `tool`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.records import schema
from tasks.records.read_answers import ANSWERS, ReadAnswer
from tasks.report.curves import seeds_note
from tasks.report.table import Results, Section
from tasks.tool.gains import HEADER, Gain, gains

FOLDER = "tool"


def read(artifacts: Path, tools: Sequence[str], seeds: Sequence[int], num_resamples: int) -> dict[str, list[Gain]]:
    """System -> what another model gains from its evidence.

    Raises:
        DataError: a file is missing or malformed, or seeds differ in their questions.
    """
    return {tool: gains([_answers(artifacts, f"{tool}-{seed}") for seed in seeds], num_resamples) for tool in tools}


def _answers(artifacts: Path, item: str) -> list[ReadAnswer]:
    return [row for _, row in schema.read(ReadAnswer, artifacts / FOLDER / item / ANSWERS)]


def section(results: Results, found: Mapping[str, Sequence[Gain]]) -> Section | None:
    """A line for each system, source and number of hops; None where nothing was measured."""
    rows = [[results.title(tool), *one.cells] for tool, lines in found.items() for one in lines]
    if not rows:
        return None
    lead = (
        "Another model answers the evaluation's questions from what the trained agent found, and from the first "
        "passages of a search for the question itself. The best plain search is the one with the highest exact match "
        "on these questions, which favours plain search. A reader that this run trained is that of the next seed; with "
        "one seed it is the one that paid the agent. "
        f"{seeds_note(results.seeds)}"
    )
    return Section("tool", "Evidence as a tool", lead, ["policy", *HEADER], rows)
