"""Workers on two hosts, each with its own addresses and files, and a link that can fail."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks import cluster
from tasks.cluster import Cluster, HostConf
from tasks.crew import Crew, CrewError
from tasks.engine import Objective
from tasks.engine.deepspeed import DeepSpeedEngine
from tasks.engine.plain import PlainEngine
from tasks.model import export_folder
from tasks.rl.losses import Normalizer
from tests import network
from tests.engine.test_deepspeed import EXACT, TRAINING, prepared, weights_of
from tests.network import Hosts, two_hosts
from tests.stages.clone import HOUSE, Clone
from tests.tiny import make_model

reason = network.missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=f"no root: {reason}")
WORKER = "tests.crew_worker"
SILENCE_S = 4


def spread(hosts: Hosts, hidden: Path | None = None, **more: Any) -> Cluster:
    """One worker on each host; host b does not see the hidden folder."""
    start = Hosts.inside(hosts.b)
    if hidden is not None:
        start += ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {hidden} && exec "$@"', "sh")
    here = HostConf(name="a", address=hosts.address_a, interface=hosts.device)
    there = HostConf(name="b", address=hosts.address_b, interface=hosts.device, start=start)
    settings: dict[str, Any] = {"start_s": 60, "silence_s": SILENCE_S, "end_s": 2}
    return Cluster(hosts=(here, there), address=hosts.address_a, **settings | more)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def nothing_left(hosts: Hosts) -> bool:
    return not Hosts.processes(hosts.a) and not Hosts.processes(hosts.b)


@contextmanager
def crew_on(hosts: Hosts, described: Cluster) -> Iterator[Crew]:
    """A worker on each host that waits."""
    with hosts.on_a(), Crew(WORKER, 2, described) as workers:
        assert workers.call("add", [(1, 1), (1, 1)]) == [2, 3]
        assert len(Hosts.processes(hosts.b)) == 2  # What stands for ssh, and the worker.
        yield workers


# Training.


@pytest.fixture
def start(tokenizer: Any, tmp_path: Path) -> Path:
    export_folder(make_model(tokenizer, kv_heads=2), tokenizer, tmp_path / "start")
    torch.set_num_threads(1)
    return tmp_path / "start"


@pytest.mark.long
def test_two_hosts_train_as_one_and_go_on_after_a_cut_over_a_bad_link(
    start: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates, then a cut in the middle of one; the fourth is made over a link that is slow and loses packets."""
    expected: list[dict[str, Tensor]] = []
    with PlainEngine().open(start, TRAINING) as plain:
        method, batch = prepared(*plain, tokenizer, EXACT)  # type: ignore[arg-type]
        objective = Objective(method.loss, Normalizer.of(batch.loss_mask))
        for _ in range(4):
            plain[0].update(batch, EXACT, objective)
            expected.append(weights_of(plain[0]))

    with two_hosts() as hosts, hosts.on_a():
        described = spread(hosts, hidden=tmp_path, silence_s=2 * SILENCE_S)  # Workers that import are slow to answer.
        monkeypatch.setattr(cluster, "load", lambda: described)
        with DeepSpeedEngine(workers=2, stage=3).open(start, TRAINING) as (policy, critic):
            assert len(Hosts.processes(hosts.b)) == 2
            assert critic is not None
            assert torch.equal(critic.values(batch, EXACT), batch.values)
            for _ in range(3):
                policy.update(batch, EXACT, objective)
            assert_equal(weights_of(policy), expected[2])
            policy.save(tmp_path / "state")

            def go_on() -> None:
                while True:
                    policy.update(batch, EXACT, objective)

            began = time.monotonic()
            threading.Timer(0.5, hosts.cut).start()
            with pytest.raises(
                CrewError, match=r"^worker 1 on b, in update: no sign of life for ([89]|1[0-3]) s\."
            ) as caught:
                go_on()
            assert time.monotonic() - began < 2 * SILENCE_S + 10
        assert "\n" not in str(caught.value)
        assert wait_until(lambda: nothing_left(hosts), 4 * SILENCE_S + 10)

    alone = replace(TRAINING, critic=None, needs_reference=False)
    with two_hosts(loss=0.05, delay_s=0.05) as hosts, hosts.on_a():
        described = spread(hosts, hidden=tmp_path, silence_s=30)
        with DeepSpeedEngine(workers=2, stage=2).open(start, alone) as (policy, _):
            policy.load(tmp_path / "state")
            policy.update(batch, EXACT, objective)
            assert_equal(weights_of(policy), expected[3])
        assert nothing_left(hosts)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


