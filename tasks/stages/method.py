"""Stage `method`: resolves one method of `conf/method/`, into `artifacts/method/<name>/`.

Training and evaluation depend on what this writes, not on the folder `conf/method`: a method added there re-runs no
other. `training.json` holds all that training depends on (parts and budgets in force), `playing.json` what evaluation
does besides the trained policy (prompt, grammar, budgets). A wrong setting of a method, or of the scale it trains at,
ends here, in seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks import conf
from tasks.agent.rollout import RolloutConf
from tasks.runner import Context, run
from tasks.stages import parts
from tasks.store import replacing_folder, write_json


def body(ctx: Context, name: str) -> None:
    """Build the method, check the budgets it would train with, write what it is."""
    from tasks import methods
    from tasks.train.settings import TrainConf

    resolved = methods.load(name, ctx.params.scale, ctx.root)
    rollout = parts.changed(RolloutConf, ctx.params, "rollout", resolved["rollout"], name)
    train = parts.changed(TrainConf, ctx.params, "train", resolved["train"], name)
    settings = {"train": conf.plain(train), "method": methods.composition(resolved)}
    ctx.track.log_params(settings)
    playing = {key: resolved[key] for key in ("prompt", "grammar")} | {"rollout": conf.plain(rollout)}
    with replacing_folder(ctx.root / parts.ARTIFACTS / "method" / name) as out:
        write_json(out / "playing.json", playing)
        write_json(out / "training.json", {"method": name, "settings": settings, **playing})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", required=True)
    name = parser.parse_args().method
    run(f"method@{name}", lambda ctx: body(ctx, name), root=Path("."))


if __name__ == "__main__":
    main()
