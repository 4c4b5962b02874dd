"""What a method trains on: questions with the hops and gold passages that its rewards read, and with nothing else.

A training run reads this and neither the augmentation nor the corpus, so that a change of what its rewards do not read
changes nothing for it.
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
        missing: what rewards read -> how many training questions lack it.
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
    """What `write` wrote.

    Raises:
        DataError: a file is missing, or a row breaks the schema.
    """
    training, validation = ([one for _, one in schema.read(Question, folder / name)] for name in (TRAINING, VALIDATION))
    summary: dict[str, Any] = read_json(folder / SUMMARY)
    return Inputs(training, validation, summary["missing"])
