"""Workers on two hosts, each with its own addresses and files, and a link that can fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.model import export_folder
from tests import network
from tests.network import Hosts, two_hosts
from tests.tiny import make_model

ROOT = Path(__file__).parents[2]
reason = network.missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=f"no root: {reason}")


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> Path:
    export_folder(make_model(tokenizer, kv_heads=2), tokenizer, tmp_path / "start")
    return tmp_path


def describe(folder: Path, hosts: Hosts | None, **more: Any) -> None:
    """The cluster file: both workers here, or one on each host; host b does not see the folder."""
    tree: dict[str, Any] = {"hosts": [{"workers": 2}]}
    if hosts is not None:
        hidden = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh"]
        there = {"name": "b", "address": hosts.address_b, "interface": hosts.device}
        there |= {"start": [*Hosts.inside(hosts.b), *hidden]}
        here = {"name": "a", "address": hosts.address_a, "interface": hosts.device}
        tree = {"address": hosts.address_a, "hosts": [here, there], "silence_s": 10, **more}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")


def start(folder: Path, hosts: Hosts | None, steps: int = 3, **environment: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.engine.remote_run", str(folder), "3", str(steps)]
    inside = Hosts.inside(hosts.a) if hosts is not None else ()
    return subprocess.Popen(
        [*inside, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"} | environment,
    )  # fmt: skip


def outcome(run: subprocess.Popen[str], limit_s: float = 240) -> tuple[int, str]:
    text, _ = run.communicate(timeout=limit_s)
    return run.returncode, text


def workers() -> list[str]:
    found = subprocess.run(["pgrep", "-f", "tasks.engine.deepspeed_worker"], capture_output=True, text=True)
    return found.stdout.split()


def weights(text: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith("weights "))
    return line


def test_two_hosts_train_the_weights_of_one(folder: Path) -> None:
    describe(folder, None)
    code, text = outcome(start(folder, None))
    assert code == 0, text
    wanted = weights(text)
    with two_hosts() as hosts:
        describe(folder, hosts)
        code, text = outcome(start(folder, hosts))
    assert code == 0, text
    assert weights(text) == wanted
    assert not workers()


def test_a_slow_link_that_loses_packets_changes_nothing(folder: Path) -> None:
    describe(folder, None)
    _, text = outcome(start(folder, None, steps=1))
    wanted = weights(text)
    with two_hosts(loss=0.05, delay_s=0.05) as hosts:
        describe(folder, hosts)
        code, text = outcome(start(folder, hosts, steps=1), 500)
    assert code == 0, text
    assert weights(text) == wanted


def test_a_link_that_is_cut_ends_the_run_in_bounded_time(folder: Path) -> None:
    with two_hosts() as hosts:
        describe(folder, hosts)
        run = start(folder, hosts, steps=1000, PAUSE_S="0.2")
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("step 2"):
                break
        hosts.cut()
        began = time.monotonic()
        code, text = outcome(run)
        assert time.monotonic() - began < 90
    assert code == 1
    (error,) = (line for line in text.splitlines() if line.startswith("error: "))
    assert error.startswith(("error: worker 1 on b, in update: ", "error: worker 0 on a, in update: "))
    deadline = time.monotonic() + 60
    while workers() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not workers()


def test_a_host_that_is_not_there_is_named(folder: Path) -> None:
    with two_hosts() as hosts:
        describe(folder, hosts, start_s=40)
        tree = yaml.safe_load((folder / "cluster.yaml").read_text(encoding="utf-8"))
        tree["hosts"][1]["start"] = list(Hosts.inside("breadcrumb-nowhere"))
        (folder / "cluster.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        code, text = outcome(start(folder, hosts))
    assert code == 1
    assert (
        "error: worker 1 on b, in start: it ended with status 1. Its last line: Cannot open network namespace" in text
    )
    assert not workers()
