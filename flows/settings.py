"""The settings of a run as its user gives them, written into `params.yaml` after a check. All follow `tasks.params`.

Nothing here knows what a setting does.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shutil
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks import conf, params


def names_of(kinds: Sequence[str], root: Path = Path(".")) -> list[str]:
    """Names of the files `conf/<kind>/*.yaml` of all these kinds."""
    return sorted(path.stem for kind in kinds for path in (root / conf.CONF / kind).glob("*.yaml"))


NO_FOLDER = conf.CONF / "data/none.txt"
"""Stands as `data_folder` where data is generated. Settings would not do: a comment in them would run stage `data`."""
KEPT = Path(".scratch/params.kept.yaml")
"""What `params.yaml` was before a run that changed it for itself only."""


def _every(cls: type = params.Params, prefix: str = "") -> Iterator[tuple[str, params.Setting]]:
    for setting in params.settings_of(cls):
        key = prefix + setting.key
        yield from _every(setting.section, f"{key}.") if setting.section is not None else [(key, setting)]


DECIDE_MODELS = {"systems", "scale"}
"""Settings from which follows which models are trained for services."""
SETTINGS: dict[str, params.Setting] = dict(_every())
"""Every setting by its dotted key."""
VARIABLES = {key.rpartition(".")[2].upper(): key for key in SETTINGS}
"""The dotted key of each variable of the Makefile, such as `TOP_K`."""


def help_text(root: Path) -> str:
    """Every setting for `--help`: its key, its variable, its meaning and its possible values."""
    lines = ["settings (--set key=value, or --set VARIABLE=value; lists as a,b):"]
    for variable, key in VARIABLES.items():
        setting = SETTINGS[key]
        choices = names_of(setting.kinds, root) or typing.get_args(setting.info.annotation)
        known = f" [{', '.join(map(str, choices))}]" if choices and ... not in choices else ""
        lines.append(f"  {key} ({variable}): {setting.info.description}{known}")
    lines.append("  (METHODS): methods (conf/method), set as systems beside evaluate.reference")
    return "\n".join(lines)


@contextlib.contextmanager
def applied(answers: dict[str, Any], root: Path, once: bool = False) -> Iterator[list[str]]:
    """Change `params.yaml` for a run, and with `once` put it back at the end.

    After a kill the next run puts it back, see `restore`. Renaming needs no space, so a full disk changes nothing.

    Yields:
        `key: old -> new` for each change.

    Raises:
        ValueError: see `apply`.
    """
    path, kept = root / conf.PARAMS, root / KEPT
    if once and path.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
    written = None
    try:
        changes = apply(answers, root)
        written = path.read_bytes()
        yield changes
    finally:
        if once and written is not None and path.read_bytes() != written:
            old = kept.rename(kept.with_suffix(".old.yaml"))
            print(f"warning: {conf.PARAMS} was edited during the run and stays so; {old} is what it was.", flush=True)
        restore(root)


def restore(root: Path) -> list[str]:
    """Put `params.yaml` back as it was before a run that changed it for itself only; one line if there was one."""
    try:
        os.replace(root / KEPT, root / conf.PARAMS)
    except FileNotFoundError:
        return []
    return [f"put {conf.PARAMS} back as it was before that run"]


def apply(answers: dict[str, Any], root: Path) -> list[str]:
    """Write answers into `params.yaml`, keeping its comments; returns `key: old -> new` for each real change.

    All are written or none: the result is checked first, and replaces the file in one step.

    Raises:
        ValueError: a value that `tasks.conf` refuses.
    """
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 4096
    path = root / conf.PARAMS
    conf.read_yaml(path)  # ruamel's errors name no file.
    tree = yaml.load(path.read_text(encoding="utf-8"))

    changes = _change(tree, answers)
    checked = _checked(yaml, tree, root)
    if not (root / checked.data_folder).exists():
        raise ValueError(_no_data(f"{conf.PARAMS}: data_folder={checked.data_folder}", root))
    if answers.keys() & DECIDE_MODELS:
        needed = params.models_of_all(checked.systems, checked.scale, root)
        changes += _change(tree, {key: list(new) for key, new in needed.items() if new != getattr(checked, key)})
        _checked(yaml, tree, root)

    if changes:
        write(root, _with_spaces_of(path.read_text(encoding="utf-8"), _dumped(yaml, tree)))
    return changes


def _change(tree: dict[str, Any], answers: dict[str, Any]) -> list[str]:
    """Set answers in the tree of `params.yaml`; returns `key: old -> new` for each real change."""
    changes = []
    for key, value in answers.items():
        section, last = _place(tree, key)
        old = section.get(last, SETTINGS[key].default)
        old = list(old) if isinstance(old, list | tuple) else old
        if old != value:
            section[last] = _inline(value)
            changes.append(f"{key}: {_text(old)} -> {_text(value)}")
    return changes


def _dumped(yaml: Any, tree: dict[str, Any]) -> str:
    text = io.StringIO()
    yaml.dump(tree, text)
    return text.getvalue()


def _checked(yaml: Any, tree: dict[str, Any], root: Path) -> params.Params:
    """The settings of a tree as the file would have them, also those that were written by hand."""
    return params.check(conf.parse(_dumped(yaml, tree), str(conf.PARAMS)), root)


def _with_spaces_of(before: str, after: str) -> str:
    """The new text with as many spaces before each comment as the old one has: going back leaves no difference.

    ruamel keeps the column of a comment, unless a longer value pushes it on; then it stays there for good.
    """
    old, new = before.split("\n"), after.split("\n")
    if len(old) != len(new):
        return after
    for number, line in enumerate(old):
        found = re.search(r"\S(\s+)(#.*)$", line)
        if found and new[number].endswith(found[2]):
            new[number] = new[number].removesuffix(found[2]).rstrip() + found[1] + found[2]
    return "\n".join(new)


def _place(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section of `params.yaml` that holds a dotted key, and the last part of the key."""
    *sections, last = key.split(".")
    for name in sections:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{conf.PARAMS}: {name}: found {conf.shown(tree)}, expected a mapping.")
    return tree, last


