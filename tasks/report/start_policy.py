"""The table of start policies that were made of a pretrained model: what they were taught with, and what that cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.records import schema
from tasks.records.start_policy import FILE, WORDS, FormatRecord, KnownWords
from tasks.report.table import Section
from tasks.store import read_json, read_jsonl

LEAD = (
    "A pretrained model is shown the tags on demonstrations from training questions before reinforcement learning. A "
    "plan is the question's decomposition, or the question itself, searched with this run's retriever; a demonstration "
    "is a plan that brought back what it looked for. Loss: mean cross-entropy of the tokens that a policy writes, in "
    "the first and in the last recorded step."
)
HEADER = ("seed", "weights", "plans", "demonstrations", "trained on", "tokens read", "tokens with loss", "loss")


def notes(artifacts: Path, seeds: Sequence[int], manifest: Any) -> tuple[str, ...]:
    """How many words of own data the start policy of the first seed knows; nothing where the data was made for it."""
    path = artifacts / "base" / str(seeds[0]) / WORDS
    if not path.is_file() or not isinstance(manifest, dict) or manifest.get("kind") != "folder":
        return ()
    return (schema.parse(KnownWords, read_json(path), str(path)).sentence(),)


def sections(artifacts: Path, seeds: Sequence[int]) -> tuple[Section, ...]:
    """One table over the seeds; none where the start policy was not taught the format.

    Raises:
        DataError: a record is malformed.
    """
    rows = []
    for seed in seeds:
        path = artifacts / "base" / str(seed) / FILE
        if not path.is_file():
            continue
        found = schema.parse(FormatRecord, read_json(path), str(path))
        losses = [row["metrics"]["loss"] for _, row in read_jsonl(path.with_name("metrics.jsonl"))]
        counts = (found.num_weights, found.plans, found.demonstrations, found.trained, found.tokens)
        loss = f"{losses[0]:.2f} -> {losses[-1]:.2f}" if losses else "-"
        rows.append([str(seed), *(f"{count:,}" for count in (*counts, found.written_tokens)), loss])
    return (Section("start-policy", "Start policy", LEAD, HEADER, rows),) if rows else ()
