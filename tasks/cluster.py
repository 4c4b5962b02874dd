"""The hosts on which the workers of a stage run, and how processes are started there.

Where they run is no part of a result, so no stage's settings hold it: the file is chosen by `CLUSTER_VARIABLE`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tasks import conf
from tasks.conf import require

CLUSTER_VARIABLE = "BREADCRUMB_CLUSTER"
"""Names a file of conf/cluster; `LOCAL` without it."""
LOCAL = "local"


WORD = re.compile(r"\w[\w.:@%+-]*")
IN_WORD = "a word of letters, digits and any of _ . : @ % + -, which begins with a letter, a digit or _"
"""Names and addresses stand among the words of other programs, which would take a first - for an option."""
SHELLS = ("ssh", "rsh")
"""Programs that hand their last words to a shell of the other host, joined by blanks."""


@dataclass(frozen=True)
class HostConf:
    """A host of a cluster file.

    Attributes:
        name: for messages, and in `start` as {host}.
        workers: most workers that run there at once.
        devices: numbers of the GPUs that its workers take in turn; none means all of the host's.
        start: words before a worker's command, which start it there, such as [ssh, "{host}"], where {host} is its name;
            none is this host.
        folder: of the clone there; none is that of this clone.
        python: of its environment; none is the path that it has here.
        interface: network device through which workers reach each other.
        address: of the host, at which the others reach it.
    """

    name: str = "localhost"
    workers: PositiveInt = 1
    devices: tuple[NonNegativeInt, ...] = ()
    start: tuple[str, ...] = ()
    folder: str = ""
    python: str = ""
    interface: str = "lo"
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        for key in ("folder", "python"):
            value = getattr(self, key)
            is_path = value.isprintable() and not any(letter.isspace() for letter in value)
            require(is_path, key, value, "a path without blanks, of printable characters")
        is_program = not self.python.startswith("-") and "=" not in self.python
        require(is_program, "python", self.python, "the path of a program, which neither begins with - nor has a =")
        for key in ("name", "address", "interface"):
            require(bool(WORD.fullmatch(getattr(self, key))), key, getattr(self, key), IN_WORD)
        for word in self.start:
            require(word.isprintable(), "start", word, "words of printable characters")
        require(len(set(self.devices)) == len(self.devices), "devices", list(self.devices), "each number once")

    @property
    def is_alone(self) -> bool:
        """Whether other hosts cannot reach it at its address, because every host is itself there."""
        return self.address == "localhost" or self.address.startswith("127.")


@dataclass(frozen=True)
class Place:
    """Where one worker runs.

    Attributes:
        host: its name.
        number: of the worker among those of this host.
        environment: variables that it gets there.
    """

    host: str
    number: int
    start: tuple[str, ...]
    folder: str
    python: str
    interface: str
    address: str
    environment: dict[str, str] = field(default_factory=dict)

    def started(self, words: Sequence[str]) -> list[str]:
        """The words that start a command there; quoted, where a shell of the other host reads them."""
        has_shell = any(Path(word).name in SHELLS for word in self.start)
        return [*self.start, *(map(shlex.quote, words) if has_shell else words)]


@dataclass(frozen=True)
class Cluster:
    """A file of conf/cluster.

    Attributes:
        hosts: in the order in which workers are placed.
        address: of this host, at which workers find it.
        port: there; 0 is any free one.
        start_s: seconds until all workers must have connected.
        silence_s: a worker that says nothing for so many seconds is lost. One that is cut off ends itself after twice
            as many.
        end_s: seconds that workers get to end.
    """

    hosts: tuple[HostConf, ...]
    address: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    start_s: PositiveFloat = 120.0
    silence_s: Annotated[float, Field(ge=3)] = 60.0
    end_s: PositiveFloat = 10.0

    def __post_init__(self) -> None:
        require(bool(self.hosts), "hosts", [], "at least one host")
        require(bool(WORD.fullmatch(self.address)), "address", self.address, IN_WORD)
        different = "another one for each host. Two entries would put the workers of both on one host"
        for key in ("name", "address"):
            values = [getattr(host, key) for host in self.hosts if key == "name" or not host.is_alone]
            for value in values:
                require(values.count(value) == 1, f"hosts: {key}", value, different)

        reached = [host for host in self.hosts if not host.is_alone]
        if reached and (len(self.hosts) > 1 or reached[0].start):
            near = f"an address in the network of {reached[-1].name} ({reached[-1].address})"
            for host in self.hosts:
                require(not host.is_alone, f"hosts: {host.name}: address", host.address, near)
            is_alone = HostConf(address=self.address).is_alone
            require(not is_alone, "address", self.address, f"{near}, at which its workers find this host")

        here, *others = [host.name for host in self.hosts if not host.start] or [""]
        words = (
            f'words that start a command there, such as [ssh, "{{host}}"]. Only {here} can be this host, without any'
        )
        require(not others, f"hosts: {', '.join(others)}: start", [], words)

    def places(self, size: int, what: str = "workers") -> list[Place]:
        """Where the workers run: the first host is filled first.

        Args:
            size: number of workers.
            what: the setting that says so, for the message.

        Raises:
            ValueError: there are fewer places than workers.
        """
        total = sum(host.workers for host in self.hosts)
        expected = f"at most {total}, all that the hosts of {chosen_file()} take. Raise workers of a host, or add hosts"
        require(size <= total, what, size, expected)
        places = (self._place(host, number) for host in self.hosts for number in range(host.workers))
        return list(islice(places, size))

    def _place(self, host: HostConf, number: int) -> Place:
        start = tuple(word.replace("{host}", host.name) for word in host.start)
        device = {"CUDA_VISIBLE_DEVICES": str(host.devices[number % len(host.devices)])} if host.devices else {}
        return Place(host.name, number, start, host.folder, host.python, host.interface, host.address, device)


def load(name: str | None = None, root: Path = conf.ROOT) -> Cluster:
    """A file of conf/cluster; None is the one that the environment names.

    Raises:
        ValueError: it is missing, has unknown or wrong keys, or names a host twice.
    """
    name = name or _chosen()
    tree = conf.read_yaml(conf.path_of("cluster", name, root, f"CLUSTER={name}"))
    found: Cluster = conf.fill(Cluster, tree, chosen_file(name))
    return found


def _chosen() -> str:
    return os.environ.get(CLUSTER_VARIABLE) or LOCAL


def chosen_file(name: str = "") -> str:
    """The path of a file of conf/cluster; without a name, of the one that the environment names."""
    return f"{conf.CONF}/cluster/{name or _chosen()}.yaml"
