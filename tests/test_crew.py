"""The workers of a stage: what they are told, how they end, and what the user reads when one does not go on."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks import cluster, crew, device, footprint, own, wire
from tasks.cluster import Cluster, HostConf
from tasks.crew import Crew, CrewError
from tasks.engine.deepspeed_worker import require_own_gpu
from tests.crew_worker import AgreedError

ROOT = Path(__file__).parents[1]
WORKER = "tests.crew_worker"
HERE = Cluster(hosts=(HostConf(workers=4),), start_s=60, silence_s=5, end_s=5)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_each_worker_gets_what_it_is_given_and_results_come_in_order() -> None:
    said: list[str] = []
    with Crew(WORKER, 3, HERE, say=said.append) as workers:
        assert workers.call("add", [(1, 2), (10, 20), (100, 200)]) == [3, 31, 302]
        assert workers.call("add", [(5, 5)]) == [10]  # Only the first.
        workers.call("say", [("hello",)] * 3)
        assert list(workers.stream("count", [(3,)] * 3)) == [0, 1, 2, ["counted"] * 3]
        assert workers.call("total", [()] * 3, iter(range(101))) == [5050, -1, -1]
        pids = workers.call("pid", [()] * 3)
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))
    assert sorted(line for line in said if "hello" in line) == [f"[{rank} localhost] hello" for rank in range(3)]


def test_an_error_of_all_is_that_error_and_the_crew_goes_on() -> None:
    with Crew(WORKER, 2, HERE, reports=[AgreedError]) as workers:
        with pytest.raises(AgreedError, match="too high"):
            workers.call("fail", [("too high", "agreed")] * 2)
        assert workers.call("add", [(1, 1), (1, 1)]) == [2, 3]


class Unreadable:
    """What a worker cannot read, as if its class were not there."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        (
            "add",
            (Unreadable(), 1),
            r"worker [01] on localhost, in add: it ended with status 1\. Its last line: Val",
        ),
        ("fail", ("no such file", "value"), r"worker [01] on localhost, in fail: no such file\."),
        ("fail", ("odd", "other"), r"worker [01] on localhost, in fail: odd\. Its last line: RuntimeError: odd"),
        ("fail_first", ("alone",), r"worker 0 on localhost, in fail_first: alone \(the other workers went on\)"),
        ("die", (), r"worker [01] on localhost, in die: it was ended by signal 9"),
        ("exit", (7,), r"worker [01] on localhost, in exit: it ended with status 7"),
        ("stop", (), r"worker [01] on localhost, in stop: no sign of life for [5-9] s"),
    ],
)
def test_one_line_says_which_worker_failed_in_what_and_none_is_left(
    command: str, given: tuple[object, ...], message: str
) -> None:
    with Crew(WORKER, 2, HERE, reports=[AgreedError]) as workers:
        pids = workers.call("pid", [()] * 2)
        start = time.monotonic()
        with pytest.raises(CrewError, match=message):
            workers.call(command, [given] * 2)
        assert time.monotonic() - start < 20
        assert not any(map(is_running, pids))


def test_memory_of_workers_counts_once_and_so_does_that_of_other_processes() -> None:
    code = "held = bytearray(b'x') * (150 << 20); print('ready', flush=True); input()"
    words = [sys.executable, "-c", code]
    with (
        subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        Crew(WORKER, 2, HERE) as workers,
    ):
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "ready\n"
        before = sum(one.rss_mb > 140 for one in footprint.below([other.pid]))
        part = SimpleNamespace(crew=workers)
        found = crew.footprints([part, object(), part])
        ids = [other.pid, *(member.process.pid for member in workers.members)]
        assert len(found) == 2 + 1 + len(footprint.below(ids))
        assert all(10 < one.rss_mb < 100 for one in found[:2])
        assert sum(one.rss_mb > 140 for one in found) == 1 + before
        other.stdin.close()


