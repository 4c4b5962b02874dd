"""Stage `inputs`: a system's training questions with the fields its rewards read, into `artifacts/inputs/<system>/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import conf, inputs
from tasks.data.records import read_questions
from tasks.inputs.join import check, join
from tasks.runner import Context, main
from tasks.store import replacing_folder

if TYPE_CHECKING:
    from tasks.plan import RunSettings

DATA = Path("artifacts/data")
OUT = Path("artifacts/inputs")
MATRIX = ("system",)


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        system: name of the system.
        reads: fields of a question that the rewards of its method read; null if it does not learn and needs no
            questions.
        validation_split: split of the validation questions.
    """

    system: str
    reads: tuple[str, ...] | None
    validation_split: str


def settings(run: RunSettings, system: str) -> Settings:
    """The fields that the system's method reads, and the validation split of the data."""
    return Settings(system, run.reads(system), run.data.validation_split)


def body(ctx: Context[Settings]) -> None:
    """Join the fields, print what is missing, and write the questions."""
    settings = ctx.settings
    joined = inputs.Inputs([], [], {})
    if settings.reads is not None:
        questions = list(read_questions(ctx.root / DATA / "questions.jsonl"))
        joined = join(questions, settings.reads, settings.validation_split, ctx.root)
        check(joined, f"{conf.CONF}/method/{settings.system}.yaml")

    ctx.track_data("training", len(joined.training))
    with replacing_folder(ctx.root / OUT / settings.system) as out:
        inputs.write(joined, out)


if __name__ == "__main__":
    main("inputs", body, Settings, *MATRIX)
