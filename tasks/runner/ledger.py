"""What each stage cost when it last ended well: one small file a stage in `.scratch/ledger/`."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

from tasks import store
from tasks.runner.git import git_state

LEDGER = Path(".scratch/ledger")


def write(root: Path, name: str, seconds: float, peak_rss_mb: float, run_id: str | None) -> None:
    """Write the entry of stage `name`; a failure to do so is a warning, for the work itself has ended well."""
    commit, dirty = git_state(root)
    row = {
        "stage": name,
        "seconds": round(seconds, 2),
        "mlflow_run_id": run_id,
        "git_commit": commit,
        "git_dirty": dirty,
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "peak_rss_mb": round(peak_rss_mb, 1),
    }
    try:
        store.write_json(root / LEDGER / f"{name}.json", row)
    except OSError as error:
        print(f"warning: the ledger of {name} could not be written: {error}", file=sys.stderr)
