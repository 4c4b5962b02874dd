"""Atomic checkpoints: folders of files with checksums; incomplete ones are skipped.

A checkpoint is a folder `step-<n>`, written under another name and renamed at the end. Engine and loop write any files
into it; `manifest.json` is written last and holds the sha256 of each. Tensors are stored as safetensors and everything
else as JSON. Nothing is unpickled, so a checkpoint from elsewhere cannot run code.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.store import DataError, OutageError, read_json, replacing_folder, sha256, write_json

log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
_TENSORS, _VALUES = "tensors.safetensors", "values.json"


@contextmanager
def writing(folder: Path, step: int, keep: int = 2) -> Iterator[Path]:
    """A folder to fill, which becomes `folder/step-<n>` when the block ends; older ones than the last `keep` go.

    Raises:
        OSError: the disk is full or not writable; no half-written file stays and older checkpoints are untouched.
        OutageError: the block's, as it is.
    """
    path = folder / f"step-{step:08d}"
    # A folder has one writer, so unfinished checkpoints are those of a killed run.
    for unfinished in folder.glob(".step-*"):
        shutil.rmtree(unfinished, ignore_errors=True)

    try:
        with replacing_folder(path) as work:
            yield work
            write_json(work / _MANIFEST, {"files": {name: sha256(work / name) for name in _names(work)}})
    except OutageError:  # Whoever has the weights is gone, and says so.
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if "No space left" in str(error):  # safetensors gives no number, by which a full disk is known.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(
            f"{path}: the checkpoint could not be written ({error}). Free disk space and start again: "
            f"the run continues from the checkpoint before this one."
        ) from error

    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step-{old:08d}", ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """Step numbers of the checkpoints in `folder`, complete or not, ascending."""
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for path, name in named if name and path.is_dir())


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, None if there is none; an incomplete one is reported and skipped."""
    for step in reversed(steps(folder)):
        path = folder / f"step-{step:08d}"
        try:
            check(path)
        except DataError as error:
            log.warning("%s Skipped; an older checkpoint is used.", error)
        else:
            return path
    return None


def check(path: Path) -> None:
    """Check that a checkpoint folder is complete and unchanged.

    Raises:
        DataError: a file is missing or not in the manifest, or its checksum differs from the manifest's.
    """
    manifest = read_json(path / _MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not files:
        raise DataError(f"{path}: {_MANIFEST} does not list the files of a checkpoint, the checkpoint is torn.")
    present = _names(path)
    for name in sorted({*files, *present}):
        if name not in present:
            raise DataError(f"{path}: {name} is missing, the checkpoint is torn.")
        if name not in files:
            raise DataError(f"{path}: {_MANIFEST} does not list {name}, the checkpoint is torn.")
        if sha256(path / name) != files[name]:
            raise DataError(f"{path}: {name} does not match its checksum, the checkpoint is torn.")


def _names(path: Path) -> list[str]:
    """Every file in and below a folder except its manifest, relative to the folder."""
    names = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return sorted(name for name in names if name != _MANIFEST)


def write_state(folder: Path, tensors: Mapping[str, Tensor], values: Any, are_copies: bool = False) -> None:
    """Write tensors by flat names, and JSON-ready values beside them, into `folder` (made where it is missing).

    Args:
        folder: for the files.
        tensors: by flat names.
        values: JSON-ready.
        are_copies: the tensors lie on the CPU, each in memory of its own, so that no further copies are made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not are_copies:  # safetensors refuses shared memory, and a GPU may lack memory for two.
        tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    save_file(dict(tensors), folder / _TENSORS)
    write_json(folder / _VALUES, values)


def read_state(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """Inverse of `write_state`."""
    return load_file(folder / _TENSORS), read_json(folder / _VALUES)


def pack_optimizer(optimizer: torch.optim.Optimizer, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as flat tensors under `prefix`, and its JSON-ready scalars."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, entry in state["state"].items():
        for name, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}/{index}/{name}"] = value
            else:
                scalars[f"{index}/{name}"] = value
    groups = [{k: list(v) if isinstance(v, tuple) else v for k, v in g.items()} for g in state["param_groups"]]
    return tensors, {"groups": groups, "scalars": scalars}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, prefix: str, tensors: dict[str, Tensor], values: dict[str, Any]
) -> None:
    """Inverse of `pack_optimizer`."""
    entries: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith(f"{prefix}/"):
            _, index, key = name.rsplit("/", 2)
            entries.setdefault(int(index), {})[key] = tensor
    for name, value in values["scalars"].items():
        index, key = name.split("/")
        entries.setdefault(int(index), {})[key] = value
    groups = [{k: tuple(v) if k == "betas" else v for k, v in g.items()} for g in values["groups"]]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
