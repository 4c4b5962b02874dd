"""No file of the repository names a machine, a registry, a key, or the way in which it was written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import shipped

ROOT = Path(__file__).parents[2]
# Put together from parts, so that this file may be looked at too.
FORBIDDEN = {
    "a path of one machine": rf"(?<![\w.~-])/(?:{'wo' + 'rk'}|{'ro' + 'ot'}|home/\w+|Users/\w+)(?:/\w|\b(?=[\s\"']))",
    "a folder for temporary things": rf"(?<![\w.])/{'t' + 'mp'}/\w",
    "the host of a registry": r"https?://[^\s\"')]*(?:artifactory|nexus|pypi-mirror|devpi|internal|\.local\b)",
    "a key": (
        r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(?:gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9-]{30,}"
        r"|AKIA[0-9A-Z]{16}|xox[bap]-[0-9A-Za-z-]{20,})"
    ),
    "a password": r"(?i)\b(?:password|passwd|api_key|secret|auth_token)\s*[:=]\s*[\"'][^\"'\s{$]{6,}[\"']",
    "how it was written": (
        rf"(?i)\b(?:{'chat' + 'gpt'}|{'co' + 'pilot'}|{'clau' + 'de'}|{'anthro' + 'pic'})\b"
        rf"|\b(?:{'as an ' + 'ai'}|{'language ' + 'assistant'})\b"
        rf"|\bissue #?[0-9]+\b|\bhelper session|\b{'brief' + '.md'}\b"
    ),
}


def _files() -> list[Path]:
    """Files git tracks, without those that a user's own run has written."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    names = [name for name in shipped.tracked() if name not in shipped.changed()]
    return [path for path in map(ROOT.joinpath, names) if path.is_file()]


def _found(pattern: str, text: str) -> list[tuple[int, str]]:
    return [(text.count("\n", 0, m.start()) + 1, m[0]) for m in re.finditer(pattern, text)]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    wrong = []
    for path in _files():
        data = path.read_bytes()
        pinned = path.parent.name == "requirements" and what == "how it was written"  # Packages have any name.
        if b"\0" not in data and not pinned:
            text = data.decode("utf-8", "replace")
            wrong += [f"{path.relative_to(ROOT)}:{line}: {hit!r}" for line, hit in _found(FORBIDDEN[what], text)]
    assert not wrong, f"{what}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a path of one machine", "cd /" + "work/main"),
        ("a path of one machine", 'Path("/' + 'root")'),
        ("a folder for temporary things", "/" + "tmp/env/venv"),
        ("a key", "ghp_" + "a1" * 18),
        ("how it was written", "see is" + "sue 3"),
    ],
)
def test_the_patterns_find_what_they_are_for(what: str, text: str) -> None:
    assert _found(FORBIDDEN[what], f"x = {text}\n")


def test_no_tracked_file_is_large_or_made_by_the_pipeline() -> None:
    names = [path.relative_to(ROOT) for path in _files()]
    made = [name for name in names if name.parts[0] in ("artifacts", "reports", "runs", ".scratch", ".venv")]
    # DVC's metrics and plots are committed, so that a fresh clone has something to compare with.
    assert not [name for name in made if name != Path("reports/curves.csv") and name.parent != Path("reports/metrics")]
    assert not [str(path.relative_to(ROOT)) for path in _files() if path.stat().st_size > 2_000_000]


def test_git_ignores_what_a_run_makes_and_what_a_user_fetches() -> None:
    """Otherwise `git add .` would take a downloaded model of some gigabytes."""
    _files()  # Skips where there is no repository.
    names = ["models/mine/model.safetensors", "artifacts/a", "reports/a", ".scratch/a"]
    names += ["requirements/.installed"]
    done = subprocess.run(["git", "-C", str(ROOT), "check-ignore", *names], capture_output=True, text=True)
    assert done.stdout.split() == names
