"""Stage `method`: resolves one method of `conf/method/`, into `artifacts/method/<name>.json`.

Training and evaluation depend on what this writes (settings in force, hashes of the method's own files), not on
the folder `tasks/methods`: a method added there re-runs no other. A wrong setting of a method, or of the scale
it trains at, ends here, in seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tasks import conf
from tasks.stages import parts
from tasks.stages.runner import Context, run
from tasks.store import sha256, write_json


def body(ctx: Context, name: str) -> None:
    """Build the method, check the budgets it would train with, write what it is."""
    from tasks import methods
    from tasks.train.loop import TrainConf

    loaded = methods.load(name, ctx.params.scale, root=ctx.root)
    parts.rollout_conf(ctx.params)
    budget, where = parts.scale_section(ctx.params, "train")
    settings = {"train": conf.fill(TrainConf, conf.merge(budget, loaded.overrides), where), "method": loaded.settings}
    ctx.track.log_params(settings)
    own = sorted(Path(str(m.__file__)) for n, m in sys.modules.items() if n.startswith(f"{methods.__name__}."))
    files = {path.name: sha256(path) for path in own}  # This process loaded no other method.
    found = {"method": name, "title": loaded.title, "settings": conf.plain(settings), "files": files}
    write_json(ctx.root / parts.ARTIFACTS / "method" / f"{name}.json", found)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", required=True)
    name = parser.parse_args().method
    run(f"method@{name}", lambda ctx: body(ctx, name), root=Path("."))


if __name__ == "__main__":
    main()
