"""One file per paper: which parts, with which numbers. `load(name)` reads `conf/method/<name>.yaml` and builds it.

A method file holds the module's name, its title for tables, per-scale overrides of the training budget
(`scales`), and the settings of the module's dataclass. There is no registry: the module named there is
imported from this folder.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.agent.grammar import SearchGrammar
from tasks.rl.method import Method

_OWN = ("module", "title", "scales", "prompt")


@dataclass(frozen=True)
class Loaded:
    """A method with what the loop and the tables need beside it."""

    name: str
    title: str
    method: Method
    overrides: dict[str, Any]
    settings: dict[str, Any]


def load(
    name: str, scale: str, template: str | None = None, grammar: SearchGrammar | None = None, root: Path = Path(".")
) -> Loaded:
    """Read and build `conf/method/<name>.yaml`.

    Args:
        name: file name without suffix.
        scale: picks the file's `scales` entry, overrides of the training settings.
        template: replaces the method's prompt (a model that cannot read instructions brings its own).
        grammar: with the tokenizer's special tokens reserved.

    Raises:
        ValueError: unknown method, module, key, or a value out of bounds.
    """
    path = conf.path_of("method", name, root)
    tree = conf.section("method", name, root)
    for key in ("module", "title", "prompt"):
        if not isinstance(tree.get(key), str):
            raise ValueError(
                f"{path}: key {key!r} is missing or not text. Add it; see conf/method/search_r1_grpo.yaml."
            )
    try:
        module = importlib.import_module(f"tasks.methods.{tree['module']}")
    except ModuleNotFoundError as error:
        if error.name != f"tasks.methods.{tree['module']}":
            raise  # Something the method itself needs.
        raise ValueError(f"{path}: module={tree['module']!r}: there is no tasks/methods/{tree['module']}.py.") from None
    if "{question}" not in (template or tree["prompt"]):
        raise ValueError(f"{path}: prompt has no {{question}}: the policy would never see it. Add {{question}}.")
    for named in tree.get("scales") or {}:
        conf.path_of("scale", named, root, f"{path}: scales")
    own = {key: value for key, value in tree.items() if key not in _OWN}
    settings = conf.fill(module.Conf, own, str(path))
    try:
        built: Method = module.build(settings, template or tree["prompt"], grammar or SearchGrammar())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    overrides = (tree.get("scales") or {}).get(scale) or {}
    return Loaded(name, tree["title"], built, overrides, {"module": tree["module"], **conf.plain(settings)})
