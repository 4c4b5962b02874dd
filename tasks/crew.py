"""Workers of a stage: processes on this host or on others that do what the stage tells them, together.

The stage connects them by sockets. It knows which worker is doing what, and since when it has heard nothing of it. So a
worker that dies, hangs or is cut off ends the work within bounded time, with one line that says which worker, on which
host and in what. A worker ends itself when its stage is gone, wherever it runs.

Both sides prove that they know a key, which the stage makes and hands over through standard input: it stands in no
command line and in no log. Behind that proof messages are pickled, so a network on which others may change
what is sent needs a tunnel of its own.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import pickle
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks import device, footprint
from tasks.cluster import Cluster, Place, chosen_file
from tasks.footprint import Footprint
from tasks.store import OutageError
from tasks.wire import SHAKE_S, Door, Wire, shake, waiting

ROOT = Path(__file__).resolve().parents[1]
_ALIVE_S = 1.0
"""A worker says so often that it lives."""
_LAST_LINES = 20
_FOOTPRINT = "footprint"
"""Every worker may be told this, whatever it serves."""
_BEFORE = ("machine", "look", "meet", "join")
"""Phases after the connection and before the work, in which a wrong cluster file shows."""
_IDLE = "waiting"
"""The phase of a worker that was told nothing since its last result."""


class CrewError(OutageError):
    """A worker died, hangs, is cut off or failed; the message is one line for the user."""


@dataclass
class _Member:
    """What the stage knows of a worker.

    Attributes:
        place: where it runs.
        process: that started it: the worker itself, or a remote shell.
        connection: to the worker.
        phase: what it was told last.
        heard: monotonic seconds of its last message.
        lines: the last ones that it printed.
        is_lost: it is gone, and the others went on without it.
    """

    rank: int
    place: Place
    process: subprocess.Popen[str]
    connection: Wire | None = None
    phase: str = "start"
    heard: float = field(default_factory=time.monotonic)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    thread: threading.Thread | None = None
    is_lost: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.rank} on {self.place.host}"

    @property
    def is_early(self) -> bool:
        """Whether it is not yet at work, so that a wrong cluster file may be why it failed."""
        return self.connection is None or self.phase in _BEFORE


class Crew:
    """The workers of a stage; a context, at whose end none is left.

    Args:
        module: each runs as `python -m <module>`, which calls `work`.
        size: number of workers.
        cluster: hosts, and how processes are started there.
        reports: error classes by name that all workers raise together, after which the crew goes on.
        say: gets what workers print, line by line.
        may_lose: the others go on without a worker that is gone; its results are then None. The last one that is gone
            ends the crew.

    Raises:
        CrewError: a worker does not start, or is of another code than this process.
    """

    def __init__(
        self,
        module: str,
        size: int,
        cluster: Cluster,
        reports: Sequence[type[Exception]] = (),
        say: Callable[[str], object] = print,
        may_lose: bool = False,
    ) -> None:
        self.cluster = cluster
        self.members: list[_Member] = []
        self._module, self._may_lose, self._say = module, may_lose, say
        self._reports = {kind.__name__: kind for kind in reports}
        self._threads = ThreadPoolExecutor(size)
        self._launch(dict(enumerate(cluster.places(size))))

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.members)

    # Talking with all of them.

    def call(self, command: str, given: Sequence[Any], parts: Iterator[Any] | None = None) -> list[Any]:
        """Tell workers to do this with what each is given; returns the result of each.

        Args:
            command: by name.
            given: to each worker; None and those beyond are not told.
            parts: what a worker that asks for it gets, one after another, while they do it.

        Raises:
            CrewError: a worker died, hangs, is cut off or failed.
            Exception: one of `reports`, if all workers raise it.
        """
        *handed, results = self.stream(command, given, parts)
        assert not handed, f"{command} handed something over, expected a result alone"
        found: list[Any] = results
        return found

    def stream(self, command: str, given: Sequence[Any], parts: Iterator[Any] | None = None) -> Iterator[Any]:
        """As `call`, with what workers hand over on the way; the results, a list, come last."""
        told = [rank for rank, arguments in enumerate(given) if arguments is not None]
        self._tell_at_once(command, {rank: given[rank] for rank in told})
        results: dict[int, Any] = {}
        while any(rank not in results and not self.members[rank].is_lost for rank in told):
            for member, (kind, content) in self._received():
                if kind == "part":
                    yield content
                elif kind == "more":
                    assert parts is not None
                    self._send(member, next(parts, None))
                else:
                    results[member.rank] = self._result(member, kind, content)
        results = {rank: results.get(rank) for rank in told}
        failed = [rank for rank in told if isinstance(results[rank], Exception)]
        if failed and len(failed) < len(told):
            self._fail(self.members[failed[0]], f"{results[failed[0]]} (the other workers went on)", command)
        if failed:
            raise results[failed[0]]
        yield [results[rank] for rank in told]

    @property
    def there(self) -> list[int]:
        """Ranks of the workers that are not lost."""
        return [member.rank for member in self.members if not member.is_lost]

    def replace_lost(self) -> list[int]:
        """Start workers in place of those that were lost; returns their ranks.

        Raises:
            CrewError: as the class.
        """
        lost = {member.rank: member.place for member in self.members if member.is_lost}
        if lost:
            self._launch(lost)
        return list(lost)

    def tell(self, rank: int, command: str, arguments: Any) -> None:
        """Tell one worker to do this; `hear` has its result."""
        self._tell_at_once(command, {rank: arguments})

    def _tell_at_once(self, command: str, given: Mapping[int, Any]) -> None:
        """Tell several workers; what they all get, such as a weight, is pickled once and sent to all in parallel."""
        pickled: dict[int, bytes] = {}
        for rank, arguments in given.items():
            self.members[rank].phase, self.members[rank].heard = command, time.monotonic()
            if id(arguments) not in pickled:
                pickled[id(arguments)] = _pickled((command, arguments))
        faults = self._threads.map(lambda rank: _unsent(self.members[rank], pickled[id(given[rank])]), given)
        for rank, fault in zip(given, list(faults), strict=True):
            if fault is not None:
                self._lose(self.members[rank], fault)

    def hear(self) -> list[tuple[int, Any]]:
        """Results of workers that were told something, by rank, as they come; none if a second passes.

        That of a worker that was lost is None.

        Raises:
            CrewError: as `call`, also for an error among `reports`.
        """
        heard = []
        for member, (kind, content) in self._received():
            phase, result = member.phase, self._result(member, kind, content)
            if isinstance(result, Exception):
                self._fail(member, str(result), phase)
            heard.append((member.rank, result))
        for member in self.members:
            if member.is_lost and member.phase != _IDLE:
                heard.append((member.rank, None))
                member.phase = _IDLE
        return heard

    def _result(self, member: _Member, kind: str, content: Any) -> Any:
        """What a worker has done, or the error that it reports."""
        if kind == "error":
            name, text = content
            if name not in self._reports:
                if (ended := _ended_within(self.members, 2)) is not None:
                    self._fail(ended, _how(ended))  # The error is only that this one no longer answers.
                self._fail(member, text)
            content = self._reports[name](text)
        member.phase = _IDLE
        return content

    def close(self) -> None:
        """End all workers and wait for them."""
        _end(self.members, self.cluster.end_s)
        self._threads.shutdown(wait=False)
        self.members = []

    # Starting.

    def _launch(self, places: Mapping[int, Place]) -> None:
        """Start a worker in each of these places, by rank, and connect with it."""
        key = secrets.token_bytes(32)
        try:
            with _listening(self.cluster) as listener:
                address = f"{self.cluster.address} {listener.getsockname()[1]} {key.hex()} {self.cluster.silence_s}"
                for rank, place in places.items():
                    self.members[rank : rank + 1] = [_start(self._module, rank, place, address, self._say)]
                self._connect(listener, key)
        except BaseException:
            self.close()
            raise

    def _connect(self, listener: socket.socket, key: bytes) -> None:
        """Accept each worker once, and check that its code and libraries are those of this process."""
        door, nameless = Door(listener, key, self.cluster.silence_s), list[Wire]()
        deadline = time.monotonic() + self.cluster.start_s
        try:
            while missing := [member for member in self.members if member.connection is None and not member.is_lost]:
                if (ended := _ended_within(self.members)) is not None:
                    self._fail(ended, _how(ended))
                if time.monotonic() > deadline:
                    did = "say anything after it had connected" if nameless else "connect"
                    self._fail(
                        missing[0], f"it did not {did} to {self.cluster.address} within {self.cluster.start_s:g} s"
                    )
                nameless = [wire for wire in [*nameless, *door.newcomers()] if not self._is_welcome(wire)]
        except OSError as error:
            self._fail(missing[0], f"connections to {self.cluster.address} cannot be accepted: {error.strerror}")
        finally:
            door.close()

    def _is_welcome(self, wire: Wire) -> bool:
        """Whether a worker has said which one it is, and is taken."""
        try:
            content = wire.take()
        except (EOFError, OSError):
            return False  # Its process has ended, which is seen by and by.
        if content is None:
            return False
        rank, found = pickle.loads(content)
        member = self.members[rank]
        member.connection, member.heard = wire, time.monotonic()
        if told := _unlike(found):
            self._fail(member, told)
        return True

    # Listening.

    def _received(self) -> Iterator[tuple[_Member, tuple[str, Any]]]:
        """Messages that have come within a second; signs of life are not among them."""
        members = [(member, member.connection) for member in self.members if not member.is_lost]
        by_wire = {wire: member for member, wire in members if wire is not None}
        for ready in waiting(by_wire, _ALIVE_S):
            member = by_wire[ready]
            try:
                content = ready.take()
            except (EOFError, OSError):
                self._lose(member)
                continue
            member.heard = time.monotonic()
            if content is not None and (message := pickle.loads(content))[0] != "alive":
                yield member, message
        for wire, member in by_wire.items():
            silent = time.monotonic() - member.heard
            if silent > self.cluster.silence_s and not member.is_lost and not waiting([wire], 0):
                self._lose(member, f"no sign of life for {silent:.0f} s")

    def _send(self, member: _Member, message: Any) -> None:
        if (fault := _unsent(member, _pickled(message))) is not None:
            self._lose(member, fault)

    def _lose(self, member: _Member, what: str = "") -> None:
        """Go on without a worker that is gone, or end the crew."""
        if not what:
            _ended_within([member], 2)
            what = _how(member)
        if not self._may_lose or self.there == [member.rank]:
            self._fail(member, what)

        member.is_lost = True
        assert member.connection is not None
        member.connection.close()
        member.process.kill()
        member.process.wait()
        self._say(f"{member.name}, in {member.phase}: {what}. The others go on without it.")

    def _fail(self, member: _Member, what: str, phase: str = "") -> None:
        """End the crew and raise its error."""
        error = CrewError(_sentence(member, what, phase or member.phase))
        self.close()
        raise error


def _end(members: Sequence[_Member], seconds: float) -> None:
    """Ask these workers to end, and kill those that have not ended after so many seconds."""
    for member in members:
        if member.connection is not None:
            with contextlib.suppress(OSError):
                member.connection.close()  # A worker ends itself when this closes.

    deadline = time.monotonic() + seconds
    for member in members:
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(max(0.0, deadline - time.monotonic()))
        if member.process.poll() is None:
            member.process.kill()
            member.process.wait()
        if member.thread is not None:
            member.thread.join(1)


def _sentence(member: _Member, what: str, phase: str) -> str:
    """What became of a worker, and what to do."""
    if member.thread is not None and member.process.poll() is not None:
        member.thread.join(1)
    last = next((line for line in reversed(member.lines) if line.strip()), "")
    tail = f" Its last line: {last.rstrip('.')}." if last else ""
    if member.connection is None and member.place.start:
        tail += f" What starts it there: `{shlex.join(member.place.start)}`."
    again = f"If it is a mistake of {chosen_file()}, mend it. " if member.is_early else ""
    return f"{member.name}, in {phase}: {what.rstrip('.')}.{tail} {again}Start again: the run continues."


def _pickled(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def _unsent(member: _Member, content: bytes) -> str | None:
    """None if a worker is there to get this, else what is wrong with it; one that was lost before needs nothing."""
    if member.is_lost:
        return None
    assert member.connection is not None
    try:
        member.connection.send(content)
    except (BlockingIOError, TimeoutError):
        return "it takes no message"
    except (OSError, ValueError):
        return ""
    return None


def footprints(parts: Iterable[object]) -> list[Footprint]:
    """The memory of all processes that work for this one: workers on any host, and what else it has started here.

    Args:
        parts: those that work through a crew have it as `crew`; none of its workers may be busy.

    Raises:
        CrewError: a worker died, hangs or is cut off.
    """
    found = {id(crew): crew for part in parts if isinstance(crew := getattr(part, "crew", None), Crew)}
    crews = list(found.values())
    told = [answer for crew in crews for answer in crew.call(_FOOTPRINT, [()] * len(crew))]
    workers = [one for answer in told if answer is not None for one in answer]
    return workers + footprint.below([member.process.pid for crew in crews for member in crew.members])


def _start(module: str, rank: int, place: Place, address: str, say: Callable[[str], object]) -> _Member:
    python = [place.python or sys.executable, "-m", module]
    # Variables stand among the words: ssh hands on none of this process.
    variables = [f"{name}={value}" for name, value in place.environment.items()]
    words = place.started(["env", "-C", place.folder or str(ROOT), *variables, *python])
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.lifetime", *words], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except OSError as error:
        raise CrewError(f"worker {rank} on {place.host} cannot be started: {error}.") from error
    member = _Member(rank, place, process)
    member.thread = threading.Thread(target=_print, args=(member, say), daemon=True)
    member.thread.start()
    with contextlib.suppress(OSError):  # It has died already, which `_connect` sees.
        assert process.stdin is not None
        process.stdin.write(f"{rank} {address} {place.number} {device.run()}\n")
        process.stdin.flush()
    return member


def _print(member: _Member, say: Callable[[str], object]) -> None:
    assert member.process.stdout is not None
    for line in member.process.stdout:
        member.lines.append(line.rstrip())
        say(f"[{member.rank} {member.place.host}] {line.rstrip()}")


def _ended_within(members: Sequence[_Member], seconds: float = 0) -> _Member | None:
    """A worker whose process has ended."""
    until = time.monotonic() + seconds
    while True:
        for member in members:
            if not member.is_lost and member.process.poll() is not None:
                return member
        if time.monotonic() >= until:
            return None
        time.sleep(0.05)


def _how(member: _Member) -> str:
    """How a worker that is gone went."""
    code = member.process.poll()
    if code is None:
        return "the connection is lost"
    return f"it was ended by signal {-code}" if code < 0 else f"it ended with status {code}"


@contextlib.contextmanager
def _listening(cluster: Cluster) -> Iterator[socket.socket]:
    """A socket for the stage's workers; a port that another stage listens at for a moment is waited for."""
    deadline = time.monotonic() + cluster.start_s
    while True:
        try:
            listener = socket.create_server((cluster.address, cluster.port), backlog=64)
            break
        except OSError as error:
            if error.errno == errno.EADDRINUSE and cluster.port and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise CrewError(
                f"{cluster.address}:{cluster.port or 'any port'}: workers cannot be awaited there: {error.strerror}. "
                f"Set address and port in {chosen_file()} to a free one of this host."
            ) from error
    listener.settimeout(0.1)
    with listener:
        yield listener


