"""Stage `reader`: trains a model to answer from evidence (R-Search), into `artifacts/models/<reader>-<seed>/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import conf, parts, trained
from tasks.data.records import read_passages, read_questions
from tasks.reader.settings import ReaderConf
from tasks.runner import Context, main
from tasks.store import replacing_folder, write_jsonl

if TYPE_CHECKING:
    from tasks.plan import RunSettings

MATRIX = ("reader", "seed")
DATA = Path("artifacts/data")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        reader, seed: name of the reader, and its seed.
        made: how it is made.
        held_out_split: split of the questions that measure it.
        engine: kind and settings of the one that divides the training among processes; None trains in this one.
    """

    reader: str
    seed: int
    made: ReaderConf
    held_out_split: str
    engine: dict[str, Any] | None = None


def settings(run: RunSettings, reader: str, seed: int) -> Settings:
    """The reader at this run's scale; the data's validation questions measure it."""
    return Settings(reader, seed, run.load(ReaderConf, "reader", reader), run.data.validation_split, run.divides())


def loads(settings: Settings) -> Any:
    """The engine."""
    return parts.make_if("engine", settings.engine, "engine")


def body(ctx: Context[Settings]) -> None:
    """Train the reader, and write its folder with card and manifest."""
    from tasks.device import use_threads
    from tasks.model import export_folder
    from tasks.reader.card import write_card
    from tasks.reader.make import make_reader

    settings = ctx.settings
    use_threads(settings.made.num_threads)
    ctx.track.log_params(conf.plain(settings.made))
    questions = list(read_questions(ctx.root / DATA / "questions.jsonl"))
    ctx.track_data("training", sum(question.split == "train" for question in questions))

    passages = {passage.id: passage for passage in read_passages(ctx.root / DATA / "corpus.jsonl")}
    bar = ctx.bar(settings.made.recall.max_steps + settings.made.read.max_steps, unit="step")
    made = make_reader(
        settings.made,
        questions,
        settings.held_out_split,
        passages,
        settings.seed,
        ctx.scratch,
        bar.log,
        loads(settings),
    )
    bar.close()

    folder = trained.FOLDER / f"{settings.reader}-{settings.seed}"
    with replacing_folder(ctx.root / folder) as out:
        export_folder(made.model, made.tokenizer, out)
        write_card(out, settings.reader, settings.seed, settings.made.habits, made.quality)
        write_jsonl(out / "metrics.jsonl", made.history)
        trained.seal(out, {"reader": settings.reader, "seed": settings.seed})
    ctx.track_outcome(folder, ())


if __name__ == "__main__":
    main("reader", body, Settings, *MATRIX)
