"""The committed `dvc.lock` is one of the committed pipeline and settings; code is told apart by `dvc status`.

Everything is read from the commit: a run changes `dvc.lock`, `params.yaml` and `reports/` in the working tree, which is
no fault. On a clean checkout, as in CI, both are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from pathlib import Path

import pytest
import yaml
from dvc.repo import Repo
from dvc.repo.brancher import switch

from tests.docs.documents import ROOT

REFRESH = "docs/commands.md says how dvc.lock is brought up to date"
PIPELINE, LOCK, PARAMS = "dvc.yaml", "dvc.lock", "params.yaml"


def committed(path: str, root: Path = ROOT) -> bytes:
    """A file as the last commit has it."""
    return subprocess.run(["git", "show", f"HEAD:{path}"], cwd=root, check=True, capture_output=True).stdout


def faults(root: Path = ROOT) -> list[str]:
    """What the commit of a clone says of itself that is not so."""
    stages = yaml.safe_load(committed(LOCK, root))["stages"]
    noted = {name: (_paths(stage["deps"]), _paths(stage["outs"])) for name, stage in stages.items()}
    with Repo(str(root)) as repo, switch(repo, repo.scm.get_rev()):
        named = {
            stage.name: (sorted(dep.def_path for dep in stage.deps), sorted(out.def_path for out in stage.outs))
            for stage in repo.index.stages
        }
        kept = [(stage.name, out.def_path) for stage in repo.index.stages for out in stage.outs if not out.use_cache]
    found = [f"stage {name}" for name in sorted(noted.keys() | named.keys()) if noted.get(name) != named.get(name)]
    (plan,) = [dep["md5"] for dep in stages["plan"]["deps"] if dep["path"] == PARAMS]
    found += [PARAMS] * (plan != hashlib.md5(committed(PARAMS, root)).hexdigest())
    return found + [path for stage, path in kept if not _is_kept(stages.get(stage, {}).get("outs", []), path, root)]


def _paths(entries: list[dict[str, str]]) -> list[str]:
    return sorted(entry["path"] for entry in entries)


def _is_kept(outs: list[dict[str, str]], path: str, root: Path) -> bool:
    """Whether git has an output that DVC's cache leaves to it, a file as the lock names it."""
    listed = ["git", "ls-tree", "-r", "--name-only", "HEAD", path]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split()
    noted = next((out for out in outs if out["path"] == path), None)
    if not names or noted is None or noted["md5"].endswith(".dir"):
        return bool(names and noted is not None and noted["nfiles"] == len(names))
    return noted["md5"] == hashlib.md5(committed(path, root)).hexdigest()


def test_the_commit_has_the_lock_of_its_pipeline_settings_and_metrics() -> None:
    assert faults() == [], REFRESH


TOY = """
stages:
  plan:
    cmd: mkdir -p reports/metrics && cp params.yaml reports/metrics/a.json && cp params.yaml b
    deps: [params.yaml]
    outs:
      - b
      - reports/metrics: {cache: false}
metrics: [reports/metrics]
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small clone after its run: a folder of metrics in git, and a result that DVC keeps."""
    root = tmp_path_factory.mktemp("clone")
    (root / PIPELINE).write_text(TOY)
    (root / PARAMS).write_text('{"em": 0.5}\n')
    (root / ".gitignore").write_text("b\n")
    for words in (["init", "--quiet"], ["config", "user.name", "a"], ["config", "user.email", "a@b"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    Repo.init(str(root)).close()
    with contextlib.chdir(root), Repo() as repo:
        repo.reproduce()
    _commit(root)
    return root


def _commit(root: Path) -> None:
    subprocess.run(["git", "add", "--all"], cwd=root, check=True)
    subprocess.run(["git", "commit", "--quiet", "--message", "a run"], cwd=root, check=True)


def test_a_fresh_clone_has_metrics_to_compare_with_and_a_run_of_ones_own_is_no_fault(
    clone: Path, tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh"
    subprocess.run(["git", "clone", "--quiet", str(clone), str(fresh)], check=True)
    assert faults(fresh) == []
    with contextlib.chdir(fresh), Repo() as repo:
        assert repo.metrics.diff() == {}
        (fresh / PARAMS).write_text('{"em": 0.75}\n')
        repo.reproduce()
        (changed,) = repo.metrics.diff()["diff"].values()
        assert changed == {"em": {"old": 0.5, "new": 0.75, "diff": 0.25}}
    assert faults(fresh) == []  # The user's own run: dvc.lock, params.yaml and the metrics differ from the commit.


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        (PARAMS, '{"em": 0.9}\n', [PARAMS]),
        (PIPELINE, "stages:\n  plan:\n    cmd: x\n    deps: [params.yaml]\n    outs: [b]\n", ["stage plan"]),
        (".gitignore", "b\nreports\n", ["reports/metrics"]),
    ],
)
def test_a_commit_that_does_not_fit_together_is_found(
    clone: Path, tmp_path: Path, path: str, text: str, found: list[str]
) -> None:
    odd = tmp_path / "odd"
    subprocess.run(["git", "clone", "--quiet", str(clone), str(odd)], check=True)
    (odd / path).write_text(text)
    subprocess.run(["git", "rm", "-r", "--quiet", "--cached", "reports"], cwd=odd, check=True)
    if path != ".gitignore":
        subprocess.run(["git", "add", "reports"], cwd=odd, check=True)
    for words in (["user.name", "a"], ["user.email", "a@b"]):
        subprocess.run(["git", "config", *words], cwd=odd, check=True)
    _commit(odd)
    assert faults(odd) == found
