"""What this machine has for a run: memory of its first GPU, memory of its processor, and room on its disk.

Memory that a control group or `ulimit -v` withholds is not there: a container of 4 GB on a host of 64 GB has 4 GB.
"""

from __future__ import annotations

import re
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""Control groups of version 1 say 2^63 rounded down to a page where there is no limit."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a process may take, and what gives or limits them."""

    size: int
    source: str


@dataclass(frozen=True)
class Machine:
    """See the module.

    Attributes:
        host: memory of the processor.
        gpu: all memory of the first GPU; None without one.
        gpu_has_bfloat16, host_has_bfloat16: whether they compute in bfloat16.
        num_gpus: of which `gpu` is the first; of no meaning where that is None.
    """

    host: Memory
    gpu: Memory | None = None
    host_has_bfloat16: bool = False
    gpu_has_bfloat16: bool = False
    num_gpus: int = 1

    @property
    def trains_in_bfloat16(self) -> bool:
        """Whether the device that trains computes in bfloat16."""
        return self.host_has_bfloat16 if self.gpu is None else self.gpu_has_bfloat16


def this_machine() -> Machine:
    """The machine of this process. It holds no GPU: a process that does may run beside the plan and end before."""
    import torch

    from tasks.model import computes_in

    host = computes_in("auto", torch.device("cpu")) == torch.bfloat16
    if not torch.cuda.is_available():
        return Machine(host_memory(), None, host)
    properties = torch.cuda.get_device_properties(0)
    half = computes_in("auto", torch.device("cuda")) == torch.bfloat16
    gpu = Memory(properties.total_memory, f"GPU {properties.name}")
    return Machine(host_memory(), gpu, host, half, torch.cuda.device_count())


def host_memory(root: Path = Path("/")) -> Memory:
    """The memory that a process of this user can take now: the least of all limits.

    Args:
        root: where `/proc` and `/sys` are.
    """
    text = (root / "proc/meminfo").read_text(encoding="utf-8")
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    limits = [Memory(int(found[1]) * 1024, "free memory of this machine")] if found else []

    if (left := _left_in_control_groups(root)) is not None:
        limits.append(Memory(left, "what the control group leaves"))
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        limits.append(Memory(most, "limit of ulimit -v"))
    return min(limits, key=lambda memory: memory.size, default=Memory(UNLIMITED, "memory of this machine"))


def _left_in_control_groups(root: Path) -> int | None:
    """Bytes that the control groups of this process, and those around them, still give; None without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None

    left = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers == "":
            left += _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _left(root / "sys/fs/cgroup/memory", path, *names)
    return min(left, default=None)


def _left(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """What each group from `path` up to the mount leaves; in a container the path may lie outside of what is mounted.

    Pages of files that nobody used lately count as usage, although the kernel takes them back when memory is needed.
    """
    parts = Path(path.lstrip("/")).parts
    left = []
    for count in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:count])
        most = _number(folder / limit)
        if most is None or most >= UNLIMITED:
            continue
        used = _number(folder / usage) or 0
        given_back = re.search(rf"^{reclaimable} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        left.append(max(0, most - used + (int(given_back[1]) if given_back else 0)))
    return left


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says `max`."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def free_disk(folder: Path) -> int:
    """Bytes that this user can still write into the file system of a folder."""
    return shutil.disk_usage(folder).free


def on_one_disk(first: Path, second: Path) -> bool:
    """Whether two folders share a file system; one that is not there yet counts as its parent."""

    def device(path: Path) -> int:
        while not path.exists() and path != path.parent:
            path = path.parent
        return path.stat().st_dev

    return device(first.absolute()) == device(second.absolute())
