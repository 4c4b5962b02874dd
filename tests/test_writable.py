"""Places that cannot be written: libraries get others, and what another user left in a clone is named with its cure."""

from __future__ import annotations

import errno
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from numba.misc.appdirs import AppDirs
from safetensors import SafetensorError

from tasks import writable

ROOT = Path(__file__).parents[1]
NOBODY, NO_ACCOUNT = 65534, 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="no root: nobody else's files can be made")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that everybody may reach."""
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(0o755)
        if folder.name.startswith("pytest-of-"):
            break
    return tmp_path


def as_nobody(work: Callable[[], object]) -> str:
    """What this gives, or its error, in a process of another user; forked, for Python may lie where only root reads."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


@needs_root
@pytest.mark.parametrize("home", ["", "missing", "read-only", "closed-cache"])
def test_libraries_get_a_place_where_home_is_none(home: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "read-only").mkdir()
    (place / "closed-cache/.cache").mkdir(parents=True)
    os.chown(place / "closed-cache", NOBODY, NOBODY)
    (place / "tmp").mkdir(mode=0o777)
    (place / "tmp").chmod(0o777)
    given = {"HOME": str(place / home)} if home else {}
    monkeypatch.setattr("tempfile.tempdir", str(place / "tmp"))

    def work() -> Path:
        os.environ.pop("HOME")
        os.environ.update(given)
        writable.use_caches(os.environ)
        cache = Path(AppDirs("numba").user_cache_dir)
        cache.mkdir(parents=True)
        (cache / "file").write_text("", encoding="utf-8")
        return cache

    monkeypatch.setattr(writable.use_caches, "__defaults__", (place,))
    assert as_nobody(work).startswith(f"{place / 'tmp'}/breadcrumb-caches-{NOBODY}/")


@pytest.mark.parametrize("home", ["missing", "file", None])
def test_importing_the_core_is_enough(home: str | None, tmp_path: Path) -> None:
    """Of a process whose user has no account, and so no folder that could be taken where HOME is not set."""
    (tmp_path / "file").touch()
    named = {"HOME", "XDG_CACHE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"}
    env = {name: value for name, value in os.environ.items() if name not in named}
    env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **({"HOME": str(tmp_path / home)} if home else {})}
    code = f"import os; os.geteuid = lambda: {NO_ACCOUNT}; import tasks; print(os.environ['HOME'], os.environ['USER'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=60)
    found, user = done.stdout.split()
    assert (Path(found).is_dir(), user) == (True, f"user{NO_ACCOUNT}")
    assert found.startswith((f"{ROOT / writable.CACHES}/", f"{tmp_path}/breadcrumb-caches-"))


def test_what_the_user_has_named_is_not_moved(tmp_path: Path) -> None:
    given = {"HOME": str(tmp_path / "missing"), "XDG_CACHE_HOME": "/x", "USER": "u"}
    writable.use_caches(given, tmp_path)
    assert given["XDG_CACHE_HOME"] == "/x"
    assert given["HOME"].startswith(str(tmp_path / ".scratch/caches"))

    whole = {"HOME": str(tmp_path), "USER": "u"}
    writable.use_caches(whole, tmp_path)
    assert whole == {"HOME": str(tmp_path), "USER": "u"}


def test_a_cache_that_another_could_have_filled_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"breadcrumb-caches-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "clone").write_text("no folder", encoding="utf-8")
    found = writable._place(tmp_path / "clone")
    assert found.parent == tmp_path
    assert not found.is_symlink()


@needs_root
@pytest.mark.parametrize(
    ("left", "first"),
    [
        (".scratch/locks/plan.lock", ".scratch/locks"),
        (".dvc/tmp/rwlock", ".dvc/tmp"),
        ("artifacts/train/x/metrics.jsonl", "artifacts/train"),
        ("reports/results.csv", "reports"),
        ("runs/a/results.csv", "runs/a"),
        ("dvc.lock", "dvc.lock"),
        ("params.yaml", "params.yaml"),
    ],
)
def test_what_root_has_left_is_named_with_the_command_that_mends_it(left: str, first: str, place: Path) -> None:
    clone = place / "clone"
    (clone / "artifacts").mkdir(parents=True)
    for path in (clone, clone / "artifacts"):
        os.chown(path, NOBODY, NOBODY)
    (clone / left).parent.mkdir(parents=True, exist_ok=True)
    if first != "reports" and Path(left) != Path(first):
        os.chown(clone / Path(left).parts[0], NOBODY, NOBODY)
    (clone / left).write_text("", encoding="utf-8")

    check = functools.partial(writable.check_clone, clone)
    said = as_nobody(check)
    top = Path(left).parts[0]
    assert said == (
        f"ValueError: {first}: this user cannot write there, because it is root's; a run as another user may have left "
        f'it. Take it over: sudo chown -R "$USER" {top}'
    )
    subprocess.run(["chown", "-R", str(NOBODY), top], cwd=clone, check=True)
    assert as_nobody(check) == "None"


@needs_root
def test_a_file_of_root_in_a_folder_of_ours_is_seen_and_what_a_cache_protects_is_not(place: Path) -> None:
    (place / ".dvc/cache").mkdir(parents=True)
    (place / ".scratch").mkdir()
    for path in (place, place / ".dvc", place / ".dvc/cache", place / ".scratch"):
        os.chown(path, NOBODY, NOBODY)
    (place / ".dvc/cache/ab").write_text("", encoding="utf-8")
    (place / ".dvc/cache/ab").chmod(0o444)
    check = functools.partial(writable.check_clone, place)
    assert as_nobody(check) == "None"
    (place / ".scratch/pipeline.lock").write_text("", encoding="utf-8")
    assert ".scratch/pipeline.lock: this user cannot write there" in as_nobody(check)


@needs_root
def test_a_clone_of_another_user_is_named(place: Path) -> None:
    check = functools.partial(writable.check_clone, place)
    said = as_nobody(check)
    assert said.startswith(f"ValueError: {place}: this user cannot write there. Expected a folder of this user")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/usr/x/y"),
            r"while writing /usr/x/y\. Free .* free in /usr\)",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/usr/y"), r"no space left on the disk while writing /usr/y\. "),
        (SafetensorError("I/O error: No space left on device (os error 28)"), r"no space left on the disk\. .* MB are"),
        (PermissionError(errno.EACCES, "Permission denied", "/etc/x"), r'^/etc/x: Permission .* -R "\$USER" /etc\)'),
        (
            OSError(errno.EROFS, "Read-only file system", "/proc/x"),
            r"^/proc/x: Read-only file system\. /proc: ",
        ),
        (
            MemoryError("Cannot allocate memory (os error 12)"),
            r" no more memory \(Cannot .* error 12\)\)\. Free some and run again\.$",
        ),
        (MemoryError(), r"^this process gets no more memory\. "),
    ],
)
def test_one_line_says_what_is_full_or_closed(error: Exception, message: str) -> None:
    said = writable.explained(error)
    assert said is not None
    assert "\n" not in said
    assert re.search(message, said), said


def test_other_errors_are_not_explained() -> None:
    others: list[Callable[[], Exception]] = [FileNotFoundError, lambda: OSError(errno.EIO, "x", "y"), RuntimeError]
    assert [writable.explained(make()) for make in others] == [None] * 3
