"""Answers on disk, bounded in bytes: one SQLite file, oldest answers out first, nothing ever unpickled.

A cache may be lost at any time. A damaged file is deleted and made again, a damaged answer counts as a miss, and after
an error of the disk the query is searched. Each answer has a checksum, so that exactly the stored bytes come back.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_RAW

_DIGEST_BYTES = 16
_LARGEST_SHARE = 16  # Answers above 1/16 of the cache are not stored: they would push out all others.
_SMALLEST = 1 << 20  # The pages of the database itself need less than this.


class _PlainDisk(diskcache.Disk):
    """Stores text keys and byte values inside the database, and refuses pickles and files that a database may name."""

    def put(self, key: Any) -> Any:
        assert isinstance(key, str), key
        return key, True

    def get(self, key: Any, raw: Any) -> Any:
        if not raw or not isinstance(key, str):
            raise sqlite3.DataError("a key that this server did not write")
        return key

    def store(self, value: Any, read: Any, key: Any = None) -> Any:
        assert isinstance(value, bytes), type(value)
        return 0, MODE_RAW, None, sqlite3.Binary(value)

    def fetch(self, mode: Any, filename: Any, value: Any, read: Any) -> Any:
        if mode != MODE_RAW or filename is not None or not isinstance(value, bytes):
            raise sqlite3.DataError("a value that this server did not write")
        return value

    def remove(self, file_path: Any) -> None:
        raise sqlite3.DataError("a file name that this server did not write")


class AnswerCache:
    """Bytes by text key; threads may share it.

    Attributes:
        num_drops: how often a damaged cache was deleted and made again.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open or make the cache.

        Args:
            folder: holds its files `cache.db*`, which are deleted if they are damaged.
            max_bytes: size of the folder, kept within a few megabytes (SQLite's log of recent writes).
        """
        self.num_drops = 0
        self._folder = folder
        self._max_bytes = max(max_bytes, _SMALLEST)
        self._lock = threading.Lock()
        self._cache: Any = None
        self._open()

    def get(self, key: str) -> bytes | None:
        """The answer under `key`; None if it is not there or damaged."""
        cache = self._cache
        if cache is None:
            return None
        try:
            stored = cache.get(key)
            if stored is None:
                return None
            if isinstance(stored, bytes) and stored[:_DIGEST_BYTES] == _digest(key, stored[_DIGEST_BYTES:]):
                return stored[_DIGEST_BYTES:]
            cache.delete(key)
        except diskcache.Timeout:
            pass
        except (sqlite3.Error, OSError, ValueError) as error:
            self._drop(cache, error)
        return None

    def put(self, answers: Mapping[str, bytes]) -> None:
        """Store answers by key, in one transaction."""
        cache = self._cache
        if cache is None:
            return
        largest = self._max_bytes // _LARGEST_SHARE
        try:
            with cache.transact():
                for key, answer in answers.items():
                    if len(answer) <= largest:
                        cache.set(key, _digest(key, answer) + answer)
        except diskcache.Timeout:
            pass
        except (sqlite3.Error, OSError, ValueError) as error:
            self._drop(cache, error)

    def __len__(self) -> int:
        return 0 if self._cache is None else len(self._cache)

    def close(self) -> None:
        """Close this thread's connection."""
        if self._cache is not None:
            self._cache.close()

    def _open(self) -> None:
        for attempt in range(2):
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                cache = diskcache.Cache(
                    str(self._folder),
                    timeout=1,
                    disk=_PlainDisk,
                    size_limit=self._max_bytes,
                    eviction_policy="least-recently-stored",
                    cull_limit=10,
                    statistics=0,
                    tag_index=0,
                    sqlite_mmap_size=0,
                    sqlite_cache_size=2048,
                )
                with contextlib.suppress(diskcache.Timeout):  # Another process writes: no damage.
                    cache.cull()  # The limit may be smaller than in the last run.
                self._cache = cache
                return
            except (sqlite3.Error, OSError, ValueError, TypeError, KeyError, diskcache.Timeout) as error:
                print(f"warning: search cache {self._folder}: {_tell(error)}; begun anew.", file=sys.stderr, flush=True)
                self.num_drops += 1
                self._delete_files()
                if attempt:
                    print("warning: the search cache stays off.", file=sys.stderr, flush=True)

    def _drop(self, damaged: Any, error: Exception) -> None:
        """Delete the damaged cache and make a new one, once for all threads that met the damage."""
        with self._lock:
            if self._cache is not damaged:
                return
            print(f"warning: search cache {self._folder}: {_tell(error)}; begun anew.", file=sys.stderr, flush=True)
            self.num_drops += 1
            self._cache = None
            damaged.close()
            self._delete_files()
            self._open()

    def _delete_files(self) -> None:
        for path in self._folder.glob("cache.db*"):
            with contextlib.suppress(OSError):
                path.unlink()


def _digest(key: str, answer: bytes) -> bytes:
    return hashlib.blake2b(answer, digest_size=_DIGEST_BYTES, key=hashlib.sha256(key.encode()).digest()).digest()


def _tell(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
