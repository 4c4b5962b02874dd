"""Replies of a chat model in one JSONL file, so that a run whose model was remote can be repeated without it.

A row is `{"request": hash, "reply": {...}}` or `{"request": hash, "refusal": text}`. The hash is that of model,
messages and further fields, not of the address, so that a recording can be moved. Several processes may record into one
file: of two answers to one request the first one that was written counts for all.
"""

from __future__ import annotations

import fcntl
import hashlib
import threading
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tasks import conf, store
from tasks.services import Refusal, Reply, ServiceError
from tasks.store import DataError, Row

WHERE = "the file of conf/service/"


def request_sha256(body: Any) -> str:
    """The name of a request, given its whole JSON body."""
    return hashlib.sha256(store.dump(body).encode()).hexdigest()


class Recording:
    """An open recording; threads may share it.

    Attributes:
        path: the file.
        is_replay: whether it is complete: a request that it lacks is an error.
    """

    def __init__(self, path: Path, replayed_sha256: str = "") -> None:
        """Read what was recorded.

        Args:
            path: the file; made where it is missing, unless it is replayed.
            replayed_sha256: the hash that a replayed file must have; empty to record.

        Raises:
            ServiceError: a replayed file is missing or another one.
            DataError: a row cannot be read.
        """
        self.path, self.is_replay = path, bool(replayed_sha256)
        self._answers: dict[str, Reply | Refusal] = {}
        self._lock = threading.Lock()
        self._read_to = 0  # Bytes of the file that are in `_answers`.

        if self.is_replay:
            found = store.sha256(path) if path.is_file() else "no file"
            if found != replayed_sha256:
                raise ServiceError(
                    f"{path}: found {found}, expected sha256 {replayed_sha256}, which replayed_sha256 of {WHERE} names."
                    " Copy the recording there, or empty replayed_sha256 to ask the model again."
                )
            with path.open("rb") as file:
                self._read_on(file)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._read_on(file)
        except OSError as error:
            raise ServiceError(
                f"{path}: cannot record there ({error.strerror}). Name another file in {WHERE}."
            ) from None

    def get(self, request: str) -> Reply | Refusal | None:
        """The recorded answer to a request, None without one."""
        with self._lock:
            return self._answers.get(request)

    def add(self, request: str, answer: Reply | Refusal) -> Reply | Refusal:
        """Record an answer; returns the recorded one, which another process may have written first."""
        row: Row = {"request": request}
        row |= {"reply": asdict(answer)} if isinstance(answer, Reply) else {"refusal": answer.detail}
        with self._lock, self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._read_on(file)
            if request not in self._answers:
                file.write(store.dump(row).encode("utf-8", "replace") + b"\n")
                file.flush()
                self._read_on(file)
            return self._answers[request]

    def _read_on(self, file: IO[bytes]) -> None:
        """Read what was appended; half a line, which a killed process left, is cut off.

        Nothing is cut off before all of it was read: a file that is no recording stays as it is.
        """
        file.seek(self._read_to)
        *lines, rest = file.read().split(b"\n")
        where = f"{self.path}: row {{}} from byte {self._read_to}"
        rows = [_read(line, where.format(number)) for number, line in enumerate(lines, 1)]

        if rest and not self.is_replay:
            if is_whole := _is_json(rest):  # Its line break was lost in an editor.
                rows.append(_read(rest, where.format(len(lines) + 1)))
                file.write(b"\n")
            elif rest.startswith(_START) or _START.startswith(rest):
                file.truncate(self._read_to + sum(len(line) + 1 for line in lines))
            else:
                _read(rest, where.format(len(lines) + 1))
            lines += [rest] if is_whole else []

        for request, answer in rows:
            self._answers.setdefault(request, answer)
        self._read_to += sum(len(line) + 1 for line in lines)
        file.seek(0, 2)


_START = b'{"re'
"""How every row begins."""


def _is_json(line: bytes) -> bool:
    try:
        store.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _read(line: bytes, where: str) -> tuple[str, Reply | Refusal]:
    """Request and answer of a row.

    Raises:
        DataError: the row has another form.
    """
    try:
        row = store.loads(line)
        request = row.pop("request")
        if isinstance(request, str) and row.keys() == {"reply"}:
            return request, conf.fill(Reply, row["reply"], "reply")
        if isinstance(request, str) and row.keys() == {"refusal"} and isinstance(row["refusal"], str):
            return request, Refusal(row["refusal"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise DataError(
        f'{where}: found {line[:60]!r}, expected {{"request": hash, "reply": ...}} or {{..., "refusal": text}}. '
        "Remove the row; its request is then sent again."
    )
