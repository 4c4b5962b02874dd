"""Stage `start`: a start policy with tags of its own, for the methods that name it.

The tiny policy that the stage `base` made is taught these tags, into `artifacts/models/<start>-<seed>/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import parts, trained
from tasks.base.settings import BaseConf, StartConf
from tasks.runner import Context, main
from tasks.stages import base
from tasks.stages.base import Taught
from tasks.store import replacing_folder, write_jsonl

if TYPE_CHECKING:
    from tasks.plan import RunSettings

MATRIX = ("start", "seed")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        start, seed: name of the start policy, and its seed.
        share: see `StartConf`.
        taught: how it is taught.
        engine: as of the stage `base`.
    """

    start: str
    seed: int
    share: float
    taught: Taught[BaseConf]
    engine: dict[str, Any] | None = None


def settings(run: RunSettings, start: str, seed: int) -> Settings:
    """A file of `conf/start/`, taught as this run's own tiny policy was."""
    share = run.load(StartConf, "start", start).share
    return Settings(start, seed, share, base.taught(run, *run.start_prompting(start)), run.divides())


def loads(settings: Settings) -> Any:
    """The grammar, the settings of the backend, and the engine."""
    return base.parts_of(settings.taught), parts.make_if("engine", settings.engine, "engine")


def body(ctx: Context[Settings]) -> None:
    """Teach the policy, and write its folder with a manifest."""
    from tasks.base.make import make_start
    from tasks.model import export_folder

    given = ctx.settings
    training = given.taught.training
    num_steps = training.wasteful.max_steps + training.lazy.max_steps
    lessons = base.lessons_of(ctx, given.taught, given.seed, num_steps, given.engine)
    made = make_start(ctx.root / base.OUT / str(given.seed) / "policy", given.share, lessons)

    folder = Path(trained.FOLDER) / f"{given.start}-{given.seed}"
    with replacing_folder(ctx.root / folder) as out:
        export_folder(made.model, made.tokenizer, out)
        write_jsonl(out / "metrics.jsonl", made.history)
        trained.seal(out, {"start": given.start, "seed": given.seed})
    ctx.track_outcome(folder, ())


if __name__ == "__main__":
    main("start", body, Settings, *MATRIX)
