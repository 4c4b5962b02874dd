"""The cache: what comes out went in, its size is bounded, and damage costs no more than a search."""

from __future__ import annotations

import os
import pickle
import sqlite3
import threading
from pathlib import Path

import pytest

from tasks.server.cache import AnswerCache


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_answers_survive_a_restart(tmp_path):
    cache = AnswerCache(tmp_path, 1 << 20)
    cache.put({"a": b'[{"score":0.1}]', "b": "[ü]".encode()})
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (b'[{"score":0.1}]', "[ü]".encode(), None)
    cache.close()
    assert AnswerCache(tmp_path, 1 << 20).get("b") == "[ü]".encode()


def test_the_size_is_bounded_and_the_oldest_go_first(tmp_path):
    limit = 4 << 20
    cache = AnswerCache(tmp_path, limit)
    for start in range(0, 6000, 50):
        cache.put({str(i): os.urandom(2000) for i in range(start, start + 50)})
    assert _bytes(tmp_path) < limit + (8 << 20)  # The log of recent writes: 1000 pages of 4 KiB and a transaction.
    assert cache.get("5999") is not None
    assert cache.get("0") is None
    assert 500 < len(cache) < 2100
    cache.close()
    assert len(AnswerCache(tmp_path, 1 << 20)) < 520
    cache = AnswerCache(tmp_path, 1 << 20)
    cache.put({"large": bytes(1 << 20)})
    assert cache.get("large") is None


@pytest.mark.parametrize("damage", ["overwritten", "cut", "emptied", "other"])
def test_a_damaged_file_is_begun_anew(tmp_path, capfd, damage):
    cache = AnswerCache(tmp_path, 1 << 20)
    cache.put({str(i): b"x" * 500 for i in range(200)})
    cache.close()
    path = tmp_path / "cache.db"
    whole = path.read_bytes()
    if damage == "other":
        path.unlink()
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE Settings (other TEXT)")
        other.close()
    else:
        path.write_bytes(
            {"overwritten": b"no database" * 9000, "cut": whole[: len(whole) // 3], "emptied": b""}[damage]
        )
    cache = AnswerCache(tmp_path, 1 << 20)
    for i in range(200):
        assert cache.get(str(i)) in (None, b"x" * 500)
    cache.put({"new": b"answer"})
    assert cache.get("new") == b"answer"
    if damage != "emptied":
        assert "begun anew" in capfd.readouterr().err


def test_a_file_damaged_while_open_is_begun_anew(tmp_path):
    cache = AnswerCache(tmp_path, 8 << 20)
    cache.put({str(i): bytes(5000) for i in range(1000)})
    with (tmp_path / "cache.db").open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(3 << 20))
    threads = [threading.Thread(target=lambda: [cache.get(str(i)) for i in range(1000)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(1000):
        assert cache.get(str(i)) in (None, bytes(5000))
    cache.put({"new": b"answer"})
    assert cache.get("new") in (None, b"answer")
    cache.put({"newer": b"answer"})
    assert cache.get("newer") == b"answer"


def test_a_damaged_answer_is_a_miss(tmp_path):
    cache = AnswerCache(tmp_path, 1 << 20)
    cache.put({"a": b"first", "b": b"second"})
    with sqlite3.connect(tmp_path / "cache.db") as database:
        database.execute("UPDATE Cache SET value = CAST(value || 'x' AS BLOB) WHERE key = 'a'")
    database.close()
    assert (cache.get("a"), cache.get("b"), cache.num_drops) == (None, b"second", 0)
    with sqlite3.connect(tmp_path / "cache.db") as database:  # An answer may not stand under another key.
        database.execute("UPDATE Cache SET key = 'c' WHERE key = 'b'")
    database.close()
    assert cache.get("c") is None


@pytest.mark.parametrize("place", ["value", "file", "key"])
def test_nothing_is_unpickled(tmp_path, place):
    cache = AnswerCache(tmp_path / "cache", 1 << 20)
    cache.put({"a": b"first"})
    mark = tmp_path / "unpickled"
    code = pickle.dumps(Bomb(mark))
    (tmp_path / "cache" / "evil.val").write_bytes(code)
    with sqlite3.connect(tmp_path / "cache" / "cache.db") as database:
        if place == "value":
            database.execute("UPDATE Cache SET mode = 4, value = ?", (code,))
        elif place == "file":
            database.execute("UPDATE Cache SET mode = 4, value = NULL, filename = 'evil.val'")
        else:
            database.execute("UPDATE Cache SET raw = 0, key = ?", (code,))
    database.close()
    assert cache.get("a") is None
    cache.put({str(i): bytes(30_000) for i in range(100)})  # Pushes the row out.
    cache.put({"b": b"second"})
    assert cache.get("b") == b"second"
    assert not mark.exists()
    assert (tmp_path / "cache" / "evil.val").exists()


def test_a_folder_that_cannot_be_used_costs_the_cache_alone(tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    cache = AnswerCache(tmp_path / "file", 1 << 20)
    cache.put({"a": b"first"})
    assert (cache.get("a"), len(cache)) == (None, 0)
    assert "stays off" in capfd.readouterr().err
    assert (tmp_path / "file").read_text() == "in the way"