def fingerprint() -> dict[str, str]:
    """What must be equal on all hosts."""
    from tasks import own
    from tasks.identity import PACKAGE, recorded
    from tasks.store import digest, sha256

    places = [ROOT] if (mine := own.folder()) is None else [ROOT, mine]
    sources = [(path.relative_to(place), path) for place in places for path in sorted((place / PACKAGE).rglob("*.py"))]
    code = digest([[name.as_posix(), sha256(path)] for name, path in sources])[:12]
    python = ".".join(map(str, sys.version_info[:3]))
    return {"code": code, "Python": python} | recorded()


def _unlike(found: Mapping[str, str]) -> str:
    """What a host has otherwise, such as a library, by its fingerprint."""
    differing = [(what, value) for what, value in fingerprint().items() if found.get(what) != value]
    return "".join(
        f"it has {what} {found.get(what)}, expected {value}, as this host has" for what, value in differing[:1]
    )


# The side of a worker.


class Stage:
    """What a worker sees of the stage that started it.

    Args:
        rank: of the worker.
        number: of the worker among those of its host.
        connection: to the stage.
    """

    def __init__(self, rank: int, number: int, connection: Wire) -> None:
        self.rank, self.number = rank, number
        self._connection = connection
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._live, daemon=True).start()

    def take(self) -> Any:
        """The next thing that the stage sends."""
        return self._waiting.get()

    def taken(self) -> Iterator[Any]:
        """What the stage hands over, one thing at a time, up to its end."""
        while True:
            self.send(("more", None))
            if (part := self.take()) is None:
                return
            yield part

    def hand(self, part: Any) -> None:
        """Give the stage something before the result."""
        self.send(("part", part))

    def send(self, message: Any) -> None:
        """Send a message; a stage that is gone ends this process."""
        content = _pickled(message)
        try:
            with self._lock:
                self._connection.send(content)
        except OSError:
            os._exit(1)

    def _listen(self) -> None:
        while True:
            try:
                message = pickle.loads(self._connection.receive())
            except (EOFError, OSError):
                os._exit(1)  # Also in the middle of a computation that waits for other workers.
            except Exception:  # It cannot be read here. A worker that listens no more would wait for ever.
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            self._waiting.put(message)

    def _live(self) -> None:
        while True:
            time.sleep(_ALIVE_S)
            self.send(("alive", None))


