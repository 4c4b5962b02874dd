"""Configuration files that extend another one: `extends: name` inherits every key that a file does not set itself.

Mappings are merged key by key; a part of another `kind` replaces the inherited part as a whole. `scales` holds changes
of the file for single scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.conf import Tree, merge

EXTENDS, SCALES = "extends", "scales"
Place = tuple[str, ...]


def read(kind: str, name: str, scale: str, root: Path = conf.ROOT, own: Collection[str] = ()) -> Tree:
    """`conf/<kind>/<name>.yaml` with what it extends, as it is at one scale.

    Args:
        kind, name: folder and name of the file.
        scale: the entry of `scales` that is applied.
        root: root of the clone.
        own: keys that no other file inherits and no scale changes.

    Raises:
        ValueError: an unknown name, files that extend each other in a circle, a wrong entry of `scales`, or a setting
            of this file that an inherited entry of `scales` would override.
    """
    chain = _chain(kind, name, root)
    tree: Tree = {}
    overlay: Tree = {}
    for path, file in reversed(chain):
        rest = {key: value for key, value in file.items() if key not in (EXTENDS, SCALES)}
        tree = merge({key: value for key, value in tree.items() if key not in own}, rest)
        overlay = merge(overlay, _overlay(file, path, scale, own, root))

    path, file = chain[0]
    if len(chain) > 1:
        _refuse_hidden(file, overlay, path, scale, chain[1][0])
    return conf.laid_over(kind, name, merge(tree, overlay), root)


def _chain(kind: str, name: str, root: Path) -> list[tuple[Path, Tree]]:
    """The file, the one it extends, and so on."""
    names, path = [name], conf.path_of(kind, name, root)
    files = [(path, conf.read_yaml(path))]
    while (other := files[-1][1].get(EXTENDS)) is not None:
        where = f"{files[-1][0]}: {EXTENDS}"
        if not isinstance(other, str) or not other.isidentifier():
            raise ValueError(f"{where}={other!r}: expected the name of another file of conf/{kind}/.")
        if other in names:
            raise ValueError(f"{where}: goes round in a circle: {' -> '.join((*names, other))}.")
        path = conf.path_of(kind, other, root, where)
        names.append(other)
        files.append((path, conf.read_yaml(path)))
    return files


def _overlay(file: Tree, path: Path, scale: str, own: Collection[str], root: Path) -> Tree:
    """The file's own entry of `scales` for this scale; all its entries are checked."""
    scales = file.get(SCALES) or {}
    if not isinstance(scales, Mapping):
        raise ValueError(f"{path}: {SCALES}={scales!r}: expected a mapping of scales to changes.")
    for named, entry in scales.items():
        if not isinstance(named, str):
            raise ValueError(f"{path}: {SCALES}: found {named!r}, expected the name of a file of conf/scale/.")
        conf.path_of("scale", named, root, f"{path}: {SCALES}")
        if not isinstance(entry, Mapping):
            raise ValueError(f"{path}: {SCALES}: {named}={entry!r}: expected a mapping of changes.")
        for key in (EXTENDS, SCALES, *own):
            if key in entry:
                raise ValueError(f"{path}: {SCALES}: {named}: key {key!r} is the same at every scale. Give it above.")
    return dict(scales.get(scale, {}))


def _refuse_hidden(file: Tree, overlay: Tree, path: Path, scale: str, source: Path) -> None:
    """Raise if an inherited scale override would silently win over a value that this file sets."""
    mine = {key: value for key, value in file.items() if key not in (EXTENDS, SCALES)}
    again = dict(_leaves((file.get(SCALES) or {}).get(scale) or {}))
    for place, value in _leaves(mine):
        for hidden_by, stronger in _leaves(overlay):
            is_hidden = _is_below(place, hidden_by) and (place, value) != (hidden_by, stronger)
            if is_hidden and not any(_is_below(place, other) for other in again):
                key, other_key = ": ".join(place), ": ".join(hidden_by)
                raise ValueError(
                    f"{path}: {key}={value!r} is hidden by {other_key}={stronger!r} of {SCALES}: {scale}, which it "
                    f"inherits from {source}. Set it there as well: {SCALES}: {{{scale}: {_nested(place, value)}}}."
                )


def _leaves(tree: Mapping[str, Any], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value that is no mapping, with its path of keys."""
    for key, value in tree.items():
        place = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, place)
        else:
            yield place, value


def _is_below(one: Place, other: Place) -> bool:
    """Whether one path of keys begins with the other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _nested(place: Place, value: Any) -> str:
    return f"{{{place[0]}: {_nested(place[1:], value) if len(place) > 1 else repr(value)}}}"
