"""`params.yaml` while a run has settings of its own: what it was lies beside it, and is put back at the end.

What is trusted after a kill is never written in place: the copy appears under its name only when it is whole and on the
disk, and it is known by its hash. Putting it back is a rename within one folder, which needs no space. It happens only
where `params.yaml` is still what the run wrote: an edit made since then is its user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from tasks import store
from tasks.conf import PARAMS

KEPT = Path("params.kept.yaml")
"""What `params.yaml` was before a run that has settings of its own."""
HASHES = Path("params.kept.json")
"""The hashes of that copy (`before`) and of the `params.yaml` that the run wrote (`lent`)."""
PUT_BACK = f"put {PARAMS} back as it was before that run"


def write(root: Path, content: bytes) -> None:
    """Write `params.yaml` for good.

    Raises:
        ValueError: it cannot be written, and is as it was.
    """
    with _named(root), store.replacing(root / PARAMS) as file:
        file.write(content)


def lend(root: Path, content: bytes) -> None:
    """Write `params.yaml` for one run; `restore` puts it back.

    Raises:
        ValueError: it cannot be kept or written, and is as it was.
    """
    with _named(root):
        before = (root / PARAMS).read_bytes()
        try:
            with store.replacing(root / KEPT) as file:
                file.write(before)
            store.write_json(root / HASHES, {"before": _digest(before), "lent": _digest(content)})
            if (root / KEPT).read_bytes() != before:
                raise OSError(None, f"{KEPT} does not hold what was written into it")
            write(root, content)
        except BaseException:
            _forget(root)
            raise


def keep(root: Path) -> None:
    """Leave `params.yaml` as the run wrote it."""
    _forget(root)


def restore(root: Path) -> list[str]:
    """Put `params.yaml` back as it was before a run with settings of its own; returns a line if there is one to say.

    Of an edit that was made since, and of a copy that is damaged, the line says where the copy lies.
    """
    path, kept = root / PARAMS, root / KEPT
    for name in (PARAMS, KEPT, HASHES):
        for unfinished in root.glob(f".{name}.????????"):  # Of a writer that was killed.
            unfinished.unlink()
    if not kept.is_file():
        (root / HASHES).unlink(missing_ok=True)
        return []

    found, before = (_digest(one.read_bytes()) if one.is_file() else "" for one in (path, kept))
    if found == before:  # Killed before the run's settings were written, or put back by hand.
        _forget(root)
        return []
    hashes = _hashes(root)
    if before != hashes.get("before"):
        old = _aside(root, before)
        return [f"{PARAMS} stays as it is: {old}, its copy of before that run, is not whole. Look at both, or git "
                f"checkout {PARAMS}"]  # fmt: skip
    if found not in (hashes.get("lent"), ""):
        return [f"{PARAMS} was edited since and stays so; {_aside(root, before)} is what it was before that run"]

    os.replace(kept, path)
    _forget(root)
    return [PUT_BACK]


def _aside(root: Path, digest: str) -> str:
    """Move the copy out of the way, under a name that no other content has."""
    old = f"params.old-{digest[:8]}.yaml"
    os.replace(root / KEPT, root / old)
    _forget(root)
    return old


def _forget(root: Path) -> None:
    for name in (KEPT, HASHES):
        (root / name).unlink(missing_ok=True)


def _hashes(root: Path) -> dict[str, str]:
    """Of `HASHES`; empty where it cannot be read."""
    with contextlib.suppress(ValueError):
        found = store.read_json(root / HASHES)
        return found if isinstance(found, dict) else {}
    return {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _named(root: Path) -> Iterator[None]:
    """Turns a full disk, or a folder that cannot be written, into one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{root / PARAMS}: the settings of the run cannot be written beside it ({error.strerror}); it is as it "
            "was. Free disk space, or make the folder writable, and run again."
        ) from error
