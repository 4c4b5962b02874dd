"""Artifact files: all or nothing on every failure, and errors that name file and row."""

import contextlib
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import store
from tasks.store import DataError

ROOT = Path(__file__).parents[1]


def names(folder):
    return sorted(p.name for p in folder.iterdir())


# Reading ----------------------------------------------------------------------------------------------------------

rows = st.lists(
    st.dictionaries(
        st.text(max_size=5).filter(lambda s: s.isprintable()),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
                  st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.lists(st.integers(), max_size=3)),
        max_size=4,
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=60)
@given(rows)
def test_reading_inverts_writing(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    assert store.write_jsonl(path, iter(rows)) == len(rows)
    assert list(store.read_jsonl(path)) == list(enumerate(rows, 1))
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(store.read_jsonl(packed)) == list(enumerate(rows, 1))


def test_blank_lines_are_skipped_and_row_numbers_stay_those_of_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a":1}\r\n\n   \n{"a":2}')
    assert list(store.read_jsonl(tmp_path / "a.jsonl")) == [(1, {"a": 1}), (4, {"a": 2})]


def test_unicode_line_separators_do_not_split_a_row(tmp_path):
    row = {"a": "x\u2028y\u0085z"}
    store.write_jsonl(tmp_path / "a.jsonl", [row, row])
    assert [r for _, r in store.read_jsonl(tmp_path / "a.jsonl")] == [row, row]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "column"),
        (b"nonsense", "not JSON"),
        (b"{'a': 1}", "column 2"),
        (b"[1, 2]", "found list, expected a JSON object"),
        (b"null", "found NoneType"),
        (b'"text"', "found str"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"a": 1, "b": 2, "a": 3}', "key 'a' appears more than once"),
        (b'{"a": [{"b": {"c": 1, "c": 1}}]}', "key 'c' appears more than once"),
        (b'{"a": 1, "\\u0061": 1}', "key 'a' appears more than once"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":0}\n\n' + line + b"\n{}\n")
    reading = store.read_jsonl(path)
    assert next(reading) == (1, {"a": 0})
    with pytest.raises(DataError, match=message) as found:
        next(reading)
    assert str(found.value).startswith(f"{path}: row 3: ")


def test_a_missing_file_is_named(tmp_path):
    for read in (lambda p: list(store.read_jsonl(p)), store.read_json):
        with pytest.raises(DataError, match=r"nowhere\.jsonl: the file is missing"):
            read(tmp_path / "nowhere.jsonl")


def broken_streams():
    lines = b"".join(b'{"a": %d, "b": "%d"}\n' % (i, i * i * 7919) for i in range(3000))
    packed = gzip.compress(lines)
    flipped = bytearray(packed)
    for at in range(len(packed) // 2, len(packed) // 2 + 40):
        flipped[at] ^= 0xFF
    wrong_sum = packed[:-8] + b"\0\0\0\0" + packed[-4:]
    return {"cut": packed[: len(packed) // 2], "flipped": bytes(flipped), "not gzip": lines, "checksum": wrong_sum}


@pytest.mark.parametrize(("kind", "content"), broken_streams().items())
def test_a_damaged_gzip_stream_is_an_error_not_a_short_file(tmp_path, kind, content):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: row \d+: "):
        list(store.read_jsonl(path))


@pytest.mark.parametrize(
    "content", [b"{", b"", b"{'a'}", b'{"a": "\xff"}', b"[" * 100_000, b"9" * 6_000, b'{"a": {"b": 1, "b": 1}}']
)
def test_a_bad_json_document_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json: "):
        store.read_json(tmp_path / "a.json")


def test_a_folder_is_no_json_document(tmp_path):
    (tmp_path / "a.json").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "a.json", tmp_path / "file" / "a.json"):
        with pytest.raises(store.DataError, match=r"a\.json: not a file that can be read \("):
            store.read_json(path)


def test_reading_streams(tmp_path):
    # The bad last row is only met when it is reached.
    (tmp_path / "a.jsonl").write_text('{"a":1}\n' * 1000 + "bad\n")
    reading = store.read_jsonl(tmp_path / "a.jsonl")
    assert [next(reading)[0] for _ in range(1000)] == list(range(1, 1001))
    with pytest.raises(DataError, match="row 1001"):
        next(reading)


# Writing ----------------------------------------------------------------------------------------------------------


def test_one_spelling(tmp_path):
    store.write_jsonl(tmp_path / "a.jsonl", [{"b": [1, 2.5], "a": "é"}])
    assert (tmp_path / "a.jsonl").read_bytes() == '{"a":"é","b":[1,2.5]}\n'.encode()
    store.write_json(tmp_path / "a.json", {"b": 1, "a": None})
    assert (tmp_path / "a.json").read_text() == '{\n "a": null,\n "b": 1\n}\n'
    assert store.read_json(tmp_path / "a.json") == {"a": None, "b": 1}


def test_folders_are_made_and_nothing_else_is_left(tmp_path):
    store.write_json(tmp_path / "x" / "y" / "a.json", 1)
    assert names(tmp_path / "x" / "y") == ["a.json"]
    assert (tmp_path / "x" / "y" / "a.json").stat().st_mode & 0o777 == 0o644


def fail_after(count, error):
    for i in range(count):
        yield {"i": i}
    raise error


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), SystemExit(1)])
def test_an_exception_leaves_the_old_file_and_no_rubbish(tmp_path, error):
    path = tmp_path / "a.jsonl"
    store.write_jsonl(path, [{"old": 1}])
    with pytest.raises(type(error)):
        store.write_jsonl(path, fail_after(5000, error))
    assert path.read_bytes() == b'{"old":1}\n'
    assert names(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_what_json_cannot_say_is_refused_and_nothing_is_written(tmp_path, value):
    with pytest.raises((ValueError, TypeError)):
        store.write_jsonl(tmp_path / "a.jsonl", [{"a": 1}, {"a": value}])
    with pytest.raises((ValueError, TypeError)):
        store.write_json(tmp_path / "a.json", value)
    assert names(tmp_path) == []


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    store.write_json(path, "old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.write_json(path, "new")
    assert store.read_json(path) == "old"
    assert names(tmp_path) == ["a.json"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "a.json"
    store.write_json(path, "old")
    with store.replacing(path) as file:
        file.write(b'"ne')
        file.flush()
        assert store.read_json(path) == "old"
        file.write(b'w"')
    assert store.read_json(path) == "new"


def kill_while(code, *arguments):
    """Run code that prints a line when it is in the middle of writing; then kill it the hard way."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)


def test_a_kill_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.jsonl"
    store.write_jsonl(path, [{"old": 1}])
    code = """
import sys, time
from pathlib import Path
from tasks import store
def rows():
    for i in range(100000):
        yield {"i": i}
    print("ready", flush=True)
    time.sleep(60)
store.write_jsonl(Path(sys.argv[1]), rows())
"""
    kill_while(code, path)
    assert path.read_bytes() == b'{"old":1}\n'
    store.write_jsonl(path, [{"new": 1}])  # What the dead writer left behind is in nobody's way.
    assert path.read_bytes() == b'{"new":1}\n'


def test_a_kill_leaves_the_old_folder(tmp_path):
    path = tmp_path / "out"
    with store.replacing_folder(path) as work:
        (work / "a").write_text("old")
    code = """
import sys, time
from pathlib import Path
from tasks import store
with store.replacing_folder(Path(sys.argv[1])) as work:
    (work / "a").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""
    kill_while(code, path)
    assert names(path) == ["a"]
    assert (path / "a").read_text() == "old"
    assert len(names(tmp_path)) == 2
    (tmp_path / ".out.backup").mkdir()  # Somebody's own.
    with store.replacing_folder(path) as work:
        with store.replacing_folder(path) as other:  # A folder that somebody writes is no leftover.
            assert names(tmp_path) == sorted([work.name, other.name, "out", ".out.backup"])
            (other / "a").write_text("other")
        (work / "a").write_text("new")
    assert names(tmp_path) == [".out.backup", "out"]
    assert (path / "a").read_text() == "new"


def test_a_kill_between_two_renames_loses_neither_folder(tmp_path):
    path = tmp_path / "out"
    with store.replacing_folder(path) as work:
        (work / "a").write_text("old")
    code = """
import os, sys, time
from pathlib import Path
from tasks import store
real, path = os.replace, Path(sys.argv[1])
def replace(source, target):
    if Path(target) == path:
        print("ready", flush=True)
        time.sleep(60)
    real(source, target)
os.replace = replace
with store.replacing_folder(path) as work:
    (work / "a").write_text("new")
"""
    kill_while(code, path)
    assert not path.exists()
    with pytest.raises(RuntimeError), store.replacing_folder(path) as work:
        stop_half_way(work, RuntimeError())
    assert names(tmp_path) == ["out"]
    assert (path / "a").read_text() == "old"


# Folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "x" / "out"
    for content, file in (("one", "a"), ("two", "b")):
        with store.replacing_folder(path) as work:
            (work / file).write_text(content)
            assert work.parent == path.parent
    assert names(path) == ["b"]
    assert (path / "b").read_text() == "two"
    assert names(path.parent) == ["out"]
    assert path.stat().st_mode & 0o777 == 0o755


def stop_half_way(work, error):
    (work / "a").write_text("half")
    raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_exception_leaves_the_old_folder_and_no_rubbish(tmp_path, error, is_new):
    path = tmp_path / "out"
    if not is_new:
        with store.replacing_folder(path) as work:
            (work / "a").write_text("old")
    with pytest.raises(error), store.replacing_folder(path) as work:
        stop_half_way(work, error)
    assert names(tmp_path) == ([] if is_new else ["out"])
    if not is_new:
        assert (path / "a").read_text() == "old"


def test_a_failed_rename_leaves_the_old_folder_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "out"
    with store.replacing_folder(path) as work:
        (work / "a").write_text("old")
    real = os.replace

    def refuse(source, target):
        if Path(target) == path and (Path(source) / "b").exists():
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Input/output"), store.replacing_folder(path) as work:
        (work / "b").write_text("new")
    assert (path / "a").read_text() == "old"
    assert names(tmp_path) == ["out"]


# Identity ---------------------------------------------------------------------------------------------------------


def test_sha256_is_the_published_one(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert store.sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "long").write_bytes(b"a" * (3 << 20))
    with contextlib.suppress(FileNotFoundError):
        known = subprocess.run(["sha256sum", tmp_path / "long"], capture_output=True, text=True, check=True).stdout
        assert store.sha256(tmp_path / "long") == known.split()[0]


def test_a_digest_identifies_values():
    assert store.digest({"a": 1, "b": 2}, "x") == store.digest({"b": 2, "a": 1}, "x")
    different = [((1,),), ((1, 2),), ([1, 2],), (1, 2), ("1", 2), ("12",), (12,), ({"a": 1},), ()]
    assert len({store.digest(*values) for values in different}) == len(different) - 1  # (1, 2) and [1, 2] are one list
    assert json.loads(store.dump({"a": [1, "é"]})) == {"a": [1, "é"]}
