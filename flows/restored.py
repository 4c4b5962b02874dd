"""Whether a result that DVC took from its cache is the one that `dvc.lock` names.

DVC does not read a file of its cache before it copies it, as long as the file is write-protected: a disk that loses
bits would change a published number in silence.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def remove_damaged(root: Path, stage: str) -> list[str]:
    """Remove outputs whose bytes are not those that `dvc.lock` names, with the damaged files of the cache.

    The stage then has to run again, because neither its output nor a copy of it is there.

    Args:
        root: root of the clone.
        stage: such as `train@search_r1_grpo-0`; its outputs are in place.

    Returns:
        The outputs that were removed, relative to `root`.
    """
    from dvc.repo import Repo

    removed = []
    with Repo(str(root), _wait_for_lock=True) as repo:
        with repo.lock:  # DVC writes `dvc.lock` in place, for another stage that ends at this moment.
            outs = repo.stage.get_target(stage).outs
        for out in outs:
            damaged = {one for path, one in _files(out) if _md5(path) != one.removesuffix(".dir")}
            if not damaged:
                continue
            for one in damaged:
                Path(out.cache.oid_to_path(one)).unlink(missing_ok=True)
            path = Path(out.fs_path)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            removed.append(path.relative_to(root.resolve()).as_posix())
    return removed


def _files(out: Any) -> Iterator[tuple[Path, str]]:
    """Every file of an output with the hash that it must have, the list of a folder's files included."""
    path, name = Path(out.fs_path), out.hash_info.value
    if not out.hash_info.isdir:
        yield path, name
        return
    yield Path(out.cache.oid_to_path(name)), name
    for parts, _, file in out.get_obj() or ():
        yield path.joinpath(*parts), file.value


def _md5(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
