"""The report beyond the plain table: claims, curves at equal budget, health, and what the papers print.

It puts the parts together; each is made in a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from tasks.report import breakdown, claims, curves, errors, health, pairs, printed, repeats, tool, variance
from tasks.report.table import Results
from tasks.report.training import read_trainings
from tasks.tool.gains import Gain


def complete(
    results: Results,
    artifacts: Path,
    num_resamples: int,
    papers: Sequence[printed.Printed] = (),
    tools: Mapping[str, Sequence[Gain]] = MappingProxyType({}),
) -> Results:
    """The same results with the further cells and tables that this run's artifacts give.

    Args:
        results: the plain table.
        artifacts: of this run.
        num_resamples: behind each interval over questions.
        papers: what the papers print.
        tools: system -> what another model gains from its evidence.

    Raises:
        DataError: malformed metrics, trajectories or summary of a training run.
    """
    trainings = read_trainings(results.runs, artifacts)
    repeated = repeats.count(results, artifacts)
    found = claims.findings(results, trainings, num_resamples, repeats=repeated, tools=tools)
    more = (*curves.cells(results, trainings), *claims.cells(results, found))
    results = replace(results, cells=(*results.cells, *more))
    sections = (
        claims.section(results, trainings, found, repeated),
        breakdown.section(results),
        pairs.section(results),
        errors.section(results),
        curves.section(results, trainings),
        health.section(results, trainings),
        health.signal_section(results, trainings),
        health.evidence_section(results, trainings),
        tool.section(results, tools),
        variance.section(results, artifacts, num_resamples),
        printed.section(results, papers),
    )
    return replace(results, sections=(*results.sections, *(one for one in sections if one is not None)))
