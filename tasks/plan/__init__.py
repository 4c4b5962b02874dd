"""Plans a run: checks every setting of every stage, and writes down what each stage and item depends on.

Each module of `tasks/stages/` says which settings its stage reads:

* `settings(run, **item)` resolves them from `params.yaml` and `conf/` and gives the stage's own dataclass;
* `loads(settings)` (optional) builds what the stage will load by kind, so that its source files are known;
* `MATRIX` (optional) names the keys of the stage's matrix in `dvc.yaml`, in order.

Nothing here trains, searches or loads a model: a wrong setting of any stage ends the run here, in seconds.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from tasks import conf, identity, libraries, planned, store
from tasks.params import chosen
from tasks.plan import model_folders, preflight
from tasks.plan.run_settings import RunSettings as RunSettings
from tasks.planned import Plan


def plans(
    run: RunSettings, stages: Mapping[str, ModuleType], sources: identity.Sources | None = None
) -> Iterator[tuple[str, Plan]]:
    """The name and the plan of every stage and item.

    Args:
        run: settings of the run.
        stages: name of a stage -> its module.
        sources: the source files of this clone; None reads them.

    Raises:
        ValueError: a wrong setting; names file and key.
    """
    sources = sources or identity.Sources(identity.ROOT)
    hash_of = functools.cache(lambda extras: store.digest(identity.libraries(run.root, extras)))
    for stage, module in stages.items():
        keys = getattr(module, "MATRIX", ())
        for values in itertools.product(*(run.items(key) for key in keys)):
            settings = module.settings(run, **dict(zip(keys, values, strict=True)))
            loaded = module.loads(settings) if hasattr(module, "loads") else ()
            modules = {module.__name__} | identity.modules_of([settings, loaded])
            item = "-".join(map(str, values))
            extras = tuple(sorted(map(libraries.file_of, identity.required_by([settings, loaded]))))
            plan = Plan(conf.plain(settings), sources.used(modules), hash_of(extras), extras)
            yield f"{stage}@{item}" if item else stage, plan


def write(out: Path, run: RunSettings, stages: Mapping[str, ModuleType]) -> list[str]:
    """Write all plans into `out`, which appears only when every setting is right; returns the names of the stages.

    Raises:
        ValueError: a wrong setting, a model folder that is not there, more memory or disk than there is, or no build of
            torch for a part.
        OutageError: a library that a part requires cannot be installed.
    """
    run.check_models()
    model_folders.check(run)
    preflight.check(run)
    sources = identity.Sources(identity.ROOT)
    made = list(plans(run, stages, sources))
    extras = {name for _, plan in made for name in plan.extras}
    if libraries.ensure(run.root, extras):
        made = list(plans(run, stages, sources))  # Versions have changed.
    if differing := identity.differing(run.root, extras):
        told = ", ".join(f"{name} {pin} (installed: {found})" for name, (pin, found) in differing.items())
        print(f"warning: other versions are installed than {libraries.REQUIREMENTS}/ pins: {told}. Results may differ; "
              "nothing that was made with the pinned ones is used. If you did not mean this: rm -r .venv; make setup",
              file=sys.stderr)  # fmt: skip
    with store.replacing_folder(out) as work:
        for name, plan in made:
            planned.write(work, name, plan)
        chosen.require_used(run.root)
    sources.remember()
    return [name for name, _ in made]
