"""What each run has reported, with its settings, in a folder of its own: `runs/<key>/`; `runs/latest` is the last one.

`reports/` is replaced by every run. What DVC writes stays where it is; here are copies of the report's files, about
1.3 MB a run, and no artifacts. `python -m tasks.runner.runs` lists and removes them; `make runs` is the short way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks import conf, program, store, writable

FOLDER, LATEST, ABOUT = Path("runs"), "latest", "about.json"
REPORTS = Path("reports")
PAGE = "index.html"
"""Shows seconds and run ids: it differs although nothing else does."""
MOST_CHARS = 100
"""Most characters of a run's settings in the list."""


def keep(root: Path, key: str, title: str, changes: Sequence[str]) -> str:
    """Copy the report of a run that has ended well, unless a kept run has the same settings and results.

    Args:
        root: of the clone; its `params.yaml` is that of the run.
        key: name of the run's folder.
        title: what the run is, in words.
        changes: `key: old -> new` of each setting that the run has of its own.

    Returns:
        The name of the folder, new or not; empty without a report.

    Raises:
        OSError: it cannot be written; nothing unfinished stays.
    """
    reports = root / REPORTS
    files = {str(path.relative_to(reports)): path for path in sorted(reports.rglob("[!.]*")) if path.is_file()}
    if not files:
        return ""
    files[str(conf.PARAMS)] = root / conf.PARAMS
    digest = store.digest({name: store.sha256(path) for name, path in files.items() if name != PAGE})

    folder = root / FOLDER
    for unfinished in folder.glob(".*.partial"):  # Of a run that was killed here.
        shutil.rmtree(unfinished, ignore_errors=True)
    same = next((name for name in names(root) if _about(folder / name).get("digest") == digest), "")
    if not same:
        with store.replacing_folder(folder / key) as work:
            for name, path in files.items():
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, work / name)
            store.write_json(work / ABOUT, {"title": title, "changes": list(changes), "digest": digest})
    _point(root, same or key)
    return same or key


def names(root: Path) -> list[str]:
    """The kept runs, the oldest first; last comes the one of `latest`, which may have been kept before."""
    found = (root / FOLDER).glob(f"[!.]*/{ABOUT}")
    latest = (root / FOLDER / LATEST).resolve()
    kept = (path.parent for path in found if not path.parent.is_symlink())
    return [folder.name for folder in sorted(kept, key=lambda folder: (folder.resolve() == latest, folder.name))]


def remove(root: Path, given: Sequence[str]) -> None:
    """Remove kept runs.

    Raises:
        ValueError: there is no such run; then all stay.
    """
    known = names(root)
    for name in given:
        if name not in known:
            raise ValueError(f"REMOVE={name}: there is no such run. {conf.known(known)}")
    for name in dict.fromkeys(given):
        shutil.rmtree(root / FOLDER / name)
    left, link = names(root), root / FOLDER / LATEST
    if link.is_symlink() and not link.exists():
        link.unlink()
        if left:
            _point(root, left[-1])


def listed(root: Path) -> str:
    """A line for each kept run, the oldest first, and what they take together."""
    lines, total, latest = [], 0, os.path.realpath(root / FOLDER / LATEST)
    for name in names(root):
        folder = root / FOLDER / name
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        about, is_latest = _about(folder), os.path.realpath(folder) == latest
        changes = "; ".join(map(str, about.get("changes", [])))
        changes = changes if len(changes) <= MOST_CHARS else f"{changes[: MOST_CHARS - 3]}..."
        shown = f"{about.get('title', '')}{f' ({changes})' if changes else ''}{' <- latest' if is_latest else ''}"
        lines.append(f"{name}  {size / 1e6:4.1f} MB  {shown}")
        total += size
    if not lines:
        return (
            f"No run is kept in {FOLDER}/ yet. Each `make run` and `make smoke` that ends well keeps its report there."
        )
    lines.append(
        f"{len(lines)} runs, {total / 1e6:.1f} MB in {FOLDER}/. Open {FOLDER}/<name>/{PAGE} in a browser. "
        "`make runs REMOVE=a,b` removes runs, `make runs KEEP_LAST=5` all but the last five."
    )
    return "\n".join(lines)


def _about(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = store.read_json(folder / ABOUT)
        return found if isinstance(found, dict) else {}
    return {}


def _point(root: Path, name: str) -> None:
    """Let `latest` point at a run; it never points at nothing in between."""
    new = root / FOLDER / f".{LATEST}"
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    os.replace(new, root / FOLDER / LATEST)


def main(words: list[str] | None = None, root: Path = Path(".")) -> int:
    """List the kept runs after removing what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tasks.runner.runs", description="Lists and removes kept reports.")
    parser.add_argument("--remove", default="", metavar="A,B", help="names of runs that go")
    parser.add_argument("--keep-last", metavar="N", help="all but the last N go")
    given = parser.parse_args(words)
    try:
        gone = [name for name in map(str.strip, given.remove.split(",")) if name]
        if given.keep_last is not None:
            if not (given.keep_last.isascii() and given.keep_last.isdecimal()):
                raise ValueError(f"KEEP_LAST={conf.shown(given.keep_last)}: expected a number, such as 5.")
            known = names(root)
            gone += [name for name in known[: max(0, len(known) - int(given.keep_last))] if name not in gone]
        remove(root, gone)
    except (ValueError, OSError) as error:
        print(f"error: {writable.explained(error) or error}", file=sys.stderr)
        return 1
    print(listed(root))
    return 0


if __name__ == "__main__":
    program.run(main)
