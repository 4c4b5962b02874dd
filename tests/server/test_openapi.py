"""Requests made up from the server's own description: no fault, no hang, and the statuses it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.server.running import ServerProcess

# Small enough that every request the description allows is within the limits it cannot state.
LIMITS = ("max_top_k=90", "max_queries=500", "max_hits=45000")
OPTIONS = (
    "--phases examples,coverage,fuzzing --max-examples 60 --seed 1 --generation-deterministic "
    "--request-timeout 10 --max-response-time 10 --continue-on-failure --no-color"
)


@pytest.mark.slow
@pytest.mark.servers
def test_made_up_requests(world_index: Path, tmp_path: Path) -> None:
    words = [word for one in (*LIMITS, f"cache_folder={tmp_path}/cache") for word in ("--set", one)]
    with ServerProcess(world_index, "--port", "0", *words) as server:
        tool = Path(sys.executable).with_name("schemathesis")
        done = subprocess.run(
            [str(tool), "run", f"{server.url}/openapi.json", *OPTIONS.split()],
            cwd=tmp_path, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert "3 selected / 3 total" in done.stdout
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "Traceback" not in server.log.read_text()
