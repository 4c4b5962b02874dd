"""The settings of a run as its user gives them, written into `params.yaml` after a check. All follow `tasks.params`.

Nothing here knows what a setting does.
"""

from __future__ import annotations

import contextlib
import difflib
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tasks import conf, extends, own, params
from tasks.params import chosen, lent
from tasks.params.scale import Scale

NO_FOLDER = conf.CONF / "data/none.txt"
"""Stands as `data_folder` where data is generated. Settings would not do: a comment in them would run stage `data`."""
PRESET = ("model", "scale", "engine", "generator")
"""Settings that a file of `conf/preset/` may have."""
AS_IT_COMES = "as_it_comes"
"""The system that plays a pretrained model before anything is taught to it."""


def _every(cls: type = params.Params, prefix: str = "") -> Iterator[tuple[str, params.Setting]]:
    for setting in params.settings_of(cls):
        key = prefix + setting.key
        yield from _every(setting.section, f"{key}.") if setting.section is not None else [(key, setting)]


SETTINGS: dict[str, params.Setting] = dict(_every())
"""Every setting by its dotted key."""
VARIABLES = {key.rpartition(".")[2].upper(): key for key in SETTINGS}
"""The dotted key of each variable of the Makefile, such as `TOP_K`; the last parts of keys differ."""


def names_of(kinds: Sequence[str], root: Path = Path(".")) -> list[str]:
    """Names of the files `conf/<kind>/*.yaml` of all these kinds."""
    return sorted(name for kind in kinds for name in conf.names(kind, root))


def help_text(root: Path) -> str:
    """Every setting for `--help`: its key, its variable, its meaning and its possible values."""
    lines = ["settings (--set key=value, or --set VARIABLE=value; lists as a,b):"]
    for variable, key in VARIABLES.items():
        setting = SETTINGS[key]
        choices = names_of(setting.kinds, root) or typing.get_args(setting.info.annotation)
        known = f" [{', '.join(map(str, choices))}]" if choices and ... not in choices else ""
        lines.append(f"  {key} ({variable}): {setting.info.description}{known}")
    presets = ", ".join(names_of(["preset"], root))
    lines.append(f"  (PRESET): model, scale, engine and generator for GPUs (conf/preset) [{presets}]")
    lines.append('  (SET): "train.policy.lr=1e-4 rollout.top_k=5", any number of conf/ (docs/commands.md)')
    return "\n".join([*lines, "  (METHODS): methods (conf/method), set as systems beside evaluate.reference"])


@contextlib.contextmanager
def applied(answers: dict[str, Any], root: Path) -> Iterator[list[str]]:
    """Change `params.yaml` for a run, and put it back at the end, unless `lent.keep` was called.

    After a kill the next run puts it back, see `lent.restore`.

    Yields:
        `key: old -> new` for each change.

    Raises:
        ValueError: see `edited`, or `params.yaml` cannot be written.
    """
    content, changes = edited(answers, root)
    if changes:
        lent.lend(root, content)
    try:
        yield changes
    finally:
        for line in lent.restore(root):
            if line != lent.PUT_BACK:
                print(f"warning: {line}", flush=True)


def apply(answers: dict[str, Any], root: Path) -> list[str]:
    """Write answers into `params.yaml` for good; returns `key: old -> new` for each real change; see `edited`."""
    content, changes = edited(answers, root)
    if changes:
        lent.write(root, content)
    return changes


def edited(answers: dict[str, Any], root: Path) -> tuple[bytes, list[str]]:
    """`params.yaml` with these answers and its comments, and `key: old -> new` for each real change.

    Raises:
        ValueError: a value that `tasks.conf` refuses.
    """
    path = root / conf.PARAMS
    conf.read_yaml(path)  # Names the file if it is missing or wrong.
    text, changes = _edited(path.read_bytes().decode(), answers)  # Line ends stay as they are.
    checked = params.check(conf.parse(text, str(conf.PARAMS)), root)
    if not (root / checked.data_folder).exists():
        raise _no_data(f"{conf.PARAMS}: data_folder={checked.data_folder}", root)

    if answers.keys() & {"systems", "scale", "set"}:  # From them follows which models are trained for services.
        with own.using(checked.parts), conf.setting(checked.set):
            models = params.models_of_all(checked.systems, checked.scale, root)
        text, more = _edited(text, {key: list(names) for key, names in models.items()})
        params.check(conf.parse(text, str(conf.PARAMS)), root)
        changes += more
    return text.encode(), changes


