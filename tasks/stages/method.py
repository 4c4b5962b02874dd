"""Stage `method`: resolves one method of `conf/method/`, into `artifacts/method/<name>/`.

Training and evaluation depend on what this writes, not on the folders `tasks/methods` and `conf/method`: a method
added there re-runs no other. `training.json` holds all that training depends on (settings in force, budgets, hashes
of the method's own files), `playing.json` what evaluation does besides the trained policy (prompt, grammar, budgets).
A wrong setting of a method, or of the scale it trains at, ends here, in seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tasks import conf
from tasks.agent.rollout import RolloutConf
from tasks.runner import Context, run
from tasks.stages import parts
from tasks.store import replacing_folder, sha256, write_json


def body(ctx: Context, name: str) -> None:
    """Build the method, check the budgets it would train with, write what it is."""
    from tasks import methods
    from tasks.train.loop import TrainConf

    loaded = methods.load(name, ctx.params.scale, root=ctx.root)
    rollout = parts.changed(RolloutConf, ctx.params, "rollout", loaded.rollout, name)
    train = parts.changed(TrainConf, ctx.params, "train", loaded.train, name)
    settings = {"train": conf.plain(train), "method": loaded.settings}
    ctx.track.log_params(settings)
    own = sorted(Path(str(m.__file__)) for n, m in sys.modules.items() if n.startswith(f"{methods.__name__}."))
    files = {path.name: sha256(path) for path in own}  # This process loaded no other method.
    playing = {"prompting": loaded.prompting, "rollout": conf.plain(rollout)}
    with replacing_folder(ctx.root / parts.ARTIFACTS / "method" / name) as out:
        write_json(out / "playing.json", playing)
        write_json(out / "training.json", {"method": name, "settings": settings, "files": files, **playing})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", required=True)
    name = parser.parse_args().method
    run(f"method@{name}", lambda ctx: body(ctx, name), root=Path("."))


if __name__ == "__main__":
    main()
