"""Which Prefect server records a run, if any; Prefect itself is not needed here."""

from __future__ import annotations

import contextlib
import os
import sys
import urllib.request
from pathlib import Path

UI_ADDRESS = Path(".scratch/ui/prefect")


def find_server(root: Path) -> str | None:
    """Address of a Prefect server that answers: `PREFECT_API_URL`, else the one `make ui` started."""
    address = os.environ.get("PREFECT_API_URL")
    if not address:
        with contextlib.suppress(OSError):
            address = (root / UI_ADDRESS).read_text(encoding="utf-8").strip()
    if not address:
        return None
    if answers(address):
        return address
    if os.environ.get("PREFECT_API_URL"):
        print(f"warning: no Prefect server answers at {address}; going on without it.", file=sys.stderr, flush=True)
    return None


def answers(address: str) -> bool:
    """Whether a Prefect server at this address says that it is healthy."""
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False