def _edited(text: str, answers: dict[str, Any]) -> tuple[str, list[str]]:
    """The text of `params.yaml` with these values, and `key: old -> new` for each that differs."""
    changes = []
    for key, value in answers.items():
        tree = conf.parse(text, str(conf.PARAMS))
        section, last = _place(tree, key)
        old = section.get(last, SETTINGS[key].default)
        old = list(old) if isinstance(old, tuple) else old
        if old == value:
            continue

        section[last] = value
        text = _with_value(text, key, value)
        if _parsed(text) != tree:
            raise ValueError(
                f"{conf.PARAMS}: {key}: cannot be changed as it is written. Write it as `{last}: {_shown(old)}`."
            )
        changes.append(f"{key}: {_shown(old)} -> {_shown(value)}")
    return text, changes


def _parsed(text: str) -> Any:
    """What a text says; None if it is not YAML."""
    with contextlib.suppress(ValueError):
        return conf.parse(text, str(conf.PARAMS))
    return None


def _place(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section of `params.yaml` that holds a dotted key, and the last part of the key."""
    section, _, last = key.rpartition(".")
    place = tree.setdefault(section, {}) if section else tree
    if not isinstance(place, dict):
        raise ValueError(f"{conf.PARAMS}: {section}: found {conf.shown(place)}, expected a mapping.")
    return place, last


def _with_value(text: str, key: str, value: Any) -> str:
    """The text of a mapping with another value behind a dotted key; everything else stays as it is written."""
    section, _, last = key.rpartition(".")
    node: Any = yaml.compose(text)
    if section:
        known = {name.value: old for name, old in node.value}
        if section not in known:
            return _put(text, node, section, {last: value})
        node = known[section]
    return _put(text, node, last, value)


def _put(text: str, node: Any, name: str, value: Any) -> str:
    """The text with a new value behind a key of this mapping, or with a new key at its begin."""
    written = conf.flow(value)
    for key, old in node.value:
        if key.value == name:
            is_block = isinstance(old, yaml.CollectionNode) and not old.flow_style
            end = "\n" if is_block else ""
            return f"{text[: key.end_mark.index]}: {written}{end}{text[old.end_mark.index :]}"
    at, entry = node.start_mark.index, f"{name}: {written}"
    if node.flow_style:
        return f"{text[: at + 1]}{entry}{', ' if node.value else ''}{text[at + 1 :]}"
    return f"{text[:at]}{entry}\n{' ' * node.start_mark.column}{text[at:]}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return chosen.shown(value) or "nothing"
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def parse(words: list[str], root: Path = Path(".")) -> dict[str, Any]:
    """`["evaluate.top_k=5", "SEEDS=0,1"]` as `{"evaluate.top_k": 5, "seeds": [0, 1]}`; values are YAML.

    Variables of the Makefile stand for keys; `DATA` and `METHODS` set more than one key of this name would, and
    `PRESET` sets those of a file of `conf/preset/` that no other word sets.
    Where the scale teaches a pretrained model before it is trained, `METHODS` lists the model as it comes, too; another
    model or scale takes it off the list again.

    Raises:
        ValueError: no `key=value`, no setting or variable of this name, a value that is not YAML, or both `METHODS` and
            `SYSTEMS`.
    """
    _refuse_two_lists(words)
    answers: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {word}: expected key=value, such as evaluate.top_k=5.")

        if name == "SET":
            answers |= set_answers(value, answers, root)
        elif name.partition(".")[0] in chosen.FIRST and "." in name:
            answers |= set_answers(shlex.quote(word), answers, root)
        # Whatever else is no setting is refused here.
        elif name not in (known := [*VARIABLES, "METHODS", "PRESET"] if name.isupper() else [*SETTINGS]):
            raise ValueError(_unknown(name, value, known, root))
        elif name == "DATA":
            answers |= data_answers(value, root)
        elif name == "PRESET":
            answers = preset_answers(value, root) | answers
        elif name == "METHODS":
            answers["systems"] = _beside_reference(_value(word, value, True), root)
        else:
            key = VARIABLES.get(name, name)
            answers[key] = _value(word, value, SETTINGS[key].is_list)

    if any(word.startswith("METHODS=") for word in words):
        if _teaches_format(answers, root):
            answers["systems"] = [AS_IT_COMES, *(one for one in answers["systems"] if one != AS_IT_COMES)]
    elif {"model", "scale", "data"} & answers.keys() and "systems" not in answers:
        systems = list(params.read(root).systems)
        if AS_IT_COMES in systems and not _teaches_format(answers, root):
            answers["systems"] = [system for system in systems if system != AS_IT_COMES]
    return answers


def set_answers(text: str, answers: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """What a text such as `train.policy.lr=1e-4 evaluate.top_k=5` sets, over `answers` and over `params.yaml`.

    Raises:
        ValueError: see `chosen.words_of` and `chosen.parse`, or a value that is not YAML.
    """
    set_for_run, others = answers.get("set"), {}
    if set_for_run is None:
        set_for_run = params.read(root).set
    for word in chosen.words_of(text):
        key, _, value = word.partition("=")
        if key in SETTINGS and key != "set":
            others[key] = _value(word, value, SETTINGS[key].is_list)
        else:
            set_for_run = conf.merge(set_for_run, chosen.parse(key, _value(word, value, False), root))
    return {**others, "set": set_for_run}


def _unknown(name: str, value: str, known: Sequence[str], root: Path) -> str:
    """What is said of a name that is no setting: where `conf/` has it, or what is spelled most like it."""
    hint = "".join(f" Did you mean {close}?" for close in difflib.get_close_matches(name, known, 1))
    told, near = f"{name}: there is no such setting.{hint}", chosen.nearest(name.lower(), root)
    key = near.split()[1] if near else ""
    if key and (not hint or key.rpartition(".")[2] == name.lower().rpartition(".")[2]):
        return f'{told} Those of conf/ stand in SET="{key}={value}".{near}'
    return f"{told} Known: {', '.join(known)}."


def _refuse_two_lists(words: Sequence[str]) -> None:
    """Raise the ValueError for `METHODS` beside `SYSTEMS`: the later one would win without a word."""
    names = [word.partition("=")[0] for word in words]
    if "METHODS" in names and (other := next((name for name in names if name in ("SYSTEMS", "systems")), None)):
        raise ValueError(
            f"METHODS beside {other}: both write `systems` of {conf.PARAMS}. Give one of them: METHODS=a,b adds the "
            f"reference that others are compared with (evaluate.reference), {other}=a,b is the whole list."
        )


def _teaches_format(answers: Mapping[str, Any], root: Path) -> bool:
    """Whether a run with these answers teaches a pretrained model the format before it trains it."""
    current = params.read(root)
    keys = ("model", "scale", "data")
    model, scale, data = chosen = [answers.get(key, getattr(current, key)) for key in keys]
    if any(name not in names_of([key], root) for key, name in zip(keys, chosen, strict=True)):
        return False  # The check of the settings names the wrong one.
    is_given = conf.section("model", model, root).get("kind") == "pretrained"
    return is_given and Scale(root, scale, data).tree.get("format") is not None


def _value(word: str, text: str, is_list: bool) -> Any:
    """The YAML value of a setting; a list may lack its brackets."""
    parts = text.split(",") if is_list and not text.lstrip().startswith("[") else [text]
    if len(parts) > 1 and (empty := next((i for i, part in enumerate(parts, 1) if not part.strip()), 0)):
        raise ValueError(
            f"--set {word}: part {empty} of {len(parts)} is empty, expected a value between commas. Write it, or "
            "remove the comma."
        )
    try:
        value = conf.parse(text, word)
        return conf.parse(f"[{text}]", word) if is_list and not isinstance(value, list) else value
    except ValueError:
        raise ValueError(f"--set {word}: the value is not YAML. Lists are written as a,b or [a, b].") from None


def data_answers(data: str, root: Path) -> dict[str, Any]:
    """`DATA=` of the Makefile: a name of `conf/data/`, or a folder, which `conf/data/folder.yaml` reads.

    Raises:
        ValueError: neither.
    """
    if data in names_of(["data"], root):
        if extends.read("data", data, "", root).get("kind") == "folder":
            return {"data": data}  # Of the folder that is set, or that DATA_FOLDER names.
        return {"data": data, "data_folder": str(NO_FOLDER)}
    if (root / data).is_dir():
        return {"data": "folder", "data_folder": data}
    raise _no_data(f"DATA={data}", root)


def preset_answers(name: str, root: Path) -> dict[str, Any]:
    """`PRESET=` of the Makefile: the names of model, scale, engine and generator in `conf/preset/<name>.yaml`.

    Raises:
        ValueError: no such file, or other keys.
    """
    tree, place = conf.section("preset", name, root), conf.path_of("preset", name, root)
    for key, value in tree.items():
        conf.require(key in PRESET, f"{place}: key", key, f"one of {', '.join(PRESET)}")
        conf.require(isinstance(value, str), f"{place}: {key}", value, f"the name of a file of conf/{key}/")
    return tree


def _no_data(found: str, root: Path) -> ValueError:
    return ValueError(f"{found}: neither a folder nor a name of conf/data/ ({', '.join(names_of(['data'], root))}).")


def _beside_reference(methods: Sequence[str], root: Path) -> list[str]:
    """Methods, beside the system that others are compared with."""
    reference = params.read(root).evaluate.reference
    return [reference, *(method for method in methods if method != reference)]


def compare_answers(name: str, root: Path) -> dict[str, Any]:
    """`--compare`: what `conf/compare/<name>.yaml` says, with the system that its methods are compared with.

    Raises:
        ValueError: no such file, an unknown or missing key, or a method that does not exist.
    """
    compare = params.compare(name, root)
    answers = {"systems": _beside_reference(compare.methods, root), "seeds": list(compare.seeds)}
    return answers if compare.sampled is None else {**answers, "evaluate.sampled": compare.sampled}
