"""Why a child process failed, as its last lines and its exit code tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.child import OUT_OF_MEMORY, Outcome, Stopper, execute
from tests.pipeline.toy import HOUSE

BARS = "Loading weights:  10%|#         | 1/10 [00:00<00:01,  5.00it/s]\rLoading weights: 100%|###| 10/10 [00:01<00:00]"
KILL = "import os, signal, sys; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"


def _run(root: Path, code: str) -> tuple[Outcome, list[str]]:
    """A module with this code as the child; its outcome and what it said."""
    (root / "dies.py").write_text(code, encoding="utf-8")
    said: list[str] = []
    return execute("train@a-0", ["dies"], root, said.append, Stopper(), PYTHONPATH=str(HOUSE)), said


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"print('going on'); {KILL}", OUT_OF_MEMORY),
        (f"print('error: an earlier one of a part'); {KILL}", OUT_OF_MEMORY),
        (f"print({BARS!r}); raise SystemExit(3)", "it ended with code 3 without a message"),
        (f"print('no such file'); print({BARS!r}); raise SystemExit(1)", "no such file"),
        ("print('12it [00:01, 9.93it/s]'); raise SystemExit(2)", "it ended with code 2 without a message"),
        (f"print('error: a.yaml: wrong.'); print({BARS!r}); raise SystemExit(1)", "a.yaml: wrong."),
        ("print('ERROR: failed to run: x, exited with -9'); raise SystemExit(255)", OUT_OF_MEMORY),
        ("print('100% of 3 | files'); raise SystemExit(1)", "100% of 3 | files"),
    ],
)
def test_the_reason_of_a_failure(tmp_path: Path, code: str, message: str) -> None:
    """A child that was killed with its stage can say nothing; the last update of a progress bar is no reason."""
    outcome, _ = _run(tmp_path, code)
    assert (outcome.result, outcome.message) == ("failed", message)


@pytest.mark.parametrize(
    "code",
    [
        "print(\"Running stage 'index':\"); print('ERROR: unexpected error - [Errno 28] No space left on device: ab')",
        "raise OSError(28, 'No space left on device')",
        "raise OSError(122, 'Disk quota exceeded')",
    ],
)
def test_a_full_disk_that_another_program_meets_is_told_as_our_own(tmp_path: Path, code: str) -> None:
    """DVC writes its cache and its own files itself."""
    outcome, _ = _run(tmp_path, f"{code}\nraise SystemExit(255)")
    assert outcome.message.startswith("no space left on the disk. Free some and run again; finished work is kept.")
    assert "\n" not in outcome.message


def test_progress_is_shown_all_the_same(tmp_path: Path) -> None:
    outcome, said = _run(tmp_path, f"print({BARS!r})")
    assert outcome.is_good
    assert [line.split("|")[0] for line in said] == ["Loading weights:  10%", "Loading weights: 100%"]
