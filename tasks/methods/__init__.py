"""One file per paper: which parts, with which numbers. `load(name)` reads `conf/method/<name>.yaml` and builds it.

Keys of such a file beside the settings of the module's dataclass:

* `like`: another method's file, whose keys hold where this file does not give them; an ablation is a few lines.
* `module`, `title`, `prompt`, `grammar`: file of this folder, name in tables, file of `conf/prompt/`, kind of grammar.
* `rows`: [method, variant] pairs under which the papers print it.
* `train`, `rollout`: changes to the scale's sections of these names.
* `scales`: for each scale `train`, `rollout` and `settings`, over all of the above.

There is no registry: the module named there is imported from this folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import conf, parts
from tasks.agent import grammars, prompts
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.rl.method import Method

_TEXTS = ("module", "title", "prompt")
_OWN = (*_TEXTS, "grammar", "rows", "train", "rollout", "scales")
_SCALED = ("train", "rollout", "settings")


@dataclass(frozen=True)
class Loaded:
    """A method with what the loop and the tables need beside it.

    Attributes:
        name, title: of the file; for tables.
        method: the composition.
        train, rollout: changes to the scale's sections.
        settings: what the composition was built from, for the record.
        prompting: prompt and grammar of the method itself, whatever a model brings.
        rows: [method, variant] pairs under which the papers print it.
    """

    name: str
    title: str
    method: Method
    train: dict[str, Any]
    rollout: dict[str, Any]
    settings: dict[str, Any]
    prompting: dict[str, Any]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Rows:
    rows: tuple[tuple[str, ...], ...]


def load(
    name: str, scale: str, prompt: Prompt | None = None, grammar: SearchGrammar | None = None,
    tokenizer: Any = None, root: Path = Path("."),
) -> Loaded:  # fmt: skip
    """Read and build `conf/method/<name>.yaml`.

    Args:
        name: file name without suffix.
        scale: picks the file's `scales` entry.
        prompt, grammar: replace the method's (a model that cannot read instructions brings its own).
        tokenizer: the grammar is fitted to it.
        root: root of the clone.

    Raises:
        ValueError: unknown method, module, key, or a value out of bounds.
    """
    path = conf.path_of("method", name, root)
    tree = conf.derived("method", name, root, own=("rows", "title"))
    for key in _TEXTS:
        if not isinstance(tree.get(key), str):
            raise ValueError(
                f"{path}: key {key!r} is missing or not text. Add it; see conf/method/search_r1_grpo.yaml."
            )
    if not (Path(__file__).parent / f"{tree['module']}.py").is_file() or not tree["module"].isidentifier():
        raise ValueError(f"{path}: module={tree['module']!r}: there is no tasks/methods/{tree['module']}.py.")
    module = importlib.import_module(f"tasks.methods.{tree['module']}")  # Loads parts by kind.
    if not hasattr(module, "Conf"):
        raise ValueError(f"{path}: module={tree['module']!r}: tasks/methods/{tree['module']}.py is no method: no Conf.")
    own_prompt = prompts.load(tree["prompt"], str(path), root)
    own_grammar = grammars.make(tree.get("grammar", {}), None, f"{path}: grammar")
    scaled = _scaled(tree, scale, path, root)
    _refuse_hidden(conf.section("method", name, root), scaled["settings"], scale, path)
    own = {key: value for key, value in tree.items() if key not in _OWN}
    settings = conf.fill(module.Conf, conf.merge(own, scaled["settings"]), str(path))
    try:
        used = grammar or own_grammar
        used = used if tokenizer is None else used.fitted(tokenizer)
        built: Method = module.build(settings, prompt or own_prompt, used)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Loaded(
        name=name,
        title=tree["title"],
        method=built,
        train=conf.merge(_mapping(tree, "train", path), scaled["train"]),
        rollout=conf.merge(_mapping(tree, "rollout", path), scaled["rollout"]),
        settings={"module": tree["module"], **conf.plain(settings)},
        prompting={"prompt": conf.plain(own_prompt), "grammar": parts.plain(own_grammar)},
        rows=conf.fill(_Rows, {"rows": tree.get("rows") or []}, str(path)).rows,
    )


def _scaled(tree: conf.Tree, scale: str, path: Path, root: Path) -> dict[str, dict[str, Any]]:
    """The entry of `scales` for this scale, every entry checked."""
    scales = _mapping(tree, "scales", path)
    for named, entry in scales.items():
        if not isinstance(named, str):
            raise ValueError(f"{path}: scales: found {named!r}, expected the name of a file of conf/scale/.")
        conf.path_of("scale", named, root, f"{path}: scales")
        for key in entry if isinstance(entry, Mapping) else [entry]:
            if key not in _SCALED:
                raise ValueError(f"{path}: scales: {named}: unknown key {key!r}. Known: {', '.join(_SCALED)}.")
    entry = _mapping(scales, scale, path)
    return {key: _mapping(entry, key, path) for key in _SCALED}


def _refuse_hidden(own: conf.Tree, scaled: Mapping[str, Any], scale: str, path: Path) -> None:
    """Refuse a setting of the file itself that an inherited one of the scale would hide."""
    if "like" not in own:
        return
    again = _mapping(_mapping(_mapping(own, "scales", path), scale, path), "settings", path)
    for key in own.keys() & scaled.keys() - again.keys():
        raise ValueError(
            f"{path}: {key}={own[key]!r} is hidden by {key}={scaled[key]!r} of scales: {scale}: settings, which it "
            f"takes over from conf/method/{own['like']}.yaml. Say it there, too: "
            f"scales: {{{scale}: {{settings: {{{key}: {own[key]!r}}}}}}}."
        )


def _mapping(tree: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = tree.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: {key}={found!r}: expected a mapping of settings.")
    return dict(found)