def work(serve: Callable[[Stage], dict[str, Callable[..., Any]]]) -> None:
    """Connect to the stage that started this process and do what it says, until it is gone.

    Args:
        serve: gets the stage; returns what it may ask for, by name.
    """
    faulthandler.register(signal.SIGUSR1)  # Shows where a worker is that seems to hang.
    rank, address, port, key, silence_s, number, run = sys.stdin.readline().split()
    device.join(run)
    connection = _reach(address, int(port), bytes.fromhex(key), float(silence_s))
    connection.send(pickle.dumps((int(rank), fingerprint())))
    stage = Stage(int(rank), int(number), connection)
    commands = {_FOOTPRINT: footprint.with_below} | serve(stage)
    while True:
        command, arguments = stage.take()
        try:
            result = commands[command](*arguments)
        except Exception as error:
            if not isinstance(error, ValueError):  # A mistake of the user's needs no traceback.
                import traceback

                traceback.print_exc()
            sys.stderr.flush()
            stage.send(("error", (type(error).__name__, " ".join(str(error).split()) or type(error).__name__)))
        else:
            stage.send(("done", result))


def _reach(address: str, port: int, key: bytes, silence_s: float) -> Wire:
    try:
        peer = socket.create_connection((address, port), timeout=SHAKE_S)
    except OSError as error:
        raise SystemExit(f"the stage at {address}:{port} cannot be reached: {error}") from error
    connection = shake(peer, key, silence_s, is_stage=False)
    if connection is None:
        raise SystemExit(f"whoever listens at {address}:{port} does not know this run's key")
    return connection
