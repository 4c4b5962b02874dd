"""Atomic checkpoints: tensors in safetensors, the rest in JSON, a checksum of both; torn ones are skipped.

A checkpoint is a folder `step-<n>` made beside and renamed. `manifest.json` is written last and holds the
sha256 of every other file. Nothing is unpickled, so a checkpoint from elsewhere can hold no code.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.store import DataError, read_json, replacing_folder, sha256, write_json

log = logging.getLogger(__name__)
_FILES = {"tensors.safetensors", "values.json"}


@dataclass
class State:
    """Everything a restart needs to continue exactly.

    Attributes:
        step: steps done.
        tensors: flat name -> tensor (weights, optimizer moments, RNG states).
        values: JSON-ready rest (data position, counters, optimizer scalars, settings in force).
    """

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save(folder: Path, state: State, keep: int = 2) -> Path:
    """Write `folder/step-<n>` atomically, then delete all but the newest `keep` checkpoints.

    Raises:
        OSError: the disk is full or unwritable; nothing half-written stays and older checkpoints are untouched.
    """
    path = folder / f"step-{state.step:08d}"
    for unfinished in folder.glob(".step-*"):  # What a killed run was writing; a folder has one writer.
        shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with replacing_folder(path) as work:
            # Copies, because safetensors refuses shared memory; on the CPU, because a GPU has no room for two.
            tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in state.tensors.items()}
            save_file(tensors, work / "tensors.safetensors")
            write_json(work / "values.json", {"step": state.step, "values": state.values})
            files = {f.name: sha256(f) for f in sorted(work.iterdir())}
            write_json(work / "manifest.json", {"files": files})
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(
            f"{path}: the checkpoint could not be written ({error}). Free disk space and start again: "
            f"the run continues from the checkpoint before this one."
        ) from error
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step-{old:08d}", ignore_errors=True)
    return path


def steps(folder: Path) -> list[int]:
    """Step numbers of the checkpoints in `folder`, sound or not, ascending."""
    return sorted(int(p.name[5:]) for p in folder.glob("step-*") if p.name[5:].isdigit())


def latest(folder: Path) -> State | None:
    """The newest sound checkpoint, None if there is none; a torn one is reported and skipped."""
    for step in reversed(steps(folder)):
        path = folder / f"step-{step:08d}"
        try:
            return load(path)
        except DataError as error:
            log.warning("%s Skipped; an older checkpoint is used.", error)
    return None


def load(path: Path) -> State:
    """Read one checkpoint folder.

    Raises:
        DataError: a file is missing, or its checksum differs from the manifest's.
    """
    manifest = read_json(path / "manifest.json")
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or set(files) != _FILES:
        raise DataError(f"{path}: manifest.json does not list {' and '.join(sorted(_FILES))}, the checkpoint is torn.")
    for name, expected in files.items():
        if not (path / name).is_file():
            raise DataError(f"{path}: {name} is missing, the checkpoint is torn.")
        if sha256(path / name) != expected:
            raise DataError(f"{path}: {name} does not match its checksum, the checkpoint is torn.")
    record = read_json(path / "values.json")
    return State(record["step"], load_file(path / "tensors.safetensors"), record["values"])


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
