"""What a host of a cluster file says of itself before a run; `tasks.plan.hosts` starts it there as a worker."""

from __future__ import annotations

import socket

from tasks import crew
from tasks.conf import require
from tasks.plan.machine import Machine, this_machine


def machine(interface: str, address: str) -> Machine:
    """This host.

    Args:
        interface: network devices through which its workers are to exchange, separated by commas.
        address: at which other hosts are to reach it.

    Raises:
        ValueError: it has none of such a name, or not this address.
    """
    names = [name for _, name in socket.if_nameindex()]
    for name in interface.split(","):
        require(name in names, "interface", name, f"a network device of this host: {', '.join(sorted(names))}")
    with socket.socket() as tried:
        try:
            tried.bind((address, 0))
        except OSError as error:
            require(False, "address", address, f"an address of this host ({error.strerror})")
    return this_machine()


if __name__ == "__main__":
    crew.work(lambda stage: {"machine": machine})
