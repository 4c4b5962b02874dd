"""What this machine has, read from files as the kernel writes them."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.plan import machine
from tasks.plan.machine import Memory, host_memory

FREE = Memory(18_000_000 * 1024, "free memory of this machine")
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `ulimit -v`, whatever the tests were started with."""
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: NO_LIMIT)


def _machine(root: Path, groups: str, **files: str) -> Path:
    """A root with these control groups of the process; `files` under /sys, with `__` for `/`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       24000000 kB\nMemAvailable:   18000000 kB\nCached:  1 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_it_is_the_free_memory(tmp_path: Path) -> None:
    assert host_memory(_machine(tmp_path, "")) == FREE


def test_a_group_leaves_its_limit_less_what_is_used_but_for_pages_of_files(tmp_path: Path) -> None:
    files = {"job__memory.max": "4294967296\n", "job__memory.current": "1000000000\n"}
    files["job__memory.stat"] = "anon 1\ninactive_file 400000000\nactive_file 7\n"
    left = 4_294_967_296 - 1_000_000_000 + 400_000_000
    assert host_memory(_machine(tmp_path, "0::/job\n", **files)) == Memory(left, "what the control group leaves")


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    files = {"a__memory.max": "2000000000", "a__memory.current": "0", "a__b__memory.max": "max"}
    assert host_memory(_machine(tmp_path, "0::/a/b\n", **files)).size == 2_000_000_000


def test_no_limit_is_no_limit_in_both_versions(tmp_path: Path) -> None:
    v1 = {"memory__job__memory.limit_in_bytes": "9223372036854771712", "job__memory.max": "max\n"}
    assert host_memory(_machine(tmp_path, "4:cpu,memory:/job\n0::/job\n", **v1)) == FREE


def test_version_1_where_the_path_of_the_host_is_not_mounted(tmp_path: Path) -> None:
    v1 = {"memory__memory.limit_in_bytes": "3000000000", "memory__memory.usage_in_bytes": "500000000"}
    v1["memory__memory.stat"] = "total_inactive_file 100000000\n"
    assert host_memory(_machine(tmp_path, "4:memory:/docker/1f\n", **v1)).size == 2_600_000_000


def test_a_limit_of_the_shell_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (4 << 30, 4 << 30))
    assert host_memory(_machine(tmp_path, "")) == Memory(4 << 30, "limit of ulimit -v")


def test_this_machine_has_memory_and_a_disk(tmp_path: Path) -> None:
    assert 0 < machine.this_machine().host.size < machine.UNLIMITED
    assert machine.free_disk(tmp_path) > 0
    assert machine.on_one_disk(tmp_path, tmp_path / "not/there/yet")


def test_all_memory_of_the_first_gpu_counts_and_none_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may hold the GPU while this one plans, and end before training begins."""
    import torch

    from tasks import device

    found = SimpleNamespace(total_memory=85_500_000_000, name="H100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: found)
    monkeypatch.setattr(device, "hold", lambda ids: pytest.fail("the plan holds a GPU"))
    here = machine.this_machine()
    assert here.gpu == Memory(85_500_000_000, "GPU H100")
    assert here.trains_in_bfloat16