def test_a_worker_that_is_killed_while_others_work_ends_them() -> None:
    with Crew(WORKER, 2, HERE) as workers:
        pids = workers.call("pid", [()] * 2)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(CrewError, match="worker 1 on localhost, in sleep: it was ended by signal 9"):
            workers.call("sleep", [(600,)] * 2)
        assert wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_stage(how: signal.Signals) -> None:
    text = (
        "import sys; from tests.test_crew import *\n"
        "with Crew(WORKER, 2, HERE) as workers:\n"
        "    print(*workers.call('pid', [()] * 2), flush=True); workers.call('sleep', [(600,)] * 2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True) as stage:
        assert stage.stdout is not None
        pids = [int(word) for word in stage.stdout.readline().split()]
        assert len(pids) == 2
        stage.send_signal(how)
        assert wait_until(lambda: not any(map(is_running, pids)))


def test_somebody_without_the_key_is_cut_off_and_hinders_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some that say nothing and one that sends much, all before the workers connect."""
    strangers: list[socket.socket] = []
    start = crew._start

    def visited(module: str, rank: int, place: cluster.Place, address: str, say: object) -> object:
        host, port, *_ = address.split()
        if not strangers:
            strangers.extend(socket.create_connection((host, int(port))) for _ in range(4))
            strangers[1].sendall(b"\xff" * 100_000)
        return start(module, rank, place, address, say)  # type: ignore[arg-type]

    monkeypatch.setattr(crew, "_start", visited)
    monkeypatch.setattr(wire, "SHAKE_S", 12)
    with Crew(WORKER, 1, replace(HERE, start_s=10)) as workers:
        assert workers.call("add", [(1, 1)]) == [2]
    assert strangers[0].recv(100_000)  # The challenge of the stage,
    assert strangers[0].recv(100) == b""  # and the end.


STRANGERS = """\
import contextlib, pathlib, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))
held = []
for _ in range({count}):
    with contextlib.suppress(OSError):
        held.append(socket.create_connection(({host!r}, {port})))
        {then}
    time.sleep(0.002)  # Who finds the queue of the port full would try again after a second.
