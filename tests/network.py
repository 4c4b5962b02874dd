"""Two hosts on one machine: network namespaces with their own addresses, and a link between them.

The link is a pair of virtual devices, which can be cut, or a program that carries packets between two tunnels and
loses or delays some of them (not every kernel has `netem`). Root alone may make such hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.{number}.{host}"


@dataclass(frozen=True)
class Hosts:
    """Names of the namespaces a and b, their addresses, and the device through which each sees the other."""

    a: str
    b: str
    address_a: str
    address_b: str
    device: str

    def cut(self) -> None:
        """Take the link down."""
        _run("ip", "-n", self.a, "link", "set", "dev", self.device, "down")

    @staticmethod
    def inside(namespace: str) -> tuple[str, ...]:
        """Words that start a command on that host. As with ssh, it goes on there when the words' process is killed."""
        return ("ip", "netns", "exec", namespace, "setsid", "--fork", "--wait")

    @staticmethod
    def processes(namespace: str) -> list[int]:
        """Ids of the processes on that host, but for this one."""
        network = Path(f"/var/run/netns/{namespace}").stat().st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # It has ended.
                if (folder / "ns/net").stat().st_ino == network and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
        return found

    @contextlib.contextmanager
    def on_a(self) -> Iterator[None]:
        """The block in which this thread, and what it starts, is on host a."""
        with _inside(self.a):
            yield


def missing() -> str:
    """Why two hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "program ip (iproute2) is not installed"
    name = f"probe-{os.getpid()}"
    found = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if found.returncode:
        return f"network namespaces cannot be made: {found.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    return ""


@contextlib.contextmanager
def two_hosts(loss: float = 0.0, delay_s: float = 0.0) -> Iterator[Hosts]:
    """Two hosts; with loss or delay, a program carries their packets."""
    number = os.getpid() % 250
    a, b = (f"breadcrumb-{os.getpid()}-{side}" for side in "ab")
    addresses = [NETWORK.format(number=number, host=host) for host in (1, 2)]
    carrier = None
    try:
        for name in (a, b):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        if loss or delay_s:
            words = [sys.executable, "-m", "tests.network", a, b, str(loss), str(delay_s)]
            carrier = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            assert carrier.stdout is not None
            assert carrier.stdout.readline() == "ready\n"
        else:
            _run("ip", "link", "add", "name", "link", "netns", a, "type", "veth", "peer", "name", "link", "netns", b)
        for name, address in zip((a, b), addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "link")
            _run("ip", "-n", name, "link", "set", "dev", "link", "up")
        yield Hosts(a, b, addresses[0], addresses[1], "link")
    finally:
        if carrier is not None:
            carrier.kill()
            carrier.wait()
        for name in (a, b):
            with contextlib.suppress(OSError):
                for pid in Hosts.processes(name):
                    os.kill(pid, signal.SIGKILL)  # What a test that failed has left.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


# The program that carries packets.


def _tunnel(namespace: str) -> int:
    """A tunnel device called `link` in this namespace."""
    with _inside(namespace):
        tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        tun_set_iff, iff_tun, iff_no_packet_information = 0x400454CA, 0x0001, 0x1000
        fcntl.ioctl(tunnel, tun_set_iff, struct.pack("16sH", b"link", iff_tun | iff_no_packet_information))
    return tunnel


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """The block in which this thread sees the network of this namespace."""
    clone_newnet = 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)

    def go(descriptor: int) -> None:
        if libc.setns(descriptor, clone_newnet):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        go(there)
        yield
    finally:
        go(home)
        os.close(there)
        os.close(home)


def _carry(a: str, b: str, loss: float, delay_s: float) -> None:
    """Carry packets both ways; a lost one is dropped, all others arrive in order after the delay."""
    ends = [_tunnel(a), _tunnel(b)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: deque[tuple[float, int, bytes]] = deque()
    draw = random.Random(0)
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select(ends, [], [], wait_s)
        for end in readable:
            packet = os.read(end, 65536)
            if draw.random() >= loss:
                under_way.append((time.monotonic() + delay_s, other[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # The device is not up yet.
                os.write(end, packet)


if __name__ == "__main__":
    _carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
