"""The real pipeline at its smallest size: bare DVC and the flow agree to the byte, and only what changed runs again."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import planned, store
from tasks.records import systems
from tasks.retrieval import manifest as manifests
from tasks.runner import progress, record
from tasks.runner.context import Context
from tasks.stages import train
from tasks.store import DataError
from tasks.tool import policies
from tests.stages.clone import HOUSE, SMOKE, Clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ONCE = ("plan", "data", "validate", "index", "recall", "retrievers", "augment", "base", "report")
GROUPS = Counter({**dict.fromkeys(ONCE, 1), "inputs": 2, "train": 2, "evaluate": 2})
FLOW = ("flows.reproduce", "--no-prefect")


def _executed(clone: Clone) -> Counter[str]:
    """How often stages of each group ended since `_forget`; the runner writes a ledger entry at the end of each."""
    return Counter(path.stem.partition("@")[0] for path in (clone.root / ".scratch/ledger").glob("*.json"))


def _forget(clone: Clone) -> None:
    for path in (clone.root / ".scratch/ledger").glob("*.json"):
        path.unlink()


def _repository(root: Path) -> Clone:
    clone = Clone.make(root)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return clone


def _results(clone: Clone) -> dict[str, bytes]:
    return {name: content for name, content in clone.files("reports").items() if name != "reports/index.html"}


@pytest.fixture(scope="module")
def by_dvc(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """`dvc repro` in a fresh clone; its stages are forked, those of the flow that it is compared with are started."""
    clone = _repository(tmp_path_factory.mktemp("dvc") / "clone")
    done = clone.dvc("repro")
    assert done.returncode == 0, done.stdout + done.stderr
    return clone


@pytest.fixture(scope="module")
def by_flow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Clone, str]:
    """The flow in another fresh clone, settings written by it, tracking on; and what it printed at last.

    It is killed (SIGKILL, the whole process group) in every kind of long stage as soon as that has resume state.
    """
    flow = Clone.make(tmp_path_factory.mktemp("flow") / "clone", smoke=False)
    subprocess.run(["git", "init", "-q", str(flow.root)], check=True)
    settings = [f"{'evaluate.' if key in ('top_k', 'num_bootstrap') else ''}{key}={SMOKE[key]}" for key in SMOKE]
    words = [word for setting in settings for word in ("--set", setting)] + ["--keep"]
    for stage in ("base@0", "train@search_r1_ppo-0", "evaluate@search_r1_ppo-0"):
        killed = flow.start(*FLOW, *words, BREADCRUMB_TRACKING="on")
        until = time.monotonic() + 200
        while not any(path.is_file() for path in (flow.root / ".scratch/work").glob(f"{stage}-*/**/*")):
            assert killed.poll() is None, f"ended before {stage} was reached"
            assert time.monotonic() < until, stage
            time.sleep(0.02)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        assert not (flow.root / ".scratch/ledger" / f"{stage}.json").exists(), "the stage had ended"
        words = []  # They are in params.yaml now.
    done = _make(flow, "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return flow, done.stdout


def _make(clone: Clone, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`make words` as a user types it, with more variables."""
    command, plain = clone.make_words(*words)
    env = {**plain, **env}
    return subprocess.run(command, cwd=clone.root, env=env, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.long
def test_the_flow_killed_again_and_again_gives_the_bytes_of_bare_dvc(by_dvc: Clone, by_flow: tuple[Clone, str]) -> None:
    """Another folder, another order of stages, three kills."""
    flow, printed = by_flow
    assert _executed(by_dvc) == _executed(flow) == GROUPS
    assert _results(flow) == _results(by_dvc)
    ours, theirs = flow.files("artifacts"), by_dvc.files("artifacts")
    assert [name for name in theirs if ours.get(name) != theirs[name]] == []
    assert ours.keys() == theirs.keys()
    for text in ("base", "Search-R1-PPO"):
        assert text in printed


def test_speed_and_memory_of_training_stand_in_its_ledger_and_on_the_page_alone(by_dvc: Clone) -> None:
    row = json.loads((by_dvc.root / ".scratch/ledger/train@search_r1_ppo-0.json").read_text(encoding="utf-8"))
    summary = json.loads((by_dvc.root / "artifacts/train/search_r1_ppo-0/summary.json").read_text(encoding="utf-8"))
    work, limit = row["work"], row["limit"]
    assert (work["written"], work["prefilled"]) == (summary["generated_tokens"], summary["prefill_tokens"])
    assert 0 < work["flop"] / work["learn_s"] < limit["flop_per_s"]
    assert limit["device"] == "processor, 1 thread, float32"
    assert 50 < row["memory"]["stage_mb"] < 8000

    page = (by_dvc.root / "reports/index.html").read_text(encoding="utf-8")
    assert f'"limit":{limit["flop_per_s"]}' in page.replace(": ", ":")
    texts = [path for path in (by_dvc.root / "artifacts").rglob("*.json*") if path.is_file()]
    measured = re.compile(r"\b(tokens_per_s|flop_per_s|stage_mb|learn_s)\b")
    assert not [path for path in texts if measured.search(path.read_text(encoding="utf-8"))]


@pytest.mark.long
def test_mlflow_keeps_what_the_stages_read_played_and_made(by_flow: tuple[Clone, str]) -> None:
    from mlflow.tracking import MlflowClient

    clone, _ = by_flow
    assert clone.run("tasks.runner.upload").returncode == 0  # What the sender has not sent, if any.
    client = MlflowClient(f"sqlite:///{clone.root}/.scratch/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("breadcrumb")
    assert experiment is not None
    ended = client.search_runs([experiment.experiment_id], filter_string="attributes.status = 'FINISHED'")
    runs = {run.info.run_name: run for run in ended}
    ids = {run.info.run_id: name for name, run in runs.items()}
    parent = runs["report"].data.tags["mlflow.parentRunId"]
    assert Counter(name.partition("@")[0] for name in runs if name != ids[parent]) == GROUPS
    manifest = json.loads((clone.root / "artifacts/data/manifest.json").read_text(encoding="utf-8"))
    for name, run in runs.items():
        group = name.partition("@")[0]
        if group not in (ids[parent], "plan", "data", "report") and name != "train@base-0":
            assert [read.dataset.name for read in run.inputs.dataset_inputs] == ["smoke"], name
            assert run.data.tags["data_sha256"] == run.data.tags["data.smoke"] == manifest["data_sha256"], name
        if name != ids[parent]:
            assert {"git_commit", "config_digest"} <= run.data.tags.keys(), name

    def files(run_id: str, folder: str | None = None) -> set[str]:
        return {file.path for file in client.list_artifacts(run_id, folder)}

    trained, played, report = (
        runs[name].info.run_id for name in ("train@search_r1_ppo-0", "evaluate@base-0", "report")
    )
    assert "search_r1_ppo-0/policy/model.safetensors" in files(trained, "search_r1_ppo-0/policy")
    assert "base-0/scores.jsonl" in files(played, "base-0")
    assert {"results.md", "reports"} <= files(report)
    assert files(parent) == {"results.md"}
    pipeline = runs[ids[parent]].data
    assert pipeline.tags["data_sha256"] == manifest["data_sha256"]
    assert pipeline.params["params.scale"] == "smoke"
    assert pipeline.metrics["search_r1_ppo/em"] - pipeline.metrics["base/em"] == pytest.approx(
        pipeline.metrics["search_r1_ppo/em_minus_base"], abs=1e-9
    )
    traces = client.search_traces(locations=[experiment.experiment_id], max_results=500)
    shown = [trace.info.trace_metadata["mlflow.sourceRun"] for trace in traces]  # A killed run may have shown some.
    sources = Counter(ids[run].partition("@")[0] for run in shown if run in ids)
    assert sources["train"] > 0
    assert sources["evaluate"] == 2 * 8


def test_no_output_names_the_place_where_it_was_made(by_dvc: Clone) -> None:
    place = str(by_dvc.root).encode()
    assert [name for name, content in by_dvc.files("artifacts").items() if place in content] == []
    assert not any(place in content for content in _results(by_dvc).values())


def test_a_policy_knows_the_index_that_it_was_taught_with(by_dvc: Clone, tmp_path: Path) -> None:
    """The start policy and the trained one, as the stages describe them."""
    index = by_dvc.root / "artifacts/index"
    known = store.sha256(index / manifests.NAME), manifests.read(index).corpus_sha256
    manifests.write(tmp_path, "bm25", {}, "0" * 64, manifests.Built(1))
    for name in ("base-0", "search_r1_ppo-0"):
        described = systems.read(by_dvc.root / "artifacts/train" / name)
        assert (described.index_sha256, described.corpus_sha256) == known
        policy = policies.find(name, by_dvc.root)
        policy.require_index(index)
        with pytest.raises(DataError, match=rf"policy {name} was trained\. .*`make smoke`, has replaced its index"):
            policy.require_index(tmp_path)


class EndedError(Exception):
    """Where a stage is ended."""


def test_training_says_how_far_it_is_within_both_budgets(
    by_dvc: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the stage hands to its trainer, which is not needed for that."""

    def trainer(log: Callable[[int, dict[str, float]], None], **_: Any) -> None:
        log(0, {"validation_em": 0.25})
        log(1, {"reward_mean": 0.71, "kl": 0.02, progress.TOKENS: 2_000.0})
        raise EndedError

    name = "train@search_r1_ppo-0"
    settings = planned.settings_of(planned.read(by_dvc.root, name), train.Settings, name)
    assert settings.learning is not None
    budgets = replace(settings.learning.train, num_steps=9, max_generated_tokens=8_000)
    settings = replace(settings, learning=replace(settings.learning, train=budgets))
    monkeypatch.delenv("BREADCRUMB_RUN", raising=False)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("tasks.train.loop.Trainer", trainer)
    with pytest.raises(EndedError):
        train.body(Context(name, by_dvc.root, settings, "smoke", record.Track(name, tmp_path)))
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("step 1/9  reward 0.71  val EM 0.25  kl 0.02  2.0k/8.0k tokens  ")


def test_only_what_a_change_reaches_runs_again(by_dvc: Clone, tmp_path: Path) -> None:
    """In order: nothing changed; another top-k, beside folders that another run has left; and back."""
    clone = by_dvc.copy(tmp_path / "clone")
    before = _results(clone)

    def repro() -> Counter[str]:
        _forget(clone)
        done = clone.dvc("repro")
        assert done.returncode == 0, done.stdout + done.stderr
        return _executed(clone)

    def page() -> str:
        return (clone.root / "reports/index.html").read_text(encoding="utf-8")

    assert repro() == Counter()
    for kind, name in (("evaluate", "search_r1_ppo"), ("train", "search_r1_ppo")):
        left = clone.root / "artifacts" / kind / f"{name}-9"
        (clone.root / "artifacts" / kind / f"{name}-0").rename(left)  # As seed 9 would have left it,
        Clone(left).copy(clone.root / "artifacts" / kind / f"{name}-0")  # and everything of this run is there.
    clone.set("top_k", "2")
    assert repro() == Counter({"plan": 1, "evaluate": 2, "report": 1})
    summary = json.loads((clone.root / "artifacts/evaluate/base-0/summary.json").read_text(encoding="utf-8"))
    assert summary["settings"]["evaluate"]["top_k"] == 2
    assert '"top_k":2' in page()
    assert "search_r1_ppo-9" not in page()
    clone.set("top_k", "3")
    assert repro() == Counter({"report": 1})  # DVC still has the evaluations; the page is made for them again.
    assert _results(clone) == before
    assert '"top_k":2' not in page()
    assert "search_r1_ppo-9" not in page()


def test_a_plain_make_smoke_leaves_a_task_run_for_each_stage(by_dvc: Clone, tmp_path: Path) -> None:
    """No server is there; stages of which nothing has changed count, too. What MLflow has is tested above."""
    clone = by_dvc.copy(tmp_path / "clone")
    for key, value in {"scale": "laptop", "data": "world", "num_bootstrap": "200"}.items():
        clone.set(key, value)
    before = (clone.root / "params.yaml").read_bytes()
    done = _make(clone, "smoke", BREADCRUMB_TRACKING="off")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (clone.root / "params.yaml").read_bytes() == before

    stages = yaml.safe_load((clone.root / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    with contextlib.closing(sqlite3.connect(clone.root / ".scratch/prefect/prefect.db")) as database:
        states = database.execute("SELECT name, state_name FROM task_run").fetchall()
    assert sorted(name for name, _ in states) == sorted(stages)
    assert Counter(state for _, state in states) == {"Cached": len(stages) - 2, "Completed": 2}


@pytest.fixture(scope="module")
def committed(by_dvc: Clone, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A copy of the finished clone with one more system, and with code, settings and `dvc.lock` committed.

    The system answers with the second name in the last passage, which is right for some questions with 1 passage a
    search and for none with 3. What is trained in seconds answers nothing.
    """
    clone = by_dvc.copy(tmp_path_factory.mktemp("committed") / "clone")
    shutil.copyfile(HOUSE / "tests/systems/first_title.py", clone.root / "tasks/systems/second_name.py")
    clone.change("tasks/systems/second_name.py", "hits[0].title", r're.findall(r"[A-Z]\w+ [A-Z]\w+", hits[-1].text)[1]')
    clone.change("tasks/systems/second_name.py", "import contextlib\n", "import contextlib\nimport re\n")
    (clone.root / "conf/system/second_name.yaml").write_text("kind: second_name\n", encoding="utf-8")
    clone.set("systems", "[base, search_r1_ppo, second_name]")
    _dvc(clone, "repro")
    _git(clone, "config", "user.name", "A reader")
    _git(clone, "config", "user.email", "reader@example.org")
    _git(clone, "add", "--all")
    _git(clone, "commit", "--quiet", "--message", "the table")
    return clone


def _git(clone: Clone, *words: str) -> None:
    subprocess.run(["git", *words], cwd=clone.root, check=True)


def _dvc(clone: Clone, command: str) -> str:
    """What the command prints; it must end well."""
    done = clone.dvc(*shlex.split(command))
    assert done.returncode == 0, f"dvc {command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.long
def test_dvc_compares_two_settings_by_their_results(committed: Clone, tmp_path: Path) -> None:
    """Each command as the documents have it."""
    clone = committed.copy(tmp_path / "clone")
    names, params = ("base", "search_r1_ppo", "second_name"), "params.yaml"
    files = {f"reports/metrics/{name}.json" for name in names}
    metrics = "reports/metrics/second_name.json"
    shown = json.loads(_dvc(clone, "metrics show --json"))[""]["data"]
    assert shown.keys() == files, "a line for each system"
    for file in files:
        row = json.loads((clone.root / file).read_text(encoding="utf-8"))
        columns = {name: row[name] for name in ("answer_in_passage", "em", "f1", "searches")}
        assert shown[file]["data"] == columns, "no columns but these"

    _dvc(clone, "exp run -S evaluate.num_bootstrap=300 -n boot300")
    _dvc(clone, "exp run -S evaluate.top_k=1 -n one-passage")
    old, new = shown[metrics]["data"]["em"], 0.125
    for command in ("metrics diff --json", "exp diff HEAD one-passage --json"):
        found = json.loads(_dvc(clone, command))
        found = found.get("metrics", found)[metrics]["em"]
        assert found == {"old": old, "new": new, "diff": new - old}, command
    (printed,) = [
        line.split() for line in _dvc(clone, "metrics diff").splitlines() if metrics in line and " em " in line
    ]
    assert list(map(float, printed[-3:])) == [old, new, new - old]
    changed = json.loads(_dvc(clone, "params diff --json"))[params]
    assert changed["evaluate.top_k"] == {"old": 3, "new": 1, "diff": -2}

    rows = list(csv.DictReader(_make(clone, "experiments", "ARGS=--csv").stdout.splitlines()))
    assert 5 <= len(rows[0]) <= 14, list(rows[0])
    found = {row["Experiment"]: (row[f"{metrics}:em"], row["evaluate.num_bootstrap"]) for row in rows}
    assert (found["boot300"], found["one-passage"]) == ((f"{old}", "300"), (f"{new}", "300"))

    for command in ("plots show", "plots diff HEAD"):
        page = Path(_dvc(clone, f"{command} --out {tmp_path / 'plots'}").strip().removeprefix("file://"))
        text = page.read_text(encoding="utf-8")
        for value in ("learning_curves", "search_r1_ppo", "exact match in validation"):
            assert value in text, (command, value)


def _shows_a_baseline(clone: Clone, plots: Path) -> None:
    """In a fresh clone DVC compares with what was committed, before anything is pulled."""
    path = "reports/metrics/second_name.json"
    file = clone.root / path
    committed = file.read_bytes()
    head = json.loads(committed)["em"]
    file.write_text(json.dumps(json.loads(committed) | {"em": 0.75}), encoding="utf-8")
    done = clone.dvc("metrics", "diff", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {path: {"em": {"old": head, "new": 0.75, "diff": 0.75 - head}}}
    file.write_bytes(committed)

    rows = {row["rev"]: row["data"] for row in json.loads(_dvc(clone, "exp show --json"))}
    assert len(rows) == 2
    assert {row["metrics"][path]["data"]["em"] for row in rows.values()} == {head}
    page = Path(_dvc(clone, f"plots diff HEAD --out {plots}").strip().removeprefix("file://"))
    assert "search_r1_ppo" in page.read_text(encoding="utf-8")


def test_a_colleague_pulls_the_table_with_every_hash_equal(committed: Clone, tmp_path: Path) -> None:
    clone = committed.copy(tmp_path / "clone")
    _dvc(clone, f"remote add --default store {tmp_path / 'place'}")
    _dvc(clone, "push")
    _git(clone, "commit", "--quiet", "--all", "--message", "where the results are")
    _git(clone, "clone", "--quiet", str(clone.root), str(tmp_path / "other"))
    other = Clone(tmp_path / "other")
    assert other.files("artifacts") == {}
    kept = {name for name in other.files("reports") if not name.startswith("reports/metrics/")}
    assert kept == {"reports/curves.csv"}, "git keeps metrics and curves, DVC the rest"
    _shows_a_baseline(other, tmp_path / "plots")
    note = Path("requirements/.installed")  # The same environment, of which `make` takes a note.
    if (HOUSE / note).is_file():
        shutil.copyfile(HOUSE / note, other.root / note)
    _dvc(other, "pull")

    stages = yaml.safe_load((other.root / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    noted = {out["path"]: out["md5"] for out in stages["report"]["outs"] if out["path"] != "reports/metrics"}
    table = _results(other)
    single = {name: content for name, content in table.items() if not name.startswith("reports/metrics/")}
    assert noted == {name: hashlib.md5(content).hexdigest() for name, content in single.items()}
    assert table == _results(clone)
    assert other.files("artifacts") == clone.files("artifacts")
    assert "up to date" in _dvc(other, "status")
    assert _dvc(other, "metrics show") == _dvc(clone, "metrics show")