pathlib.Path({come!r}).touch()
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("count", "then"), [(600, "pass"), (600, "held[-1].sendall(bytes([255]) * 1000)"), (1000, "held.pop().close()")]
)
def test_more_strangers_than_files_may_be_open_hinder_nobody(
    count: int, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them come before the worker does; those that say nothing or what is wrong stay."""
    come = tmp_path / "come"
    late = HostConf(start=("sh", "-c", f'until [ -e {come} ]; do sleep 0.05; done; exec "$@"', "sh"))
    strangers: list[subprocess.Popen[bytes]] = []
    start, soft_hard = crew._start, resource.getrlimit(resource.RLIMIT_NOFILE)

    def visited(module: str, rank: int, place: cluster.Place, address: str, say: object) -> object:
        host, port, *_ = address.split()
        code = STRANGERS.format(count=count, host=host, port=port, then=then, come=str(come))
        monkeypatch.setattr(crew, "_start", start)
        strangers.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE))
        return start(module, rank, place, address, say)  # type: ignore[arg-type]

    monkeypatch.setattr(crew, "_start", visited)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, soft_hard[1]))
    try:
        with Crew(WORKER, 1, replace(HERE, hosts=(late,), start_s=30)) as workers:
            assert workers.call("add", [(1, 1)]) == [2]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)
        strangers[0].kill()
        strangers[0].communicate()


@pytest.mark.parametrize("num_bytes", [0, 5, 20])
def test_a_worker_that_never_says_its_name_ends_the_start(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the key, and stops before its first message, in its length or in the middle of it."""
    wires = []

    def start(module: str, rank: int, place: cluster.Place, address: str, say: object) -> crew._Member:
        host, port, key, silence_s = address.split()

        def connect() -> None:
            peer = socket.create_connection((host, int(port)))
            wires.append(wire.shake(peer, bytes.fromhex(key), float(silence_s), is_stage=False))
            peer.sendall(((1000).to_bytes(8, "big") + b"x" * 1000)[:num_bytes])

        threading.Thread(target=connect).start()
        return crew._Member(rank, place, subprocess.Popen(["sleep", "60"], text=True))

    monkeypatch.setattr(crew, "_start", start)
    with pytest.raises(
        CrewError, match=r"worker 0 on localhost, in start: it did not say anything after it had connected .* 2 s\."
    ):
        Crew(WORKER, 1, replace(HERE, start_s=2, end_s=0.1))
    assert wires != [None]


@pytest.mark.parametrize(
    ("when", "size", "message"),
    [
        ("half_a_result", 2, r"worker 1 on localhost, in add: no sign of life for [3-7] s"),
        ("a_drop", 2, r"worker 1 on localhost, in add: no sign of life for [3-7] s"),
        ("does_not_take", 1, r"worker 0 on localhost, in length: it takes no message"),
    ],
)
def test_a_worker_that_stops_in_the_middle_is_named_in_time(
    when: str, size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP", when)

    def work() -> None:
        with Crew(WORKER, size, replace(HERE, silence_s=3, end_s=1)) as workers:
            if when == "does_not_take":
                workers.call("stop_soon", [()])
                time.sleep(1)
                workers.call("length", [("x" * 50_000_000,)])
            workers.call("add", [(1, 2)] * size)

    with pytest.raises(CrewError, match=message):
        work()


def test_a_worker_of_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = crew.fingerprint()
    monkeypatch.setattr(crew, "fingerprint", lambda: found | {"torch": "0.1"})
    with pytest.raises(CrewError, match=r"worker 0 on localhost, in start: it has torch 2\S+, expected 0\.1"):
        Crew(WORKER, 1, HERE)


def test_a_worker_that_cannot_start_is_named() -> None:
    with pytest.raises(
        CrewError, match=r"worker 0 on far, in start: it ended with status 1\. Its last line: no-such-program: No such"
    ):
        Crew(WORKER, 1, replace(HERE, hosts=(HostConf(name="far", start=("no-such-program", "{host}")),)))
    with pytest.raises(CrewError, match=r"in start: it ended with status 1\. Its last line: .*No module named"):
        Crew("tests.no_such_worker", 1, HERE)
    with pytest.raises(CrewError, match=r"it did not connect to 127\.0\.0\.1 within 2 s"):
        Crew("time", 1, replace(HERE, start_s=2, hosts=(HostConf(start=("sh", "-c", "sleep 60")),)))


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CrewError, match=rf"127\.0\.0\.1:{port}: workers cannot be awaited there: Address already"):
            Crew(WORKER, 1, replace(HERE, port=port, start_s=1))


def test_two_stages_that_start_at_once_share_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        described = replace(HERE, port=taken.getsockname()[1])
        threading.Timer(2, taken.close).start()
        began = time.monotonic()
        with Crew(WORKER, 1, described) as first, Crew(WORKER, 1, described) as second:
            assert time.monotonic() - began > 1.5
            assert first.call("add", [(1, 1)]) == second.call("add", [(1, 1)]) == [2]


def test_two_workers_with_one_gpu_are_refused() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    for rank, gpu in enumerate(["a GPU-1", "a GPU-2", "b GPU-1"]):
        require_own_gpu(store, rank, gpu)
    with pytest.raises(ValueError, match=r"it has the GPU of worker 1 \(a GPU-2\), expected one for each worker\."):
        require_own_gpu(store, 3, "a GPU-2")


def test_workers_fill_one_host_after_another() -> None:
    two = Cluster(
        hosts=(HostConf(name="a", workers=2, devices=(0, 1)), HostConf(name="b", start=("ssh", "{host}", "{}")))
    )
    places = two.places(3)
    assert [place.host for place in places] == ["a", "a", "b"]
    assert [place.number for place in places] == [0, 1, 0]
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, {}]
    assert places[2].start == ("ssh", "b", "{}")
    with pytest.raises(
        ValueError, match=r"workers=4: expected at most 3, all that the hosts of conf/cluster/local\.yaml take"
    ):
        two.places(4)


def test_a_worker_knows_its_place_also_where_ssh_hands_on_no_variables() -> None:
    bare = ("env", "-i", f"PATH={os.environ['PATH']}", f"{own.VARIABLE}={own.NONE}")  # As this process has it.
    here, there = HostConf(name="a", workers=2), HostConf(name="b", start=bare, devices=(3, 5), workers=2)
    with Crew(WORKER, 4, replace(HERE, hosts=(here, there))) as workers:
        assert workers.call("place", [()] * 4) == [
            (number, devices, device.run()) for number, devices in [(0, None), (1, None), (0, "3"), (1, "5")]
        ]


