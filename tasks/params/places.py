"""Where a run is to work, checked before its settings are written: the file of conf/cluster, and the GPUs of a preset.

Nothing that computes is imported, so a typo is answered at once. What settings take of the machine, and what other
hosts have, is the matter of stage `plan`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import cluster, conf
from tasks.params.edit import names_of, preset_answers

DIVIDED = {"engine": "workers", "generator": "generators"}
"""Folders of `conf/` -> the key of their files that says how many processes the hosts of a cluster file get."""
_SMI_S = 30


def check_cluster(answers: Mapping[str, Any], root: Path) -> bool:
    """Read the cluster file that the environment names, if it does.

    Args:
        answers: settings that will stand in `params.yaml`.
        root: root of the clone.

    Returns:
        whether it does.

    Raises:
        ValueError: there is no such file, it is wrong, or the run starts no process that it would place.
    """
    name = os.environ.get(cluster.CLUSTER_VARIABLE)
    if not name:
        return False
    cluster.load(name, root)
    used = {folder: _chosen(folder, answers, root) for folder in DIVIDED}
    if name != cluster.LOCAL and not any(_processes(*one, root) for one in used.items()):
        raise ValueError(
            f"CLUSTER={name}: engine {used['engine']!r} and generator {used['generator']!r} work in one process of "
            "this host, so it would have no effect. Add ENGINE=deepspeed, which trains on its hosts, or leave CLUSTER "
            "out."
        )
    return True


def check_preset(words: Sequence[str], answers: Mapping[str, Any], root: Path) -> None:
    """Whether this host has a GPU for each process of a preset that is placed here.

    Args:
        words: settings as they were given, such as `PRESET=3b-1gpu`.
        answers: what they say.
        root: root of the clone.

    Raises:
        ValueError: it has fewer.
    """
    name = next((word.removeprefix("PRESET=") for word in words if word.startswith("PRESET=")), "")
    needed = _needed(answers, root) if name else 0
    if needed <= (found := num_gpus() if needed else 0):
        return
    expected = f"found {found or 'no'} GPU{'s' * (found > 1)} on this host (nvidia-smi), expected {needed}"
    if not found:
        raise ValueError(
            f"PRESET={name}: {expected}. Presets are for GPUs. Without one, train a small model: MODEL=smollm2-135m "
            "SCALE=small."
        )
    fitting = [one for one in names_of(["preset"], root) if _fits(one, found, root)]
    smaller = f"Take PRESET={' or PRESET='.join(fitting)}, or name" if fitting else "Name"
    raise ValueError(f"PRESET={name}: {expected}. {smaller} further hosts with CLUSTER= (docs/cluster.md).")


def num_gpus() -> int:
    """GPUs of this host that nvidia-smi lists, or those of them that `CUDA_VISIBLE_DEVICES` leaves."""
    listed = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=_SMI_S, check=False
        )
        listed = done.stdout
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len(list(filter(None, visible.split(",")))))


def _fits(preset: str, found: int, root: Path) -> bool:
    """Whether a preset takes at most so many GPUs of this host."""
    with contextlib.suppress(ValueError):  # The hosts have fewer places than it has processes.
        return _needed(preset_answers(preset, root), root) <= found
    return False


def _needed(answers: Mapping[str, Any], root: Path) -> int:
    """GPUs of this host that engine and generator take, which share them.

    Raises:
        ValueError: the hosts have fewer places than one of them has processes.
    """
    hosts, most = cluster.load(root=root), 0
    for folder, key in DIVIDED.items():
        if (name := answers.get(folder)) is not None:
            count = _processes(folder, str(name), root)
            places = hosts.places(count, f"{conf.CONF}/{folder}/{name}.yaml: {key}")
            most = max(most, sum(not place.start for place in places) if count else 1)
    return most


def _processes(folder: str, name: str, root: Path) -> int:
    """How many processes a file asks for; 0 where the stage has none but its own."""
    count = conf.section(folder, name, root).get(DIVIDED[folder], 0)
    return count if isinstance(count, int) and count > 0 else 0


def _chosen(folder: str, answers: Mapping[str, Any], root: Path) -> str:
    return str(answers[folder] if folder in answers else conf.read_yaml(root / conf.PARAMS).get(folder))
