"""The questions that a method trains on, with only those hops and gold passages that its rewards read.

A training run reads these files and neither the augmentation nor the corpus. So a change of data that its rewards do
not read does not make it run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.records import schema
from tasks.store import read_json, write_json
from tasks.types import Question

TRAINING, VALIDATION, SUMMARY = "training.jsonl", "validation.jsonl", "summary.json"


@dataclass(frozen=True)
class Inputs:
    """The questions of one method.

    Attributes:
        training, validation: in the order of `questions.jsonl`.
        missing: field that rewards read -> number of training questions that lack it.
    """

    training: list[Question]
    validation: list[Question]
    missing: dict[str, int]


def write(inputs: Inputs, folder: Path) -> None:
    """Write the questions and the counts; `read` inverts it."""
    schema.write(folder / TRAINING, inputs.training)
    schema.write(folder / VALIDATION, inputs.validation)
    counts = {"training": len(inputs.training), "validation": len(inputs.validation), "missing": inputs.missing}
    write_json(folder / SUMMARY, counts)


def read(folder: Path) -> Inputs:
    """Read what `write` has written.

    Raises:
        DataError: a file is missing, or a row breaks the schema.
    """
    training, validation = (
        [question for _, question in schema.read(Question, folder / name)] for name in (TRAINING, VALIDATION)
    )
    summary: dict[str, Any] = read_json(folder / SUMMARY)
    return Inputs(training, validation, summary["missing"])
