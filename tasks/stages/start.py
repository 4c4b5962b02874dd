"""Stage `start`: a start policy with tags of its own, for the methods that name it.

It is made as the stage `base` makes the tiny policy, into `artifacts/models/<start>-<seed>/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import parts, trained
from tasks.base.settings import BaseConf, StartConf
from tasks.runner import Context, main
from tasks.stages.base import Made, parts_of, teach
from tasks.store import replacing_folder, write_jsonl

if TYPE_CHECKING:
    from tasks.plan import RunSettings

MATRIX = ("start", "seed")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        start, seed: name of the start policy, and its seed.
        made: how it is made.
    """

    start: str
    seed: int
    made: Made


def settings(run: RunSettings, start: str, seed: int) -> Settings:
    """A file of `conf/start/`, taught as this run's own tiny policy would be."""
    tiny = run.load(StartConf, "start", start).tiny
    prompt, grammar = run.start_prompting(start)
    made = Made(tiny, run.scale(BaseConf, "base"), run.rollout(), prompt, parts.plain(grammar), run.retriever())
    return Settings(start, seed, made)


def loads(settings: Settings) -> Any:
    """The grammar, and the settings of the backend."""
    return parts_of(settings.made)


def body(ctx: Context[Settings]) -> None:
    """Train the policy, and write its folder with a manifest."""
    from tasks.model import export_folder

    made = teach(ctx, ctx.settings.made, ctx.settings.seed)
    folder = Path(trained.FOLDER) / f"{ctx.settings.start}-{ctx.settings.seed}"
    with replacing_folder(ctx.root / folder) as out:
        export_folder(made.model, made.tokenizer, out)
        write_jsonl(out / "metrics.jsonl", made.history)
        trained.seal(out, {"start": ctx.settings.start, "seed": ctx.settings.seed})
    ctx.track_outcome(folder, ())


if __name__ == "__main__":
    main("start", body, Settings, *MATRIX)