def test_a_host_with_another_commit_is_refused(tmp_path: Path) -> None:
    for name in ("tasks", "tests/crew_worker.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, tmp_path / name)  # type: ignore[operator]
    cluster_of_two = replace(HERE, hosts=(HostConf(name="a"), HostConf(name="b", start=("env",), folder=str(tmp_path))))
    with Crew(WORKER, 2, cluster_of_two) as workers:
        assert workers.call("add", [(1, 1), (1, 1)]) == [2, 3]
    with (tmp_path / "tasks/text.py").open("a", encoding="utf-8") as file:
        file.write("# Another commit.\n")
    with pytest.raises(
        CrewError, match=r"^worker 1 on b, in start: it has code \w{12}, expected \w{12}, as this host has\."
    ):
        Crew(WORKER, 2, cluster_of_two)


def another(folder: Path, **files: str) -> HostConf:
    """A host b whose Python finds these files before all others; `__` stands for `/`."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return HostConf(name="b", start=("env", f"PYTHONPATH={folder}"))


def test_a_host_with_other_libraries_or_another_python_is_refused(tmp_path: Path) -> None:
    """Real processes, which find another version of torch, and call themselves another Python."""
    (tmp_path / "torch-0.1.dist-info").mkdir()
    with pytest.raises(
        CrewError, match=r"^worker 1 on b, in start: it has torch 0\.1, expected 2\S+, as this host has"
    ):
        Crew(WORKER, 2, replace(HERE, hosts=(HostConf(name="a"), another(tmp_path))))

    made_up = (
        "import collections, sys\n"
        "version = collections.namedtuple('version', 'major minor micro releaselevel serial')\n"
        "sys.version_info = version(*sys.version_info[:2], 99, 'final', 0)\n"
    )
    there = another(tmp_path / "python", **{"sitecustomize.py": made_up})
    with pytest.raises(
        CrewError, match=r"^worker 1 on b, in start: it has Python 3\.\d+\.99, expected 3\.\d+\.\d+, as this host has"
    ):
        Crew(WORKER, 2, replace(HERE, hosts=(HostConf(name="a"), there)))


def test_a_host_whose_name_does_not_resolve_is_named() -> None:
    """By ssh, where it is installed."""
    nowhere = HostConf(name="nowhere.invalid", start=("ssh", "-o", "BatchMode=yes", "{host}"))
    began = time.monotonic()
    with pytest.raises(
        CrewError, match=r"^worker 1 on nowhere\.invalid, in start: it ended with status \d+\."
    ) as caught:
        Crew(WORKER, 2, replace(HERE, hosts=(HostConf(name="a"), nowhere)))
    assert time.monotonic() - began < 30
    message = str(caught.value)
    assert re.search(r"Its last line: ssh: (Could not resolve hostname nowhere\.invalid|No such file)", message), (
        message
    )
    assert "What starts it there: `ssh -o BatchMode=yes nowhere.invalid`." in message
    assert "\n" not in message


def test_a_host_that_does_not_answer_is_named() -> None:
    """A remote shell that hangs, as ssh does while nobody answers at an address."""
    silent = HostConf(name="b", start=("sh", "-c", "sleep 60", "sh"))
    began = time.monotonic()
    with pytest.raises(
        CrewError, match=r"^worker 1 on b, in start: it did not connect to 127\.0\.0\.1 within 4 s\. What"
    ):
        Crew(WORKER, 2, replace(HERE, start_s=4, hosts=(HostConf(name="a"), silent)))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: []", r"hosts=\[\]: expected at least one host"),
        ("hosts: [{workers: 0}]", r"hosts\[0\]: workers=0: expected a number above 0"),
        ("hosts: [{workers: two}]", r"hosts\[0\]: workers: found 'two' \(str\), expected an integer"),
        ("hosts: [{workers: 2.5}]", r"hosts\[0\]: workers: found 2.5 \(float\), expected an integer"),
        ("hosts: [{wrokers: 2}]", r"hosts\[0\]: unknown key 'wrokers'. Did you mean 'workers'\?"),
        ("hosts: [{folder: /a b}]", "a path without blanks"),
        ("hosts: [{start: ssh}]", r"hosts\[0\]: start: found 'ssh', expected a list of texts"),
        ("hosts: [{devices: [0, 0]}]", r"hosts\[0\]: devices=\[0, 0\]: expected each number once"),
        ("hosts: first", "hosts: found 'first', expected a list"),
        ("hosts: [first]", r"hosts\[0\]: found 'first', expected a mapping with the keys of HostConf"),
        ("hosts: [{}]\nport: 70000", "port=70000: expected 0 or more and 65535 or less"),
        ("hosts: [{}]\nstart_s: 0", "start_s=0: expected a number above 0"),
        ("hosts: [{}]\nadress: 10.0.0.1", "unknown key 'adress'. Did you mean 'address'?"),
        ("{}", "key 'hosts' is missing. Add it"),
        ("", "found NoneType, expected a mapping of settings"),
        ("hosts: [{name: a", "not valid YAML: .*line 1"),
        ("hosts: [{}]\nhosts: [{}]", "key 'hosts' stands twice"),
        ("hosts: [{}, {}]", "hosts: name='localhost': expected another one for each host"),
        (
            "address: 10.0.0.1\nhosts: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.1}]",
            "hosts: address='10.0.0.1': expected another one for each host. Two entries would put",
        ),
        (
            "address: 10.0.0.1\nhosts: [{name: a, address: 10.0.0.1}, {name: b}]",
            r"hosts: b: address='127.0.0.1': expected an address in the network of a \(10.0.0.1\)",
        ),
        (
            "hosts: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}]",
            r"address='127.0.0.1': expected an address in the network of b \(10.0.0.2\), at which its workers find",
        ),
        (
            "address: 10.0.0.1\nhosts: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}]",
            r'hosts: b: start=\[\]: expected words that start a command there, such as \[ssh, "{host}"\]\. Only a ',
        ),
        ("hosts: [{devices: [-1]}]", r"hosts\[0\]: devices\[0\]=-1: expected 0 or more"),
        ("hosts: [{}]\nsilence_s: 0.001", "silence_s=0.001: expected 3 or more"),
        ("hosts: [{name: b, address: 10.0.0.2, start: [ssh, b]}]", "address='127.0.0.1': expected an address in the"),
    ],
)
def test_mistakes_of_a_cluster_file_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        cluster.load("mine", tmp_path)
    assert "conf/cluster/mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "-oProxyCommand=touch x"),
        ("name", "-oProxyCommand=x"),
        ("name", "a\x1b[2Jb"),
        ("name", "$(touch x)"),
        ("name", "a;b"),
        ("name", ""),
        ("address", "-J"),
        ("address", "10.0.0.2 x"),
        ("interface", "eth0`id`"),
        ("folder", "/srv/\x1b[31m"),
        ("python", "-Sx"),
        ("python", "A=b"),
        ("start", ("ssh\x07", "{host}")),
    ],
)
def test_what_another_program_would_take_for_an_option_or_a_command_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{key}=.*: expected ") as refused:
        HostConf(**{key: value})  # type: ignore[arg-type]
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["/srv/$(id>x)", "/srv/R&D", "/srv/o'neil", "/srv/a;b", "/srv/`x`", "/srv/*"])
def test_a_path_reaches_the_other_host_as_it_is_written(name: str, tmp_path: Path) -> None:
    """`ssh` joins its words by blanks and lets a shell read them."""
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n', encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    words = ["printf", "[%s]", name, f"CUDA={name}"]
    for start in ((str(tmp_path / "ssh"), "b"), ("nice", str(tmp_path / "ssh"), "b"), ("env",), ()):
        place = Cluster(hosts=(HostConf("b", start=start, folder=name),)).places(1)[0]
        assert place.folder == name
        done = subprocess.run(place.started(words), capture_output=True, text=True, cwd=tmp_path, check=True)
        assert done.stdout == f"[{name}][CUDA={name}]"
    assert not (tmp_path / "x").exists()


def test_the_environment_names_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.load(root=ROOT).hosts[0].name == "localhost"
    monkeypatch.setenv(cluster.CLUSTER_VARIABLE, "nowhere")
    with pytest.raises(ValueError, match=r"^CLUSTER=nowhere: unknown cluster 'nowhere'\. Known: local, two-hosts"):
        cluster.load(root=ROOT)