def _inline(value: Any) -> Any:
    """A list that is written as `[a, b]` in the file."""
    from ruamel.yaml.comments import CommentedSeq

    if not isinstance(value, list):
        return value
    inline = CommentedSeq(value)
    inline.fa.set_flow_style()
    return inline


def write(root: Path, text: str) -> None:
    """Replace `params.yaml` in one step."""
    path = root / conf.PARAMS
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def parse(words: list[str], root: Path = Path(".")) -> dict[str, Any]:
    """`["evaluate.top_k=5", "SEEDS=0,1"]` as `{"evaluate.top_k": 5, "seeds": [0, 1]}`; values are YAML.

    Raises:
        ValueError: no `key=value`, no setting or variable of this name, or a value that is not YAML.
    """
    answers: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {word}: expected key=value, such as evaluate.top_k=5.")
        if name in SHORTHANDS:
            answers |= SHORTHANDS[name](value, root)
        else:
            key = _key(name)
            answers[key] = _value(word, value, SETTINGS[key].is_list)
    return answers


def _key(name: str) -> str:
    """The dotted key that a key or a variable stands for."""
    known = [*(VARIABLES if name.isupper() else SETTINGS), *(SHORTHANDS if name.isupper() else ())]
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"--set {name}: params.yaml has no such key. Known: {', '.join(known)}.{hint}")
    return VARIABLES.get(name, name)


def _value(word: str, text: str, is_list: bool) -> Any:
    """The YAML value of a setting; a list may lack its brackets."""
    try:
        value = conf.parse(text, word)
        if is_list and not isinstance(value, list):
            value = conf.parse(f"[{text}]", word)
    except ValueError:
        raise ValueError(f"--set {word}: the value is not YAML. Lists are written as a,b or [a, b].") from None
    return value


def data_answers(data: str, root: Path) -> dict[str, Any]:
    """`DATA=` of the Makefile: a name of `conf/data/`, or a folder of real data.

    Raises:
        ValueError: neither.
    """
    known = names_of(["data"], root)
    if data in known:
        return {"data": data} if data == "folder" else {"data": data, "data_folder": str(NO_FOLDER)}
    if (root / data).is_dir():
        return {"data": "folder", "data_folder": data}
    raise ValueError(_no_data(f"DATA={data}", root))


def _no_data(found: str, root: Path) -> str:
    return f"{found}: neither a folder nor a name of conf/data/ ({', '.join(names_of(['data'], root))})."


def method_answers(methods: str, root: Path) -> dict[str, Any]:
    """`METHODS=` of the Makefile: these methods beside the system that others are compared with.

    Raises:
        ValueError: no list, or `params.yaml` does not say what others are compared with.
    """
    return {"systems": _beside_reference(_value(f"METHODS={methods}", methods, True), root)}


def _beside_reference(methods: Sequence[str], root: Path) -> list[str]:
    reference = params.read(root).evaluate.reference
    return [reference, *(method for method in methods if method != reference)]


SHORTHANDS: dict[str, Callable[[str, Path], dict[str, Any]]] = {"DATA": data_answers, "METHODS": method_answers}
"""Variables that set more than the setting of their name."""


def compare_answers(name: str, root: Path) -> dict[str, Any]:
    """`--compare`: what `conf/compare/<name>.yaml` says, with the system that its methods are compared with.

    Raises:
        ValueError: no such file, an unknown or missing key, or a method that does not exist.
    """
    compare = params.compare(name, root)
    answers = {"systems": _beside_reference(compare.methods, root), "seeds": list(compare.seeds)}
    return answers if compare.sampled is None else {**answers, "evaluate.sampled": compare.sampled}


def _text(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
