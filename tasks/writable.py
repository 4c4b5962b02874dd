"""Places that a program writes: those of libraries are moved where needed, those of a clone are checked.

Libraries keep caches beside their source, below HOME and in system folders, and this user may not write there. A clone
may hold what another user has left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterator, MutableMapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHES = ".scratch/caches"
WRITTEN = (".scratch", ".dvc", "artifacts", "reports", "runs", "dvc.lock", "params.yaml")
"""What a run writes in a clone."""
FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def use_caches(environment: MutableMapping[str, str], root: Path = ROOT) -> None:
    """Name writable folders to libraries whose own this user cannot write; what the user has named is not changed.

    Args:
        environment: of this process, before libraries read it.
        root: of the clone, whose `.scratch` is taken, or else the folder for temporary files.
    """
    moved: dict[str, str] = {}
    if not {"LOGNAME", "USER", "LNAME", "USERNAME"} & environment.keys() and _account() is None:
        moved["USER"] = f"user{os.geteuid()}"  # Libraries ask for a name.
    account = _account()
    home = Path(environment.get("HOME") or (account.pw_dir if account else ""))
    if not home.is_absolute() or not home.is_dir():
        environment.pop("HOME", None)
        moved["HOME"] = "home"
    elif not may_write(home / ".cache"):
        moved |= {"XDG_CACHE_HOME": "cache", "TRITON_HOME": "triton"}
        token = home / ".cache/huggingface/token"
        moved |= {"HF_TOKEN_PATH": str(token)} if token.is_file() else {}
    if "HOME" not in moved and not may_write(home / ".config"):
        moved["MPLCONFIGDIR"] = "matplotlib"
    if not may_write(Path("/var/tmp/dvc/repo")):
        moved["DVC_SITE_CACHE_DIR"] = "dvc"

    missing = {name: value for name, value in moved.items() if name not in environment}
    if missing.keys() - {"USER", "HF_TOKEN_PATH"}:
        place = _place(root)
        for name in missing.keys() - {"USER", "HF_TOKEN_PATH"}:
            missing[name] = str(place / missing[name])
            Path(missing[name]).mkdir(parents=True, exist_ok=True)
    environment.update(missing)


def _account() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(os.geteuid())
    except KeyError:
        return None


def _place(root: Path) -> Path:
    """A folder for caches that is this user's alone: others could put compiled code into it."""
    import tempfile  # Every process loads this module, and few come here.

    for place in (root / CACHES, Path(tempfile.gettempdir()) / f"breadcrumb-caches-{os.geteuid()}"):
        if may_write(place):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = place.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                return place
    return Path(tempfile.mkdtemp(prefix="breadcrumb-caches-"))


def may_write(path: Path) -> bool:
    """Whether this user may write in a folder, or make it where it is missing."""
    while not os.path.lexists(path):
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK) and path.is_dir()


def check_clone(root: Path) -> None:
    """Refuse a clone in which this user cannot write; one line says what mends it.

    Raises:
        ValueError: another user has left files in it, or it is read-only.
    """
    if not os.access(root, os.W_OK):
        raise ValueError(_refused(root.absolute()))
    places = {name: next(_closed(root / name), None) for name in WRITTEN if (root / name).exists()}
    if closed := {name: path for name, path in places.items() if path is not None}:
        first = next(iter(closed.values()))
        raise ValueError(_refused(first.relative_to(root), " ".join(closed), _owner(first)))


def _closed(folder: Path) -> Iterator[Path]:
    """What this user cannot write: a file, or, below a folder, folders and what others have left."""
    if folder.is_file() and not os.access(folder, os.W_OK):
        yield folder
        return
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        yield folder
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _closed(Path(entry.path))
            elif _is_closed(entry):
                yield Path(entry.path)


def _is_closed(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    is_meant = not found.st_mode & 0o222  # DVC takes the right to write from what its cache holds.
    return found.st_uid != os.geteuid() and not is_meant and not os.access(entry, os.W_OK)


def _owner(path: Path) -> str:
    number = path.lstat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _refused(path: Path, names: str = "", owner: str = "") -> str:
    if not names:
        return (
            f"{path}: this user cannot write there. Expected a folder of this user on a disk that is not read-only: "
            f'take it over (sudo chown -R "$USER" {path}), or work in a clone of your own.'
        )
    return (
        f"{path}: this user cannot write there, because it is {owner}'s; a run as another user may have left it. Take "
        f'it over: sudo chown -R "$USER" {names}'
    )


def explained(error: Exception) -> str | None:
    """One line about full memory, a full disk or a place that may not be written; None for another error."""
    if isinstance(error, MemoryError):
        return f"this process gets no more memory{f' ({error})' if str(error) else ''}. Free some and run again."
    number, name = getattr(error, "errno", None), getattr(error, "filename", None)
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None
    if number in FULL or "No space left on device" in str(error):  # safetensors has no number for it.
        return no_space(path)
    if isinstance(error, OSError) and number in REFUSED and path is not None:
        place = path if path.exists() else path.parent
        return f"{path}: {error.strerror}. {_refused(place.absolute())}"
    return None


def no_space(path: Path | None = None) -> str:
    """What to do where the disk is full; `path` is what could not be written, if that is known."""
    where = f" while writing {path}" if path else ""
    return f"no space left on the disk{where}. Free some and run again; finished work is kept. {_free(path)}"


def _free(path: Path | None) -> str:
    """How much is left where a path lies; where that is unknown, in the working folder and for temporary files."""
    import shutil
    import tempfile

    places = (path.absolute(),) if path else (Path.cwd(), Path(tempfile.gettempdir()))
    found = []
    for place in places:
        while not place.is_dir():
            place = place.parent
        with contextlib.suppress(OSError):
            found.append(f"{shutil.disk_usage(place).free / 1e6:,.1f} MB are free in {place}")
    return f"({', '.join(found)})"
