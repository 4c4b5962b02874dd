"""Stage `plan`: checks all settings and writes what each stage depends on into `artifacts/plan/`. See `tasks.plan`.

It also lists in `artifacts/models/plan.json`, `artifacts/quality/plan.json` and `artifacts/tool/plan.json` which models
are trained for services, so that these folders are there even if they stay empty, and other stages can depend on them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from tasks import conf, params, plan, planned, store, trained
from tasks.params import chosen
from tasks.runner import Context, run

NO_STAGES = ("__init__", "plan")
MODELS = "plan.json"
EMPTY = (trained.FOLDER, Path("artifacts/quality"), Path("artifacts/tool"))
"""Folders that stay empty in a run without such models."""


def stages() -> dict[str, ModuleType]:
    """The modules of all other stages, which are the other files of this folder."""
    names = [path.stem for path in conf.modules(Path(__file__).parent) if path.stem not in NO_STAGES]
    return {name: importlib.import_module(f"tasks.stages.{name}") for name in names}  # Loads parts by kind.


def body(ctx: Context[None]) -> None:
    """Write `artifacts/plan/` and the lists of models."""
    run = plan.RunSettings(ctx.root, params.read(ctx.root))
    with chosen.standing(run.params.set, ctx.root):
        names = plan.write(ctx.root / planned.FOLDER, run, stages())
        for folder in EMPTY:
            store.write_json(ctx.root / folder / MODELS, run.users_of_models)
    print(f"{len(names)} stages and items planned", flush=True)


if __name__ == "__main__":
    run("plan", body)
