"""The folder of a policy on a host that does not have it: the stage sends its files, and the host keeps them.

A host keeps the folders of policies that one of its generators uses or used last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tasks.crew import ROOT, Crew
from tasks.store import digest, replacing_folder, sha256

KEPT = ".scratch/policies"
"""In the clone of a host."""
_PIECE = 16 << 20
Piece = tuple[str, bytes]
"""Name of a file, and the next of its bytes."""


def on_hosts(crew: Crew, ranks: Sequence[int], folder: Path) -> dict[int, str]:
    """Where each of these generators finds the folder; a host that is reached by words of a cluster file gets a copy.

    Args:
        crew: the generators.
        ranks: those that are to start.
        folder: of the policy, on this host.

    Returns:
        rank -> path; without ranks that were lost meanwhile.
    """
    away: dict[str, list[int]] = {}
    for rank in ranks:
        place = crew.members[rank].place
        if place.start:
            away.setdefault(place.host, []).append(rank)
    found = {rank: str(folder.absolute()) for rank in ranks}
    if not away:
        return found

    files = sorted(path for path in folder.iterdir() if path.is_file())
    name = digest([[path.name, sha256(path)] for path in files])
    for of_host in away.values():
        path = None
        for rank in of_host:
            path = path or _ask(crew, rank, "find_folder", name) or _ask(crew, rank, "take_folder", name, files)
        for rank in of_host:
            found[rank] = path or ""
    return {rank: path for rank, path in found.items() if path}


def _ask(crew: Crew, rank: int, command: str, name: str, files: Sequence[Path] = ()) -> str | None:
    given = [(name,) if other == rank else None for other in range(len(crew))]
    path: str | None
    (path,) = crew.call(command, given, _pieces(files))
    return path


def _pieces(files: Iterable[Path]) -> Iterator[Piece]:
    for path in files:
        with path.open("rb") as file:
            yield path.name, b""
            while content := file.read(_PIECE):
                yield path.name, content


class Kept:
    """The folders of one generator's host, of which it uses one.

    Args:
        root: the clone on this host.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._place = root / KEPT
        self._lock = -1

    def find(self, name: str) -> str | None:
        """Path of the folder if it is here; it then stays while this process lives."""
        self._use(name)
        return str(self._place / name) if (self._place / name).is_dir() else None

    def take(self, name: str, pieces: Iterable[Piece]) -> str:
        """Write the folder, and remove those that no generator uses; returns its path."""
        self._use(name)
        for other in self._place.iterdir():
            if other.is_dir() and not other.name.startswith((".", name)):
                self._remove_unused(other)
        with replacing_folder(self._place / name) as work:
            for file_name, content in pieces:
                with (work / Path(file_name).name).open("ab") as file:
                    file.write(content)
        return str(self._place / name)

    def _use(self, name: str) -> None:
        """Lock the folder's name among those that read it; the kernel lets go when this process ends."""
        if self._lock >= 0:
            os.close(self._lock)
        self._place.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._place / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @staticmethod
    def _remove_unused(folder: Path) -> None:
        lock = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        except BlockingIOError:
            return
        finally:
            os.close(lock)
