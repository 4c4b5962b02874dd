"""Settings of `conf/` that a run has of its own: `set` of `params.yaml`, `SET="train.policy.lr=1e-4"` after `make`.

A dotted key begins with a section of the scale (`train.policy.lr`, `rollout.top_k`), or with a folder of `conf/`, whose
files of this run it then changes (`retriever.k1`), or one of them by its name (`service.openai.timeout_s`). What is set
stands above everything that files say of it, and the same checks see it. Nothing here knows what a setting does.
"""

from __future__ import annotations

import contextlib
import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.conf import CONF, Tree
from tasks.params.scale import SECTIONS

ONE = ("model", "data", "retriever", "generator", "engine", "augment")
"""Folders of which `params.yaml` names one file."""
SEVERAL = ("method", "system", "prompt", "service", "reward_model", "reader", "start")
"""Folders of which a run may read several files."""
FIRST = (*(section for section in SECTIONS if section != "evaluate"), *ONE, *SEVERAL)
"""First words of what can be set."""
OTHERS = {
    "evaluate": f"{conf.PARAMS} has a section of this name, which stands above the scale's: MAX_QUESTIONS=, SAMPLED=",
    "scale": "its sections stand first in a key, such as train.num_steps",
    "compare": "METHODS= and SEEDS= set what it says",
    "preset": "MODEL=, SCALE=, ENGINE= and GENERATOR= set what it says",
    "cluster": "it says where processes run, and CLUSTER= names another file",
    "server": "--set of the server's command has its settings (docs/serving.md)",
    "nightly": "the nightly evaluation reads it, and no run does",
    "papers": "it holds what papers print",
}
"""Other folders -> where their settings are changed."""
NEAR = 3
"""Most settings that a message offers in the place of an unknown one."""


def parse(key: str, value: Any, root: Path = Path(".")) -> Tree:
    """A dotted key with its value as a tree.

    Raises:
        ValueError: it begins with no section and no folder; the message names the nearest settings and their files.
    """
    tree: Any = value
    for word in reversed(key.split(".")):
        tree = {word: tree}
    check(tree, root, "SET")
    return dict(tree)


def words_of(text: str) -> list[str]:
    """The `key=value` words of a text, which blanks divide; a value with blanks stands in quotes.

    Raises:
        ValueError: a quote that is not closed, or a word without a key or a value.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"SET={conf.shown(text)}: {error}. Put a value with blanks into quotes.") from None
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(
                f"SET: found {conf.shown(word)}, expected key=value, such as train.policy.lr=1e-4, with blanks between "
                "two of them."
            )
    return words


def dotted(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`{"train": {"policy": {"lr": 1}}}` as `{"train.policy.lr": 1}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        place = f"{above}.{key}" if above else str(key)
        found |= dotted(value, place) if isinstance(value, Mapping) and value else {place: value}
    return found


def shown(tree: Mapping[str, Any]) -> str:
    """As it is written after `SET=`."""
    return " ".join(shlex.quote(f"{key}={conf.flow(value)}") for key, value in dotted(tree).items())


def check(tree: Mapping[str, Any], root: Path, where: str) -> None:
    """Raise the ValueError for a first word that is no section and no folder, or that has nothing behind it."""
    for first, settings in tree.items():
        if first in OTHERS:
            raise ValueError(f"{where}: {first}: it cannot be set here; {OTHERS[first]}.")
        if first not in FIRST:
            known = f"Known first words: {', '.join(FIRST)}."
            raise ValueError(f"{where}: {first}: there is no such setting.{nearest(_last(tree, first), root)} {known}")
        if not isinstance(settings, Mapping) or not settings:
            raise ValueError(
                f"{where}: {first}={conf.shown(settings)}: expected a key below it, such as {_example(first, root)}."
            )


def _last(tree: Mapping[str, Any], first: str) -> str:
    return next(iter(dotted({first: tree[first]})))


def _example(first: str, root: Path) -> str:
    return next((key for key, _ in _settings(root) if key.startswith(f"{first}.")), f"{first}.key")


@contextlib.contextmanager
def standing(tree: Mapping[str, Any], root: Path) -> Iterator[None]:
    """Inside the block these settings stand above the files of `conf/`.

    Raises:
        ValueError: the block's, with these settings, and with the nearest to one that nothing knows.
    """
    with conf.setting(tree):
        try:
            yield
        except ValueError as error:
            if not tree:
                raise
            near = "".join(nearest(key, root) for key in dotted(tree) if _is_named(key, str(error)))
            raise ValueError(f"{error}{near} Set for this run: {shown(tree)}.") from error


def _is_named(key: str, message: str) -> bool:
    """Whether a message about an unknown key is about a part of this one."""
    return "unknown key" in message and any(repr(word) in message for word in key.split("."))


def require_used(root: Path) -> None:
    """Refuse settings that nothing of this run has read.

    Raises:
        ValueError: names them, and the nearest that a run has.
    """
    for first, second in sorted(conf.not_read()):
        key = f"{first}.{second}"
        raise ValueError(
            f"SET: {key}: nothing that this run uses has this setting: it reads no such file or section."
            f"{nearest(key, root)}"
        )


def nearest(key: str, root: Path) -> str:
    """The settings whose last word is that of a key, or is spelled most like it, each with its file; or nothing."""
    last, known = key.rpartition(".")[2], dict(_settings(root))
    names = {name.rpartition(".")[2] for name in known}
    close = [last] if last in names else difflib.get_close_matches(last, names, 1, 0.7)
    same = [name for name in known if name.rpartition(".")[2] in close]
    same.sort(key=lambda name: (-difflib.SequenceMatcher(None, key, name).ratio() if "." in key else 0, _rank(name)))
    told = [f"{name} ({known[name]})" for name in same[:NEAR] if name != key]
    return f" Nearest: {', '.join(told)}." if told else ""


def _rank(name: str) -> int:
    """What is set most often stands first."""
    return 0 if name.startswith("train.") else 1 if name.partition(".")[0] in SECTIONS else 2


def _settings(root: Path) -> Iterator[tuple[str, str]]:
    """Every key of `conf/` as it is set, with its file; of files of which a run has one, those of `params.yaml`."""
    with contextlib.suppress(ValueError):  # A broken file is named where it is read.
        named = conf.read_yaml(root / conf.PARAMS)
        scale = conf.path_of("scale", str(named.get("scale")), root)
        for key in dotted(conf.read_yaml(scale)):
            yield key, str(scale.relative_to(root))
        for kind in (*ONE, *SEVERAL):
            yield from _of_folder(kind, [str(named.get(kind))] if kind in ONE else [], root)


def _of_folder(kind: str, only: Sequence[str], root: Path) -> Iterator[tuple[str, str]]:
    for name in conf.names(kind, root):
        if not only or name in only:
            for key in dotted(conf.read_yaml(conf.path_of(kind, name, root))):
                if key.partition(".")[0] not in ("extends", "scales", "title"):
                    yield f"{kind}.{key}" if only else f"{kind}.{name}.{key}", f"{CONF}/{kind}/{name}.yaml"
