"""Stage `inputs`: what a system's training reads besides data and index, into `artifacts/inputs/<system>-<seed>/`.

These are its training questions with the fields that its rewards read, and the trained models that its services load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import conf, inputs, trained
from tasks.data.records import read_questions
from tasks.inputs.join import check, join
from tasks.runner import Context, main
from tasks.store import replacing_folder

if TYPE_CHECKING:
    from tasks.plan import RunSettings

DATA = Path("artifacts/data")
OUT = Path("artifacts/inputs")
MATRIX = ("system", "seed")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        system, seed: name of the system, and its seed.
        reads: fields of a question that the rewards of its method read; null if it does not learn and needs no
            questions.
        validation_split: split of the validation questions.
        models: names of the trained models that its services load.
    """

    system: str
    seed: int
    reads: tuple[str, ...] | None
    validation_split: str
    models: tuple[str, ...]


def settings(run: RunSettings, system: str, seed: int) -> Settings:
    """The fields that the system's method reads, the validation split of the data, and the models of its services."""
    return Settings(system, seed, run.reads(system), run.data.validation_split, run.models(system))


def body(ctx: Context[Settings]) -> None:
    """Join the fields, print what is missing, and write the questions and where the models are."""
    settings = ctx.settings
    joined = inputs.Inputs([], [], {})
    if settings.reads is not None:
        questions = list(read_questions(ctx.root / DATA / "questions.jsonl"))
        joined = join(questions, settings.reads, settings.validation_split, ctx.root)
        check(joined, f"{conf.CONF}/method/{settings.system}.yaml")

    ctx.track_data("training", len(joined.training))
    models = trained.find(ctx.root, settings.models, settings.seed)
    with replacing_folder(ctx.root / OUT / f"{settings.system}-{settings.seed}") as out:
        inputs.write(joined, out)
        trained.write(out, models)


if __name__ == "__main__":
    main("inputs", body, Settings, *MATRIX)
