"""Which files of a model folder are read, and their hashes: one list for every loader and every hash.

transformers, vLLM and our own readers choose files by rules of their own. A folder for which these rules differ, or
that names a file outside itself, is refused: a hash of the folder would not cover what is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tasks.store import DataError, digest, read_json, sha256

MADE_FROM = "source.json"
"""Beside a model that a run has made: where it came from."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"
"""The one folder below a model's of which a loader reads files."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files from which the weights of a model folder are read, by name.

    Raises:
        DataError: there are none; the index names a file that is missing or lies elsewhere; or loaders would read
            different files.
    """
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    if (folder / INDEX).is_file():
        indexed = _indexed(folder / INDEX)
        if names and names != indexed:
            raise DataError(
                f"{folder}: found {WEIGHTS} and {INDEX}, which names {_listed(indexed)}: some loaders read the one, "
                "some the others. Remove what does not belong to the model."
            )
        names = indexed
    elif other := sorted({path.name for path in folder.glob("*.safetensors")} - {*names}) if names else []:
        raise DataError(
            f"{folder}: found {other[0]} beside {WEIGHTS}, and no {INDEX} that says what is read. Some loaders read "
            "both. Move the file that is not the model's out of the folder."
        )
    if not names:
        raise DataError(f"{folder}: found no weights, expected {WEIGHTS} or {INDEX} with the files that it names.")
    for name in names:
        if not (folder / name).is_file():
            raise DataError(f"{folder / INDEX}: names {name}, which is missing. Copy the model folder again.")
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    """The files that an index names."""
    tree = read_json(index)
    weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{index}: found no `weight_map`, expected the file of each weight. Save the model again.")
    return sorted(_plain_names(weight_map.values(), index, "a file of weights"))


def _plain_names(names: Iterable[object], path: Path, what: str) -> set[str]:
    """These names, if each is that of a file in the folder of `path`."""
    found = set()
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or not name.isprintable():
            raise DataError(
                f"{path}: {what} is {name!r:.200}, expected a plain name: no hash of this folder would cover a file "
                "elsewhere. Put the file into the folder, and write its name alone."
            )
        found.add(name)
    return found


def _listed(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def check_files(folder: Path) -> None:
    """Refuse a model folder of which a loader would read other files than those that its hashes cover.

    Raises:
        DataError: as `weight_files`; adapters lie beside the weights; a configuration names other files; or the name
            of a weight cannot be printed.
    """
    files = weight_files(folder)
    if (folder / "adapter_config.json").exists():
        raise DataError(
            f"{folder}: found adapter_config.json, expected a model without adapters, which not every loader would "
            "add. Merge them (peft: merge_and_unload) and save the model, or remove the adapter's files."
        )
    if other := _tree(folder / "config.json").get("transformers_weights"):
        raise DataError(
            f"{folder / 'config.json'}: transformers_weights={other!r:.200} names another file of weights, which not "
            f"every loader reads. Name the file {WEIGHTS} and remove the key."
        )

    path = folder / "tokenizer_config.json"
    versions = _tree(path).get("fast_tokenizer_files") if path.is_file() else None
    _plain_names(versions if isinstance(versions, list) else [], path, "one of fast_tokenizer_files")

    for file in files:
        for name in _names(file):
            if not name.isprintable():
                raise DataError(
                    f"{file}: a weight is called {name!r:.200}, expected a name of printable characters. Save the "
                    "model again."
                )


def check_modules(folder: Path) -> None:
    """Refuse an encoder of sentence-transformers of which files outside its folder would be read.

    Raises:
        DataError: as `check_files`, of each model in it; or `modules.json` names a folder outside.
    """
    for path in (folder, *(one for one in folder.rglob("*") if one.is_dir())):
        if (path / "config.json").is_file() and any((path / name).is_file() for name in (WEIGHTS, INDEX)):
            check_files(path)
    modules = read_json(folder / "modules.json") if (folder / "modules.json").is_file() else []
    for module in modules if isinstance(modules, list) else []:
        place = Path(str(module.get("path", "") if isinstance(module, dict) else ""))
        if place.is_absolute() or ".." in place.parts:
            raise DataError(
                f"{folder / 'modules.json'}: found path {str(place)!r:.200}, expected a folder within this one: no "
                "hash of it would cover what lies elsewhere. Copy the module into it."
            )


def _tree(path: Path) -> dict[str, Any]:
    tree = read_json(path)
    return tree if isinstance(tree, dict) else {}


def _names(file: Path) -> Iterator[str]:
    """Names of the weights in a file; none of a damaged one, of which its loader says more."""
    try:
        with safe_open(file, framework="numpy") as opened:
            yield from opened.keys()
    except SafetensorError:
        return


def lacking(folder: Path) -> str:
    """What a model needs and a folder does not have, with the files that were expected; empty for a whole folder."""
    for what, names in (
        ("model configuration", ("config.json",)),
        ("safetensors weights", (WEIGHTS, INDEX)),
        ("tokenizer", ("tokenizer.json", "vocab.json", "tokenizer.model")),
    ):
        if not any((folder / name).exists() for name in names):
            return f"{what} found (expected {' or '.join(names)})"
    return ""


def weights_sha256(folder: Path) -> str:
    """Hash of a policy's weights: the file's own, or one over the shards'."""
    files = weight_files(folder)
    return sha256(files[0]) if len(files) == 1 else digest([[file.name, sha256(file)] for file in files])


def require_weights(folder: Path, expected: str | None) -> str:
    """Refuse weights that are not those that a record names; asked where they are about to be loaded.

    A disk that flips bits changes neither size nor time of a file, by which DVC knows it.

    Args:
        folder: of the model.
        expected: its `weights_sha256` in the record; None is any.

    Returns:
        Its `weights_sha256`.

    Raises:
        DataError: they are others.
    """
    found = weights_sha256(folder)
    if expected not in (None, found):
        raise DataError(
            f"{folder}: found weights with sha256 {found}, expected {expected}, those that were trained: the files are "
            "damaged or were exchanged. Remove the folder and run `make run`, which takes them from DVC's cache or "
            "trains them again."
        )
    return found


def content_sha256(folder: Path) -> str:
    """Hash of every file of a model folder that a loader may read; `source.json` only says where they came from."""
    files = [file for file in folder.iterdir() if file.name != MADE_FROM] + [*(folder / TEMPLATES).glob("*")]
    named = sorted((file.relative_to(folder).as_posix(), file) for file in files if file.is_file())
    return digest([[name, sha256(file)] for name, file in named])


def require_content(folder: Path, expected: str | None) -> None:
    """Refuse a model folder whose files are not those that the plan was made with; None, a folder made since, is any.

    Raises:
        DataError: they are others.
    """
    if expected is not None and content_sha256(folder) != expected:
        raise DataError(
            f"{folder}: found other files than when the run was planned. Plan anew: python -m flows.reproduce "
            "--force plan."
        )
