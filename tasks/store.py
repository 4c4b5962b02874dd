"""Artifact files: write beside, then rename; stream rows; name file, row and field when a row is bad.

A reader never sees half a file: every writer here fills a temporary sibling, flushes it to the disk and
renames it. Nothing here knows what a row means.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]


class DataError(ValueError):
    """Something a person supplied is wrong; the message names file, row, field, found, expected, what to do."""


class _RepeatedKeyError(ValueError):
    """Holds the key that a JSON object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _RepeatedKeyError(next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # Made once: as fast as json.loads without the hook.


def read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """Stream `(row number from 1, object)` of a `.jsonl` or `.jsonl.gz` file; blank lines are skipped.

    Raises:
        DataError: file missing, not UTF-8, not JSON, a key twice, not an object, or a broken gzip stream.
    """
    if not path.is_file():
        raise DataError(f"{path}: the file is missing.")
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(line, path, number)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path}: row {number + 1}: the gzip stream is damaged ({error}). Copy the file again."
            ) from None


def _parse(line: bytes, path: Path, number: int) -> Row:
    try:
        row = _DECODER.decode(line.decode("utf-8").rstrip("\r\n"))  # A column after the line's end would be its first.
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: row {number}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        fault = "the line begins with a UTF-8 BOM" if line.startswith(codecs.BOM_UTF8) else error.msg
        raise DataError(
            f"{path}: row {number}: column {error.colno}: not JSON ({fault}). Expected one JSON object a line."
        ) from None
    except _RepeatedKeyError as error:
        raise DataError(
            f"{path}: row {number}: key {error.args[0]!r:.80} appears more than once in one object. Keep one of them."
        ) from None
    except (ValueError, RecursionError) as error:  # A number of thousands of digits, or brackets as deep.
        raise DataError(f"{path}: row {number}: not JSON that can be read ({error}). Correct the row.") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}: row {number}: found {type(row).__name__}, expected a JSON object.")
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
        DataError: missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: the file is missing.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {error.lineno}: not JSON ({error.msg}).") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` when the block ends well, and vanishes when it does not."""
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
    """A folder that becomes `path` (replacing what was there) when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    work.chmod(0o755)
    try:
        yield work
        if path.exists():
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            os.replace(path, old / "old")
            try:
                os.replace(work, path)
            except BaseException:
                os.replace(old / "old", path)
                old.rmdir()
                raise
            shutil.rmtree(old)
        else:
            os.replace(work, path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def sha256(path: Path) -> str:
    """Hex digest of a file, streamed."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest(*values: Any) -> str:
    """16 hex digits that identify JSON-ready values: names of scratch folders and cache keys."""
    return hashlib.sha256(dump(list(values)).encode()).hexdigest()[:16]