# How it ends. These workers compute nothing.


def test_a_link_that_is_cut_ends_the_workers_on_both_hosts() -> None:
    with two_hosts() as hosts:
        with crew_on(hosts, spread(hosts)) as workers:
            hosts.cut()
            began = time.monotonic()
            with pytest.raises(CrewError, match=r"^worker 1 on b, in sleep: no sign of life for [4-6] s\. Start again"):
                workers.call("sleep", [(600,)] * 2)
            assert time.monotonic() - began < SILENCE_S + 5
        assert wait_until(lambda: nothing_left(hosts), 2 * SILENCE_S + 5)


def test_a_host_that_goes_ends_the_run() -> None:
    with two_hosts() as hosts:
        with crew_on(hosts, spread(hosts)) as workers:
            for pid in Hosts.processes(hosts.b):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(CrewError, match=r"^worker 1 on b, in sleep: it was ended by signal 9\. Start again"):
                workers.call("sleep", [(600,)] * 2)
        assert nothing_left(hosts)


def test_a_stage_that_goes_ends_the_workers_on_both_hosts() -> None:
    with two_hosts() as hosts, crew_on(hosts, spread(hosts)) as workers:
        for member in workers.members:
            assert member.connection is not None
            member.connection.close()
        assert wait_until(lambda: nothing_left(hosts), 5)


def test_what_keeps_a_host_from_joining_is_named() -> None:
    with two_hosts() as hosts, hosts.on_a():
        described = spread(hosts)
        here, there = described.hosts

        def refused(message: str, **changed: Any) -> None:
            began = time.monotonic()
            with pytest.raises(CrewError, match=message):
                Crew(WORKER, 2, replace(described, **changed))
            assert time.monotonic() - began < 10
            assert wait_until(lambda: nothing_left(hosts), 5)

        absent = replace(there, start=("ip", "netns", "exec", "breadcrumb-nowhere"))
        refused(
            r"^worker 1 on b, in start: it ended with status \d+\. Its last line: Cannot open network namespace",
            hosts=(here, absent),
        )
        changing = 'read rank address port key more; echo "$rank $address $port 00 $more" | "$@"'
        other_key = replace(there, start=(*there.start, "sh", "-c", changing, "sh"))
        refused(
            r"^worker 1 on b, in start: it ended with status 1\. Its last line: whoever listens at \S+ does not know",
            hosts=(here, other_key),
        )
        no_address = rf"^{hosts.address_b}:any port: workers cannot be awaited there: Cannot assign requested address"
        refused(no_address, address=hosts.address_b)
        with socket.create_server((hosts.address_a, 0)) as taken:
            port = taken.getsockname()[1]
            refused(
                rf"^{hosts.address_a}:{port}: workers cannot be awaited there: Address already in use",
                port=port,
                start_s=2,
            )

        hosts.cut()  # A worker that looks for the other host gives up after 3 s itself: no route.
        refused(r"^worker 1 on b, in start: it did not connect to \S+ within 2 s", start_s=2)


# The script with which one machine is two hosts.

ASK = """
from tasks import cluster
from tasks.crew import Crew
chosen = cluster.load()
with Crew("tasks.plan.host_worker", 2, chosen) as crew:
    crew.call("machine", [(host.interface, host.address) for host in chosen.hosts])
    assert chosen.hosts[1].start[:3] == ("ip", "netns", "exec")
    print([member.place.host for member in crew.members])
"""


def test_one_machine_is_two_hosts_for_a_command(tmp_path: Path) -> None:
    clone = Clone.make(tmp_path / "clone", smoke=False)
    shutil.copytree(HOUSE / "infra", clone.root / "infra")
    script = str(clone.root / "infra/two-hosts.sh")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *words], env=clone.env(), capture_output=True, text=True, timeout=120)

    assert run("true").stderr == "error: no .venv, and the hosts have no internet. Run make setup first.\n"
    (clone.root / ".venv").mkdir()
    assert run().stderr.startswith("error: no command. Write for example: sudo infra/two-hosts.sh make smoke")
    done = run("python", "-c", ASK)
    assert done.stdout.splitlines()[-1] == "['first', 'second']", done.stdout + done.stderr
    assert run("sh", "-c", "exit 7").returncode == 7

    file = clone.root / "conf/cluster/two-namespaces.yaml"
    assert not file.exists()
    file.touch()
    assert "two-namespaces.yaml is there: another such run is on, or was killed" in run("true").stderr
    assert file.exists()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "breadcrumb-first" not in left
    assert "breadcrumb-second" not in left
