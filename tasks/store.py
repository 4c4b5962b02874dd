"""Artifact files: atomic writing, streaming of rows, and errors that name file, row and field.

Every writer here fills a temporary file in the same folder, flushes it to the disk and renames it, so that a reader
never sees half a file. Nothing here knows what a row means.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]


class DataError(ValueError):
    """Something a person supplied is wrong; the message names file, row, field, found, expected, what to do.

    Attributes:
        reason: the kind of fault in a word or two, such as `not_utf8`, under which rows are counted.
    """

    def __init__(self, message: str, reason: str = "bad_field") -> None:
        super().__init__(message)
        self.reason = reason


class OutageError(RuntimeError):
    """A server, model or device outside the pipeline did not answer."""


class _RepeatedKeyError(ValueError):
    """Holds the key that a JSON object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _RepeatedKeyError(next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
    return row


def loads(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or a key stands twice in an object, so that one of two values would be taken.
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except _RepeatedKeyError as error:
        raise ValueError(f"the key {str(error)!r} stands twice") from None


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # Made once, which is as fast as json.loads without the hook.


OnFault = Callable[[int, DataError], None]
"""Called for a row that cannot be read, with its number and the error that would have been raised."""

GZIP_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a broken gzip stream raises."""
_WORK, _OLD = ".partial", ".replaced"
_MOST_SALVAGED = 1 << 22  # Bytes that are read one by one before a damaged place.


def read_jsonl(path: Path, on_fault: OnFault | None = None, max_bytes: int = 0) -> Iterator[tuple[int, Row]]:
    """Stream `(row number from 1, object)` of a `.jsonl` or `.jsonl.gz` file; blank lines are skipped.

    Args:
        path: the file.
        on_fault: called for every fault instead of an error. A bad row is then left out. Of a broken gzip stream all
            whole rows before the damage are read, and the number is that of the first lost row.
        max_bytes: a longer row is bad and is not held in memory; 0 is no limit.

    Raises:
        DataError: file missing, not UTF-8, not JSON, a key twice, not an object, too long, or a broken gzip stream.
    """
    if not path.is_file():
        raise DataError(f"{path}: the file is missing.", "missing_file")

    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(_bounded(file, max_bytes) if max_bytes else file, 1):
                if line.strip() and (row := _row(line, path, number, max_bytes, on_fault)) is not None:
                    yield number, row
            return
        except GZIP_DAMAGE as error:
            damage = str(error)
    if on_fault is not None:
        for line in _lines_before_damage(path, number, max_bytes):
            number += 1
            if line.strip() and (row := _row(line, path, number, max_bytes, on_fault)) is not None:
                yield number, row
    broken = f"{path}: row {number + 1}: the gzip stream is damaged ({damage}). Copy the file again."
    if on_fault is None:
        raise DataError(broken, "damaged_gzip")
    on_fault(number + 1, DataError(broken, "damaged_gzip"))


def _bounded(file: Any, most: int) -> Iterator[bytes]:
    """Yield lines, cut to `most` + 1 bytes, which shows the caller that a line is too long."""
    while line := file.readline(most + 1):
        rest = line
        while len(rest) > most and not rest.endswith(b"\n"):
            rest = file.readline(most + 1)
        yield line


def _lines_before_damage(path: Path, number: int, max_bytes: int) -> list[bytes]:
    """The whole lines after line `number`, read byte by byte: zlib gives out nothing of a block with a damage in it."""
    found = bytearray()
    with gzip.open(path, "rb") as file, contextlib.suppress(*GZIP_DAMAGE):
        for _ in itertools.islice(_bounded(file, max_bytes) if max_bytes else file, number):
            pass
        while len(found) < _MOST_SALVAGED and (byte := file.read1(1)):
            found += byte
    return bytes(found).split(b"\n")[:-1]


def _row(line: bytes, path: Path, number: int, max_bytes: int, on_fault: OnFault | None) -> Row | None:
    """The parsed row, None after a fault that was given to `on_fault`."""
    try:
        if max_bytes and len(line) > max_bytes and not line.endswith(b"\n"):
            raise DataError(
                f"{path}: row {number}: found more than {max_bytes:,} bytes in one row. Look for a missing line break, "
                "or split the row.",
                "too_long",
            )
        return _parse(line, path, number)
    except DataError as error:
        if path.suffix == ".gz" and error.reason in ("not_utf8", "not_json"):
            error = DataError(f"{error} Or the gzip file is damaged: gzip -t checks it.", error.reason)
        if on_fault is None:
            raise error from None
        on_fault(number, error)
        return None


def _parse(line: bytes, path: Path, number: int) -> Row:
    try:
        # With its line break, an error at the end of a line would be reported in column 1 of the next line.
        row = _DECODER.decode(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        message = f"{path}: row {number}: byte {error.start} is not UTF-8. Save the file as UTF-8."
        raise DataError(message, "not_utf8") from None
    except json.JSONDecodeError as error:
        fault = "the line begins with a UTF-8 BOM" if line.startswith(codecs.BOM_UTF8) else error.msg
        message = f"{path}: row {number}: column {error.colno}: not JSON ({fault}). Expected one JSON object a line."
        raise DataError(message, "not_json") from None
    except _RepeatedKeyError as error:
        key = f"{error.args[0]!r:.80}"
        message = f"{path}: row {number}: key {key} appears more than once in one object. Keep one of them."
        raise DataError(message, "repeated_key") from None
    except (ValueError, RecursionError) as error:  # A number of thousands of digits, or thousands of brackets.
        message = f"{path}: row {number}: not JSON that can be read ({error}). Correct the row."
        raise DataError(message, "not_json") from None
    if not isinstance(row, dict):
        message = (
            f"{path}: row {number}: found {type(row).__name__}, expected a JSON object. Write one object a line, "
            "without a list around them."
        )
        raise DataError(message, "not_an_object")
    return row


def dump(row: Any) -> str:
    """The one JSON spelling of a row: sorted keys, no padding, UTF-8 text, no NaN."""
    return json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_jsonl(path: Path, rows: Iterable[Row]) -> int:
    """Stream rows to `path` atomically; returns how many."""
    count = 0
    with replacing(path) as file:
        for row in rows:
            file.write(dump(row).encode() + b"\n")
            count += 1
    return count


def write_json(path: Path, value: Any) -> None:
    """Write one indented JSON document atomically, keys sorted."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, indent=1, allow_nan=False)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """Read one JSON document.

    Raises:
        DataError: missing, no file, not JSON, or a key twice in one object.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except FileNotFoundError:
        raise DataError(f"{path}: the file is missing.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {error.lineno}: not JSON ({error.msg}).") from None
    except _RepeatedKeyError as error:
        key = f"{error.args[0]!r:.80}"
        raise DataError(f"{path}: key {key} appears more than once in one object. Keep one of them.") from None
    except (ValueError, RecursionError) as error:  # A number of thousands of digits, or brackets as deep.
        raise DataError(f"{path}: not JSON that can be read ({error}).") from None
    except OSError as error:  # A folder, or something below a file.
        raise DataError(f"{path}: not a file that can be read ({error.strerror}).") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` if the block ends without an error, and is deleted otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes `path` if the block ends without an error; an older folder is replaced.

    Unfinished folders of killed processes are removed first. Those of living processes are locked.

    Raises:
        DataError: a file stands where the folder belongs; it is left as it is.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path}: found a file, expected a folder or nothing, because a folder is written there.")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    with _locked_folder(path, _WORK) as work:
        try:
            yield work
            if path.exists():
                _exchange(work, path)
            else:
                os.replace(work, path)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def _exchange(new: Path, path: Path) -> None:
    with _locked_folder(path, _OLD) as aside:
        os.replace(path, aside / "old")
        try:
            os.replace(new, path)
        except BaseException:
            os.replace(aside / "old", path)
            aside.rmdir()
            raise
        shutil.rmtree(aside)


@contextlib.contextmanager
def _locked_folder(path: Path, suffix: str) -> Iterator[Path]:
    """A new folder beside `path`, locked inside the block even if it is renamed."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=suffix))
        with _lock(folder, fcntl.LOCK_EX):
            if not folder.exists():  # Another process removed it as a leftover before it was locked.
                continue
            folder.chmod(0o755)
            yield folder
            return


def _remove_leftovers(path: Path) -> None:
    name = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}({re.escape(_WORK)}|{re.escape(_OLD)})")
    for folder in path.parent.iterdir():
        if not name.fullmatch(folder.name):
            continue
        with _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_ours:
            # A process that was killed between its two renames has moved the old folder away: put it back.
            if is_ours and folder.suffix == _OLD and (folder / "old").exists() and not path.exists():
                os.replace(folder / "old", path)
            if is_ours:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path, how: int) -> Iterator[bool]:
    """Lock a folder inside the block; yields whether that was possible."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(handle, how)
        is_ours = True
    except OSError:
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hex digest of a file, streamed."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest(*values: Any) -> str:
    """16 hex digits that identify JSON-ready values, for names of scratch folders and for cache keys."""
    return hashlib.sha256(dump(list(values)).encode()).hexdigest()[:16]
