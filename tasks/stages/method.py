"""Stage `method`: resolves what plays under a name of `systems`, into `artifacts/method/<name>/`.

Training and evaluation depend on what this writes, not on the folders `conf/method` and `conf/system`: a name added
there re-runs no other. `training.json` holds all that training depends on (parts and budgets in force), `playing.json`
what evaluation does besides the trained policy (prompt, grammar, budgets). A wrong setting of a system, or of the scale
a method trains at, ends here, in seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks import conf
from tasks.runner import Context, run
from tasks.stages import parts, systems
from tasks.store import replacing_folder, write_json


def body(ctx: Context, name: str) -> None:
    """Build the system, and the method that trains it; check the budgets; write what they are."""
    playing = systems.load(ctx.params, name, ctx.root).settings
    is_method = conf.kind_of(conf.SYSTEMS, name, ctx.root) == "method"
    training = {"system": name, "playing": playing, **(_training(ctx, name) if is_method else {})}
    ctx.track.log_params(training)
    with replacing_folder(ctx.root / parts.ARTIFACTS / "method" / name) as out:
        write_json(out / "playing.json", playing)
        write_json(out / "training.json", training)


def _training(ctx: Context, method: str) -> conf.Tree:
    from tasks import methods
    from tasks.train.settings import TrainConf

    resolved = methods.load(method, ctx.params.scale, ctx.root)
    train = parts.changed(TrainConf, ctx.params, "train", resolved["train"], method)
    return {"settings": {"train": conf.plain(train), "method": methods.composition(resolved)}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True)
    name = parser.parse_args().system
    run(f"method@{name}", lambda ctx: body(ctx, name), root=Path("."))


if __name__ == "__main__":
    main()
