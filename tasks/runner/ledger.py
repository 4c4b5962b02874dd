"""What each stage cost when it last ended well, at which commit and with which libraries: one small file a stage.

The files lie in `.scratch/ledger/`.

An entry belongs to the bytes that this execution wrote. It holds the hashes of the stage's plan and of its outputs, and
is read only while both are still those: results that came back from a cache, or were made by another run of a stage of
the same name, have no entry.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

from tasks import identity, planned, store
from tasks.runner import record, resume
from tasks.runner.git import Commit
from tasks.store import DataError, Row

LEDGER = Path(".scratch/ledger")


def hashes(root: Path, name: str) -> Row:
    """What ties an entry to the stage's plan and outputs as they are now; null where there is none."""
    return {"plan_sha256": _plan_sha256(root, name), "outputs_sha256": resume.outputs_sha256(root, name)}


def write(
    root: Path, name: str, made: Row, code: Commit, seconds: float, peak_rss_mb: float, recorded: str | None
) -> None:
    """Write the entry of stage `name`; a failure to do so is a warning, for the work itself has ended well.

    Args:
        root: root of the clone.
        name: stage and matrix item.
        made: `hashes` when the body had ended, and what the body measured.
        code: the commit at which the stage started.
        seconds, peak_rss_mb: what it cost.
        recorded: name of the stage's record, which the sender gives a run in MLflow.
    """
    row = {
        "stage": name,
        **made,
        "seconds": round(seconds, 2),
        "record": recorded,
        "git_commit": code.sha,
        "git_dirty": code.is_dirty,
        "libraries": identity.recorded(),
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "peak_rss_mb": round(peak_rss_mb, 1),
    }
    try:
        store.write_json(root / LEDGER / f"{name}.json", row)
    except OSError as error:
        print(f"warning: the ledger of {name} could not be written: {error}", file=sys.stderr)


def read(root: Path) -> dict[str, Row]:
    """Stage -> its entry and the MLflow run known by now, for stages whose plan and outputs are still the entry's.

    Optional: no folder, an unreadable file or a stage that is no more is no entry.
    """
    found = {}
    for path in sorted((root / LEDGER).glob("*.json")):
        try:
            row = store.read_json(path)
        except (DataError, OSError, UnicodeDecodeError):
            continue
        if isinstance(row, dict) and isinstance(row.get("stage"), str) and _is_current(root, row):
            found[row["stage"]] = {**row, "mlflow_run_id": record.run_id(root, row.get("record"))}
    return found


def _is_current(root: Path, row: Row) -> bool:
    """Whether plan and outputs are those of the entry; outputs may be large, so the plan is asked first."""
    name, written = row["stage"], row.get("outputs_sha256")
    if written is None or row.get("plan_sha256") != _plan_sha256(root, name):
        return False
    return bool(written == resume.outputs_sha256(root, name))


def _plan_sha256(root: Path, name: str) -> str | None:
    path = root / planned.path_of(name)
    return store.sha256(path) if path.is_file() else None
