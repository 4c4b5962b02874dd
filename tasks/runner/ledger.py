"""What each stage cost when it last ended well, at which commit and with which libraries: one small file a stage.

An entry of `.scratch/ledger/` belongs to the bytes that this execution wrote. It holds the hashes of the stage's plan
and of its outputs, and is read only while both are still those: results that came back from a cache, or were made by
another run of a stage of the same name, have no entry.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from pathlib import Path

from tasks import identity, planned, store
from tasks.runner import record, resume
from tasks.runner.git import Commit
from tasks.runner.process import peak_rss_mb
from tasks.store import Row

LEDGER = Path(".scratch/ledger")


def _plan_sha256(root: Path, name: str) -> str | None:
    path = root / planned.path_of(name)
    return store.sha256(path) if path.is_file() else None


HASHES = {"plan_sha256": _plan_sha256, "outputs_sha256": resume.outputs_sha256}
"""What ties an entry to plan and outputs; outputs may be large, so the plan is asked first."""


def write(root: Path, name: str, measured: Row, code: Commit, seconds: float, recorded: str | None) -> None:
    """Write the entry of stage `name`; a failure to do so is a warning, for the work itself has ended well.

    Besides what the body `measured` it holds the commit at which the stage started, the seconds that it took, and the
    name of its record, which the sender gives a run in MLflow.
    """
    hashes = {key: ask(root, name) for key, ask in HASHES.items()}
    about = {"seconds": round(seconds, 2), "peak_rss_mb": round(peak_rss_mb(), 1), "libraries": identity.recorded()}
    ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    made = {"record": recorded, "git_commit": code.sha, "git_dirty": code.is_dirty, "ended": ended}
    try:
        store.write_json(root / LEDGER / f"{name}.json", {"stage": name, **measured, **hashes, **about, **made})
    except OSError as error:
        print(f"warning: the ledger of {name} could not be written: {error}", file=sys.stderr)


def read(root: Path) -> dict[str, Row]:
    """Stage -> its entry and the MLflow run known by now, for stages whose plan and outputs are still the entry's.

    Optional: no folder, an unreadable file or a stage that is no more is no entry.
    """
    found = {}
    for path in sorted((root / LEDGER).glob("*.json")):
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError):  # Torn, or of another version.
            row = store.read_json(path)
            is_current = all(row[key] == ask(root, path.stem) for key, ask in HASHES.items())
            if is_current and row["outputs_sha256"]:
                found[row["stage"]] = {**row, "mlflow_run_id": record.run_id(root, row["record"])}
    return found


def seconds(root: Path) -> dict[str, float]:
    """Stage -> the seconds it took, where its plan is still the entry's; outputs, which may be large, are not read."""
    found = {}
    for path in sorted((root / LEDGER).glob("*.json")):
        with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
            row = store.read_json(path)
            if row["plan_sha256"] == _plan_sha256(root, path.stem):
                found[str(row["stage"])] = float(row["seconds"])
    return found
