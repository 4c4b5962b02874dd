"""`python -m tasks.server`: serve one index until SIGTERM or Ctrl-C; `make search-server` is the short way.

By default only this machine can reach the server. If `host` opens it to others, requests need a key: the server reads
it from SEARCH_SERVER_API_KEY and expects `Authorization: Bearer ...`. `--without-key` lets everybody in, because the
clients of Search-R1 send no key. The key is never written anywhere. `--processes` starts several servers behind the
port (`tasks.server.processes`). Exit status: 0 after a signal, 1 after an error.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import conf, program
from tasks.lifetime import end_with_parent
from tasks.retrieval.remote import KEY_VARIABLE
from tasks.server import processes
from tasks.server.listening import Server, listening
from tasks.server.settings import Settings, port

if TYPE_CHECKING:
    from tasks.server.app import SearchService

    Changed = Callable[[SearchService], None]
    Make = Callable[[argparse.Namespace, Settings, Changed], SearchService]
    """Makes what is served, which calls `Changed` when it is ready or has failed."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SWITCH_S = 0.0005  # By default a search thread would keep the event loop waiting 5 ms for the interpreter lock.


def main(words: list[str] | None = None) -> int:
    """Read the command line and serve; returns the exit status."""
    words = sys.argv[1:] if words is None else words
    known = parser("python -m tasks.server", __doc__ or "")
    known.add_argument("--processes", type=processes.number, default=1, help="servers behind the port (1)")
    known.add_argument("--worker-of", type=processes.number, default=1, help=argparse.SUPPRESS)
    given = known.parse_args(words)
    if given.worker_of > 1:
        end_with_parent()
        return processes.worked(lambda: serve(given, _index_service, given.worker_of))
    if given.processes == 1:
        return serve(given, _index_service)
    try:
        settings = settings_of(given)
        api_key(settings.host, given.without_key)
        return processes.serve(words, given.processes, settings)
    except ValueError as error:
        return _tell(error)


def serve(given: argparse.Namespace, make: Make, sharing: int = 1) -> int:
    """Serve what `make` gives, as the words of the command line want it; returns the exit status.

    `sharing` is the number of processes that share the port.
    """
    try:
        settings = settings_of(given)
        key = api_key(settings.host, given.without_key)
        with listening(settings, is_shared=sharing > 1) as listener:
            return _serve(given, settings, key, listener, make, sharing)
    except ValueError as error:
        return _tell(error)


def _index_service(given: argparse.Namespace, settings: Settings, changed: Changed) -> SearchService:
    from tasks.server.app import SearchService

    return SearchService(given.index, settings, given.corpus, changed)


def api_key(host: str, without_key: bool) -> str | None:
    """The key that a server on `host` demands; None lets everybody in.

    Raises:
        ValueError: others can reach `host` and there is no key, or the key has characters that no header may have.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(f"{KEY_VARIABLE}: found characters that a header cannot hold, expected printable ASCII.")
    if key and without_key:
        raise ValueError(f"--without-key and {KEY_VARIABLE} exclude each other. Leave one out.")
    if not key and not without_key and not is_loopback(host):
        raise ValueError(
            f"host={host}: others can reach this address, and {KEY_VARIABLE} is not set. Set a key there, listen on "
            "127.0.0.1, or let everybody in with --without-key."
        )
    return key or None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("node7")
    (True, True, False, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parser(program: str, about: str) -> argparse.ArgumentParser:
    """The words of a server's command line; `about` says what it is for, up to its first semicolon."""
    parser = argparse.ArgumentParser(prog=program, description=about.partition(";")[0])
    parser.add_argument("--index", type=Path, required=True, help="folder of the index, such as artifacts/index")
    parser.add_argument("--corpus", type=Path, help="refuse an index that was built from another corpus")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=port, help="port to listen on; 0 takes a free one")
    add_settings(parser)
    parser.add_argument("--without-key", action="store_true", help="let everybody in, on any address")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the words that name and change settings; `settings_of` reads them with `--host` and `--port`."""
    parser.add_argument("--settings", default="default", help="name of a file of conf/server (default)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value of a setting")


def settings_of(given: argparse.Namespace) -> Settings:
    """The settings that the command line names and changes.

    Raises:
        ValueError: an unknown file or key, or a value out of bounds.
    """
    tree = conf.section("server", given.settings)
    for word in given.set:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--set {word}: expected KEY=VALUE, such as max_batch=128.")
        try:
            tree[name] = conf.parse(text, word)
        except ValueError:
            raise ValueError(f"--set {word}: the value is not YAML.") from None
    tree.update({name: value for name in ("host", "port") if (value := getattr(given, name)) is not None})
    return conf.fill(Settings, tree, f"{conf.CONF}/server/{given.settings}.yaml")


def address_of(settings: Settings, listener: socket.socket) -> str:
    """The URL of a server on this socket."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _serve(
    given: argparse.Namespace, settings: Settings, key: str | None, listener: socket.socket, make: Make, sharing: int
) -> int:
    threads = settings.encoder_threads or max(1, len(os.sched_getaffinity(0)) // sharing)
    for variable in _THREADS:  # Libraries read these variables at import.
        os.environ[variable] = str(threads)
    # Waiting threads should sleep: on a busy machine spinning threads slow down all others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tasks.server.app import make_app

    sys.setswitchinterval(_SWITCH_S)
    address = address_of(settings, listener)

    def changed(service: SearchService) -> None:
        if service.failure is not None:
            server.should_exit = True
        elif sharing == 1:
            tell_ready()

    def tell_ready() -> None:
        health = service.health
        if service.state == "ready":
            print(
                f"ready: {health.backend}, {health.num_passages} passages, index {str(health.index_sha256)[:12]}, "
                f"at {address} (description: {address}/docs). Ctrl-C ends it.",
                flush=True,
            )

    service = make(given, settings, changed)

    def stopping() -> None:
        service.state = "stopping"

    server = Server(make_app(service, settings, key, is_alone=sharing == 1), settings, stopping)
    print(f"opening {given.index} for {address}", file=sys.stderr, flush=True)
    server.answer(listener, tell_ready if sharing > 1 else lambda: None)
    return 0 if service.failure is None else _tell(service.failure)


def _tell(error: Exception) -> int:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    print(f"error: {kind}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    program.run(main)
