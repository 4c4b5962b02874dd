"""`reports/index.html`: one self-contained page with the table, curves, provenance and a trajectory viewer.

It computes nothing that is not in `table.Results` or the artifacts, loads nothing from outside, and never lets
text of a model or a corpus become markup: all data travels as one escaped JSON block, and the script writes it
with `textContent` only. A content security policy admits exactly the script and style of this page.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasks.clock import PARTS
from tasks.data.notes import fault_lines
from tasks.evaluate.errors import KINDS
from tasks.records import schema
from tasks.records.metrics import MetricRow
from tasks.records.trajectories import HitRow, NoteRow, TrajectoryRow, TurnRow
from tasks.report import breakdown, errors, services, speed
from tasks.report.artifacts import Run
from tasks.report.augmentation import augmentation_line, funnel
from tasks.report.table import (
    ALL,
    COMPARED,
    Cell,
    Results,
    asked,
    chosen_on,
    coverage,
    making_seconds,
    minus,
    recall_metrics,
)
from tasks.store import DataError, Row, digest, replacing
from tasks.text import exact_match, findable, normalize

HERE = Path(__file__).parent
MAX_POINTS = 400  # Points a learning curve keeps; the rest are thinned out evenly.
NO_CLAIMS = (
    "No claim is judged here: this run has no two systems that a claim of the papers compares. make compare trains "
    "them, and its page has the verdicts in this place."
)
MAX_TEXT = 4000  # Characters kept of one passage, prompt or observation.


def write_page(
    path: Path,
    results: Results,
    artifacts: Path,
    ledger: Mapping[str, Row] | None = None,
    facts: Mapping[str, str] | None = None,
    max_trajectories: int = 60,
    made: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        results: the table.
        artifacts: where metrics and trajectories are read.
        ledger: stage -> what was measured on this machine when it made these results; shown where present.
        facts: what was run (data, model, retriever, ...), shown under the title.
        max_trajectories: embedded per policy, for evaluation and for training each.
        made: further stages -> names of what each made, whose services are counted, too.

    Raises:
        DataError: metrics or trajectories are missing or malformed.
    """
    data = page_data(results, artifacts, ledger or {}, facts or {}, max_trajectories, made)
    html = render(data)
    with replacing(path) as file:
        file.write(html.encode())


def render(data: Any) -> str:
    """Fill the template; `data` is any JSON-ready value and cannot break out of its block."""
    style, script = _read("page.css"), _read("page.js")
    parts = {
        "style_hash": _csp_hash(style),
        "script_hash": _csp_hash(script),
        "style": style,
        "script": script,
        "data": embed(data),
    }
    # One pass, so that a placeholder inside the data stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("template.html"))


def embed(data: Any) -> str:
    """JSON that is safe inside a `<script>` element: ASCII, without a raw `<`, `>` or `&`.

    >>> embed({"a": "</script>&"})
    '{"a":"\\\\u003c/script\\\\u003e\\\\u0026"}'
    """
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page_data(
    results: Results,
    artifacts: Path,
    ledger: Mapping[str, Row],
    facts: Mapping[str, str],
    max_trajectories: int,
    made: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Row:
    """Everything the page shows, as one JSON-ready object."""
    recorded = {policy: _recorded(results, artifacts, policy) for policy in results.policies}
    samples = {
        policy: errors.sample(errors.found(results.runs, policy), recorded[policy]) for policy in results.policies
    }
    return {
        "facts": dict(facts),
        "policies": [{"name": policy, "title": results.title(policy)} for policy in results.policies],
        "reference": results.reference,
        "gain": minus("em", results.reference),
        "seeds": list(results.seeds),
        "is_few": results.is_few,
        "coverage": coverage(results),
        "num_resamples": results.num_resamples,
        "asked": asked(results),
        "notes": [*results.notes, *chosen_on(results)],
        "num_questions": len(results.runs[0].scores["greedy"]),
        "cells": [
            [c.policy, c.seed, c.dataset, c.hops, c.mode, c.metric, c.value, c.low, c.high, c.num_questions]
            for c in results.cells
            if ALL in (c.dataset, c.hops) or _is_of_a_part(c)
        ],
        "parts": list(breakdown.parts(results)),
        "part_metrics": list(breakdown.METRICS),
        "part_lead": breakdown.LEAD,
        "dataset": breakdown.only_dataset(results),
        "errors": _errors(results, samples, artifacts, recorded),
        "curves": {policy: _curves(results, artifacts, policy) for policy in results.policies},
        "start_curves": _start_curves(results, artifacts),
        "costs": [_cost(results, policy, ledger) for policy in results.policies],
        "step_seconds": _step_seconds(results, ledger),
        "speed": speed.rows(results, ledger),
        "services": services.rows(results, made, artifacts, ledger),
        "recall": {name: dict(row) for name, row in results.recall.items()},
        "recall_metrics": recall_metrics(results),
        "retrievers": list(results.retrievers),
        "differences": list(results.differences),
        "compared_metrics": list(COMPARED),
        "augmentation": {"line": augmentation_line(results.augmentation), "steps": funnel(results.augmentation)[1]},
        "faults": fault_lines(results.manifest),
        "sections": [asdict(section) for section in results.sections],
        "no_claims": "" if any(section.id == "claims" for section in results.sections) else NO_CLAIMS,
        "validation": results.validation,
        "manifest": results.manifest,
        "provenance": {f"{run.policy}-{run.seed}": _provenance(run, ledger) for run in results.runs},
        "data_stages": _data_stages(results, ledger),
        "trajectories": [
            row
            for policy in results.policies
            for row in _trajectories(results, artifacts, policy, max_trajectories, samples[policy])
        ],
    }


def _is_of_a_part(cell: Cell) -> bool:
    return (cell.seed, cell.mode) == (ALL, "greedy") and cell.metric in breakdown.METRICS


def _errors(
    results: Results,
    samples: Mapping[str, Sequence[errors.Error]],
    artifacts: Path,
    recorded: dict[str, set[errors.Played]],
) -> Row:
    """Kinds with their meanings, counts by system, and the sampled errors."""
    drawn = [error for own in samples.values() for error in own]
    rows = errors.example_rows(drawn, artifacts / "data" / "questions.jsonl", recorded)
    return {
        "kinds": [[kind, errors.name(kind), meaning] for kind, meaning in KINDS.items()],
        "counts": errors.counts(results),
        "num_answers": len(results.seeds) * len(results.runs[0].scores["greedy"]),
        "sample": [{**row, **_clipped(row)} for row in rows],
    }


def _clipped(row: Row) -> Row:
    answer = row["answer"]
    return {
        "question": _clip(row["question"]),
        "answers": [_clip(one) for one in row["answers"]],
        "answer": None if answer is None else _clip(answer),
    }


def _recorded(results: Results, artifacts: Path, policy: str) -> set[errors.Played]:
    """The greedy plays of a system whose trajectories are recorded."""
    paths = {seed: artifacts / "evaluate" / f"{policy}-{seed}" / "trajectories.jsonl" for seed in results.seeds}
    rows = ((seed, row) for seed, path in paths.items() for _, row in schema.read(TrajectoryRow, path))
    return {(seed, row.question_id) for seed, row in rows if row.mode == "greedy"}


def _data_stages(results: Results, ledger: Mapping[str, Row]) -> list[Row]:
    names = ("data", "validate", "index", "recall", "augment", *(["retrievers"] if results.retrievers else []))
    searched = [cell for cell in results.cells if cell.mode == "search"]
    settings = {"recall" if c.policy == "retriever" else "retrievers": c.config_sha256 for c in searched}
    return [_stage(name, ledger, settings.get(name)) for name in names]


# Learning curves


def _curves(results: Results, artifacts: Path, policy: str) -> dict[str, Row]:
    trained = [run.seed for run in results.runs if run.policy == policy and run.training is not None]
    return {str(seed): read_curve(artifacts / "train" / f"{policy}-{seed}" / "metrics.jsonl") for seed in trained}


def _start_curves(results: Results, artifacts: Path) -> dict[str, Row]:
    """How the start policies were made, where they were."""
    paths = {seed: artifacts / "base" / str(seed) / "metrics.jsonl" for seed in results.seeds}
    return {str(seed): read_curve(path) for seed, path in paths.items() if path.is_file()}


def read_curve(path: Path) -> Row:
    """`metrics.jsonl` by column: {"step": [...], name: [...]}, null where a step lacks a metric.

    Thinned to about `MAX_POINTS` steps; a step with a metric that is only measured now and then is kept.

    Raises:
        DataError: a row is not {"step": int, "metrics": {name: number}}.
    """
    rows = [(row.step, row.metrics) for _, row in schema.read(MetricRow, path)]
    counts: dict[str, int] = {}
    for _, metrics in rows:
        for name in metrics:
            counts[name] = counts.get(name, 0) + 1
    rare = {name for name, count in counts.items() if count * 3 < len(rows)}
    stride = max(1, math.ceil(len(rows) / MAX_POINTS))
    last = len(rows) - 1
    kept = [row for i, row in enumerate(rows) if i % stride == 0 or i == last or rare & row[1].keys()]
    columns: Row = {"step": [step for step, _ in kept]}
    for name in sorted(counts):
        columns[name] = [None if (value := metrics.get(name)) is None else _rounded(value, 6) for _, metrics in kept]
    return columns


def _rounded(value: float, digits: int) -> float:
    """The value with so many significant digits; counts stay as they are."""
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


# Cost and provenance


def _cost(results: Results, policy: str, ledger: Mapping[str, Row]) -> Row:
    names = ("steps", "num_trajectories", "generated_tokens", "prefill_tokens", "searches")
    cells = {name: results.find(policy, name, mode="training") for name in names}
    evaluations = [ledger.get(f"evaluate@{policy}-{seed}", {}).get("seconds") for seed in results.seeds]
    known = [value for value in evaluations if isinstance(value, int | float)]
    return {
        "policy": policy,
        **{name: cell.value if cell else None for name, cell in cells.items()},
        "seconds": making_seconds(results, policy, ledger),
        "evaluate_seconds": sum(known) / len(known) if known and len(known) == len(evaluations) else None,
    }


def _step_seconds(results: Results, ledger: Mapping[str, Row]) -> Row:
    """The parts of training steps, with what they mean, and the mean seconds of each system that was trained here."""
    found: Row = {}
    for policy in results.policies:
        runs = [run.made_by for run in results.runs if run.policy == policy]
        measured = [row for stage in runs if (row := ledger.get(stage, {}).get("step_seconds"))]
        if measured and len(measured) == len(runs):
            found[policy] = {part: sum(row.get(part, 0.0) for row in measured) / len(measured) for part in PARTS}
    return {"parts": [[part, *meaning] for part, meaning in PARTS.items()], "policies": found}


def _provenance(run: Run, ledger: Mapping[str, Row]) -> Row:
    return {
        "data_sha256": run.summary["data_sha256"],
        "policy_sha256": run.summary["policy_sha256"],
        "settings": run.summary.get("settings", {}),
        "training_settings": (run.training or {}).get("settings"),
        "stages": [
            _stage(run.stage, ledger, run.summary["config_sha256"]),
            _stage(run.made_by, ledger, (run.training or {}).get("config_sha256")),
        ],
    }


def _stage(name: str, ledger: Mapping[str, Row], config_sha256: str | None = None) -> Row:
    """A stage by name; the hash is that of its settings, where it measured a number."""
    row = {"stage": name, "command": f"dvc repro {name}", "ledger": ledger.get(name)}
    return {**row, "config_sha256": config_sha256, "plan": f"artifacts/plan/{name.replace('@', '/')}.json"}


# Trajectories


def _trajectories(
    results: Results, artifacts: Path, policy: str, limit: int, sampled: Sequence[errors.Error]
) -> Iterator[Row]:
    listed = {(error.seed, error.score.question_id) for error in sampled}
    trained = [run.seed for run in results.runs if run.policy == policy and run.training is not None]
    for kind, seeds in (("evaluate", results.seeds), ("train", trained)):
        paths = {seed: artifacts / kind / f"{policy}-{seed}" / "trajectories.jsonl" for seed in seeds}
        for row in sample_trajectories(paths, limit, listed if kind == "evaluate" else ()):
            said = () if row.answer is None else (row.answer,)
            yield {
                **schema.plain(row),
                "is_right": _is_right(row),
                "gold_words": findable(row.answers),
                "said_words": findable(said),
            }


def _is_right(row: TrajectoryRow) -> bool:
    """Whether the answer matches; an outcome may be above 0 for other reasons."""
    return exact_match(row.answer, row.answers) > 0


def sample_trajectories(
    paths: Mapping[int, Path], limit: int, listed: Collection[errors.Played] = ()
) -> list[TrajectoryRow]:
    """At most `limit` trajectories, spread over seed, mode and hops, cut to what the viewer shows.

    The greedy plays in `listed`, to which the list of errors links, have the first places.

    The same files give the same trajectories. Questions are ordered by a hash of their id, so that different policies
    show the same ones; the last third of the places goes to right and wrong answers in equal shares, so that a rare one
    is there to see. Memory holds at most `limit` rows per seed, mode, hops and kind of answer.

    Raises:
        DataError: a file is missing, or a row is not one of `TrajectoryRow`.
    """
    chosen: dict[tuple[int, int], TrajectoryRow] = {}
    strata: dict[tuple[Any, ...], list[tuple[int, int, TrajectoryRow]]] = {}
    for seed, path in paths.items():
        for number, row in schema.read(TrajectoryRow, path):
            if row.mode == "greedy" and (seed, row.question_id) in listed:
                chosen[seed, number] = row
                continue
            order = -int(digest(row.question_id, row.step), 16)
            heap = strata.setdefault((seed, row.mode, row.hops, _is_right(row)), [])
            push = heapq.heappush if len(heap) < limit else heapq.heappushpop
            push(heap, (order, -number, row))
    whole: dict[tuple[Any, ...], list[tuple[int, int, TrajectoryRow]]] = {}
    for key, heap in strata.items():
        whole.setdefault(key[:3], []).extend(heap)
    _take(whole, chosen, limit - limit // 3)
    _take(strata, chosen, limit)
    return [_slim(row, f"{paths[seed]}: row {number}") for (seed, number), row in chosen.items()]


def _take(
    strata: Mapping[tuple[Any, ...], Sequence[tuple[int, int, TrajectoryRow]]],
    chosen: dict[tuple[int, int], TrajectoryRow],
    limit: int,
) -> None:
    """Fill `chosen` ((seed, row number) -> row) to `limit`, one of each stratum in turn."""
    queues = [(key[0], sorted(rows, key=lambda item: item[:2])) for key, rows in sorted(strata.items())]
    while len(chosen) < limit and any(queue for _, queue in queues):
        for seed, queue in queues:
            if queue and len(chosen) < limit:
                _, number, row = queue.pop()
                chosen[seed, -number] = row


def _slim(row: TrajectoryRow, where: str) -> TrajectoryRow:
    return replace(
        row,
        question=_clip(row.question),
        answers=[_clip(answer) for answer in row.answers],
        answer=None if row.answer is None else _clip(row.answer),
        prompt=None if row.prompt is None else _clip(row.prompt),
        outcome=_rounded(row.outcome, 4),
        turns=[_slim_turn(turn, f"{where}: turns[{i}]") for i, turn in enumerate(row.turns)],
        notes=[_slim_note(note, len(row.turns), f"{where}: notes[{i}]") for i, note in enumerate(row.notes)],
    )


def _slim_note(note: NoteRow, num_turns: int, where: str) -> NoteRow:
    if note.turn >= num_turns:
        raise DataError(f"{where}: found turn {note.turn}, expected -1 to {num_turns - 1}, a turn of the trajectory.")
    value = None if note.value is None else _rounded(note.value, 4)
    return replace(note, name=_clip(note.name), value=value, text=_clip(note.text))


def _slim_turn(turn: TurnRow, where: str) -> TurnRow:
    return replace(
        turn,
        content=_clip(turn.content),
        reward=_rounded(turn.reward, 4),
        advantages=_per_token(turn.advantages, turn.tokens, f"{where}: advantages"),
        logprobs=_per_token(turn.logprobs, turn.tokens, f"{where}: logprobs"),
        text=None if turn.text is None else _clip(turn.text),
        observation="" if turn.hits and not _is_cut(turn) else _clip(turn.observation),
        hits=[_slim_hit(hit) for hit in turn.hits],
    )


def _is_cut(turn: TurnRow) -> bool:
    """Whether the policy was shown less than the words of the passages that were returned."""
    shown = normalize(turn.observation.replace("\\n", " "))  # A line break inside a JSON string.
    return bool(shown) and any(normalize(hit.text) not in shown for hit in turn.hits)


def _slim_hit(hit: HitRow) -> HitRow:
    return replace(hit, title=_clip(hit.title), text=_clip(hit.text), score=_rounded(hit.score, 4))


def _per_token(values: Sequence[float] | None, tokens: Sequence[str] | None, where: str) -> list[float] | None:
    if not values:
        return None
    if len(values) != len(tokens or ()):
        raise DataError(f"{where}: found {len(values)} values for {len(tokens or ())} tokens, expected one a token.")
    return [_rounded(value, 4) for value in values]


def _clip(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " [...]"
