"""What surrounds a stage's body: messages, exit codes, signals, resume folder, progress lines."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.runner import ledger, progress, resume
from tests.pipeline import toy
from tests.pipeline.toy import CONF, DVC_YAML, HOUSE, PARAMS_YAML

SCRIPT = """\
import errno, os, subprocess, sys, time
from dataclasses import dataclass
from tasks.retrieval import RetrievalError
from tasks.runner import main, run

def body(ctx):
    if sys.argv[1] == "fine":
        print(ctx.scratch.name, os.environ["OMP_NUM_THREADS"], os.environ["DO_NOT_TRACK"], os.environ["HF_HUB_OFFLINE"])
    if sys.argv[1] == "import":
        import tasks.text
    if sys.argv[1] in ("write", "import"):
        os.makedirs("artifacts/train/a-0", exist_ok=True)
        with open("artifacts/train/a-0/out.txt", "w") as file:
            file.write(sys.argv[2])
    if sys.argv[1] == "commit":
        subprocess.run("git add -A && git commit -qm meanwhile", shell=True, check=True)
    if sys.argv[1] == "wrong":
        raise ValueError("conf/x.yaml: lr=3: expected less.")
    if sys.argv[1] == "outage":
        raise RetrievalError("elasticsearch: the search failed.")
    if sys.argv[1] == "missing":
        import bm26s
    if sys.argv[1] == "bug":
        raise KeyError("gone")
    if sys.argv[1] == "full":
        raise OSError(errno.ENOSPC, "No space left on device", "artifacts/x")
    if sys.argv[1] == "slow":
        try:
            print("started", flush=True)
            time.sleep(60)
        finally:
            print("left in good order", flush=True)

@dataclass(frozen=True)
class Settings:
    used: list[str]

@dataclass(frozen=True)
class OfItem(Settings):
    system: str
    seed: int

def loads(settings):
    if "broken" in settings.used:
        raise ValueError("playing: no such kind.")

if sys.argv[1] == "item":
    sys.argv[1:] = ["--system", "a", "--seed", "0"]
    main("train", lambda ctx: None, OfItem, "system", "seed")
run("train@a-0", body, Settings, clean=sys.argv[2:] == ["clean"])
"""
ENDING = """\
import atexit, sys, threading, time
from tasks.runner import process

code, word = int(sys.argv[1]), sys.argv[2]
atexit.register(print, "handler")

class Costly:
    def __del__(self):
        print("freed")

kept = Costly()
kept.itself = kept  # Only Python's own end frees it.
if word == "thread":
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
if word == "import":
    from tasks import pretrained
    print(*sorted({"torch", "sklearn", "scipy"} & sys.modules.keys()))
print("buffered", end=" ")
process.end(code)
sys.exit(code)
"""


PLAN = "artifacts/plan/train/a-0.json"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose inputs of `train` exist."""
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / "params.yaml").write_text(PARAMS_YAML)
    (tmp_path / "toy.py").write_text(SCRIPT)
    (tmp_path / "artifacts/data").mkdir(parents=True)
    (tmp_path / "artifacts/data/out.txt").write_text("data")
    for kind, names in CONF.items():
        (tmp_path / "conf" / kind).mkdir(parents=True)
        for name in names:
            (tmp_path / "conf" / kind / f"{name}.yaml").write_text("name: x\n")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/run.txt").write_text("numpy==2.0.0\n")
    toy.plan(tmp_path, "tasks.retrieval")
    return tmp_path


def _run(clone: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    env = {"PYTHONPATH": str(HOUSE), "BREADCRUMB_TRACKING": "off", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "toy.py", *words]
    return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=60)


def test_a_stage_that_ends_well(clone: Path) -> None:
    done = _run(clone, "fine")
    assert done.returncode == 0, done.stderr
    name, threads, quiet, offline = done.stdout.split()
    assert name == f"train@a-0-{resume.fingerprint(clone, 'train@a-0')}"
    assert (threads, quiet, offline) == ("1", "true", "1")
    assert (clone / ".scratch/work" / name).is_dir()
    assert (clone / ".scratch/ledger/train@a-0.json").is_file()
    assert _run(clone, "fine", "clean").returncode == 0
    assert not (clone / ".scratch/work" / name).exists()


@pytest.mark.parametrize(
    ("code", "word", "printed"),
    [
        (0, "none", ["buffered handler"]),
        (3, "none", ["buffered handler"]),
        (3, "thread", ["buffered thread", "handler", "freed"]),  # Its work is not cut off.
        (0, "import", ["torch", "buffered handler"]),  # No library that transformers alone would import.
    ],
)
def test_a_process_ends_at_once_after_its_handlers_and_threads(code: int, word: str, printed: list[str]) -> None:
    command = [sys.executable, "-c", ENDING, str(code), word]
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == printed


def test_an_entry_of_the_ledger_belongs_to_the_bytes_that_were_written(clone: Path) -> None:
    """Results of a first run that come back from a cache are not those of the second run of the same stage."""
    out, plan, first = clone / "artifacts/train/a-0/out.txt", clone / PLAN, (clone / PLAN).read_bytes()
    for text in ("one", "two"):
        assert _run(clone, "write", text).returncode == 0
        assert ledger.read(clone).keys() == {"train@a-0"}
    assert ledger.seconds(clone) == {"train@a-0": ledger.read(clone)["train@a-0"]["seconds"]}
    assert ledger.read(clone)["train@a-0"]["libraries"]["numpy"] == importlib.metadata.version("numpy")
    out.write_text("one")
    assert ledger.read(clone) == {}
    out.write_text("two")
    plan.write_bytes(first + b"\n")
    assert ledger.read(clone) == {}
    assert ledger.seconds(clone) == {}
    plan.write_bytes(first)
    assert ledger.read(clone).keys() == {"train@a-0"}
    out.unlink()
    assert ledger.read(clone) == {}


def test_a_ledger_is_optional_and_a_broken_file_is_no_entry(clone: Path) -> None:
    assert ledger.read(clone / "nothing") == {}
    assert _run(clone, "write", "one").returncode == 0
    for name, text in (("torn", '{"stage": "a'), ("other", "[]"), ("old", '{"stage": "data", "seconds": 4.0}')):
        (clone / f".scratch/ledger/{name}.json").write_text(text)
    assert ledger.read(clone).keys() == {"train@a-0"}


def test_the_commit_is_that_at_which_the_stage_started(clone: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, *words], cwd=clone, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    for key in ("name", "email"):
        git("config", f"user.{key}", "a")
    git("add", "-A")
    git("commit", "-qm", "first")
    before = git("rev-parse", "HEAD")
    (clone / "toy.py").write_text(SCRIPT + "# Changed.\n")
    assert _run(clone, "commit").returncode == 0
    assert git("rev-parse", "HEAD") != before
    assert json.loads((clone / ".scratch/ledger/train@a-0.json").read_text())["git_commit"] == before
    record = next((clone / ".scratch/tracking").glob("train@a-0-*.jsonl")).read_text()
    assert f'"git_commit": "{before}"' in record


@pytest.mark.parametrize(
    ("word", "line", "shows_traceback"),
    [
        ("wrong", "error: conf/x.yaml: lr=3: expected less.", False),
        ("outage", "error: elasticsearch: the search failed.", False),
        ("full", "error: no space left on the disk while writing artifacts/x. Free some and run again", False),
        ("missing", "error: train@a-0: Python finds no module 'bm26s' in ", False),
        ("bug", "error: train@a-0: unexpected KeyError: 'gone'", True),
    ],
)
def test_a_failure_is_one_line_and_a_log(clone: Path, word: str, line: str, shows_traceback: bool) -> None:
    done = _run(clone, word)
    assert done.returncode == 1
    assert any(shown.startswith(line) for shown in done.stderr.splitlines())
    assert ("Traceback" in done.stderr) is shows_traceback
    assert "Traceback" in (clone / ".scratch/logs/train@a-0.txt").read_text()
    assert not (clone / ".scratch/ledger/train@a-0.json").exists()


def test_sigterm_lets_the_body_leave_in_good_order(clone: Path) -> None:
    env = {"PYTHONPATH": str(HOUSE), "BREADCRUMB_TRACKING": "off", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "toy.py", "slow"]
    with subprocess.Popen(command, cwd=clone, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "left in good order\n"
        assert process.wait(10) == 143


def _change(clone: Path, path: str, old: str, new: str) -> None:
    text = (clone / path).read_text()
    assert old in text
    (clone / path).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("path", "old", "new", "line"),
    [
        (
            PLAN,
            '"tasks/store.py": "',
            '"tasks/store.py": "0',
            "a-0.json: tasks/store.py changed after the plan was made.",
        ),
        (
            PLAN,
            '"tasks/store.py"',
            '"tasks/stores.py"',
            "a-0.json: tasks/stores.py changed after the plan was made. Run",
        ),
        ("requirements/run.txt", "2.0.0", "2.0.1", "a-0.json: requirements changed after the plan was made. Run `make"),
        (PLAN, '"used"', '"use"', "artifacts/plan/train/a-0.json: settings: unknown key 'use'. Did you mean 'used'?"),
        (PLAN, '"libraries"', '"library"', "artifacts/plan/train/a-0.json: unknown key 'library'. Did you mean 'libra"),
    ],
)
def test_a_plan_that_is_not_that_of_this_code_is_refused(clone: Path, path: str, old: str, new: str, line: str) -> None:
    _change(clone, path, old, new)
    done = _run(clone, "fine")
    assert done.returncode == 1
    assert line in done.stderr
    assert not (clone / ".scratch/ledger/train@a-0.json").exists()


def test_a_stage_without_a_plan_is_refused(clone: Path) -> None:
    (clone / PLAN).unlink()
    assert (
        "error: artifacts/plan/train/a-0.json: the stage needs its plan and it is missing." in _run(clone, "x").stderr
    )


def test_a_stage_that_loads_more_than_its_plan_lists_is_refused(clone: Path) -> None:
    """A change of such a file would go unnoticed. What imports the runner itself is in every plan."""
    toy.plan(clone)
    done = _run(clone, "fine")
    assert done.returncode == 1
    assert "error: artifacts/plan/train/a-0.json: the stage loads tasks/parts.py, which is not" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (clone / ".scratch/ledger/train@a-0.json").exists()


def test_a_module_that_the_plan_does_not_list_leaves_no_result(clone: Path) -> None:
    (clone / "artifacts/train/a-0").mkdir(parents=True)
    (clone / "artifacts/train/a-0/out.txt").write_text("before")
    done = _run(clone, "import", "after")
    assert done.returncode == 1
    assert "error: artifacts/plan/train/a-0.json: the stage loads tasks/text.py, which is not among" in done.stderr
    assert "Traceback" not in done.stderr
    assert (clone / "artifacts/train/a-0/out.txt").read_text() == "before"


def test_a_plan_of_another_item_is_refused(clone: Path) -> None:
    for settings, found in (
        ('"seed": 0, "system": "b"', "system='b': expected a,"),
        ('"system": "a"', "seed=None: exp"),
    ):
        plan = json.loads((clone / PLAN).read_text())
        (clone / PLAN).write_text(json.dumps(plan | {"settings": json.loads(f'{{"used": [], {settings}}}')}))
        done = _run(clone, "item")
        assert done.returncode == 1
        assert f"error: artifacts/plan/train/a-0.json: settings: {found}" in done.stderr
    (clone / PLAN).write_text(json.dumps(plan | {"settings": {"used": [], "system": "a", "seed": 0}}))
    done = _run(clone, "item")
    assert done.returncode == 0, done.stderr


def test_a_part_of_a_plan_that_cannot_be_loaded_is_named(clone: Path) -> None:
    _change(clone, PLAN, '"used": [', '"used": [\n"broken",')
    done = _run(clone, "fine")
    assert done.returncode == 1
    assert "error: artifacts/plan/train/a-0.json: settings: playing: no such kind." in done.stderr


def test_the_resume_folder_follows_what_the_stage_depends_on(clone: Path) -> None:
    def planned() -> str:
        toy.plan(clone, "tasks.retrieval")
        return resume.fingerprint(clone, "train@a-0")

    first = planned()
    assert resume.fingerprint(clone, "train@b-0") != first
    _change(clone, "params.yaml", "top_k: 3", "top_k: 4")  # train does not read it
    assert planned() == first
    seen = {first}
    for path, old, new in [
        ("params.yaml", "scale: small", "scale: large"),
        ("artifacts/data/out.txt", "data", "other"),
        ("requirements/run.txt", "2.0.0", "2.0.1"),
    ]:
        _change(clone, path, old, new)
        seen.add(planned())
    assert len(seen) == 4


def test_a_stage_unknown_to_dvc_or_without_its_input_is_refused(clone: Path) -> None:
    with pytest.raises(ValueError, match="there is no stage 'tarin'"):
        resume.fingerprint(clone, "tarin@a-0")
    with pytest.raises(ValueError, match="has 1 matrix items, stage 'train' has 2"):
        resume.fingerprint(clone, "train@a")
    (clone / "artifacts/data/out.txt").unlink()
    (clone / "artifacts/data").rmdir()
    with pytest.raises(ValueError, match="artifacts/data: the stage needs this and it is missing"):
        resume.fingerprint(clone, "train@a-0")


def test_real_stages_have_fingerprints_that_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_hashes", lambda path: [str(path.relative_to(HOUSE))])
    names = [
        "data",
        "index",
        "base@0",
        "inputs@search_r1_grpo-0",
        "train@search_r1_grpo-0",
        "evaluate@base-0",
        "evaluate@search_r1_ppo-1",
        "report",
    ]
    assert len({resume.fingerprint(HOUSE, name) for name in names}) == len(names)


def test_progress_shows_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.05)

    def slow() -> object:
        for i in range(6):
            time.sleep(0.03)
            yield i

    assert list(progress.progress(slow(), 6, "rollouts")) == list(range(6))  # type: ignore[arg-type, call-overload]
    lines = list(filter(None, capfd.readouterr().err.splitlines()))
    assert 2 <= len(lines) <= 4
    assert lines[-1].startswith("rollouts: 6/6 (100%")


LATE = """
import os, sys, time
parent = os.getppid()
open("started", "w").close()
while os.getppid() == parent:
    time.sleep(0.02)
if os.getppid() != 1:  # Another process takes orphans in here, and by it they cannot be told.
    sys.exit()
from tasks.runner import process
process.begin()
open("worked", "w").close()
"""


def test_a_stage_whose_dvc_was_killed_while_it_loaded_its_libraries_does_not_work(tmp_path: Path) -> None:
    script = f"DVC_STAGE=train exec {sys.executable} -c '{LATE}' & while [ ! -e started ]; do sleep 0.02; done"
    env = {**os.environ, "PYTHONPATH": str(HOUSE)}
    subprocess.run(["/bin/sh", "-c", script], cwd=tmp_path, env=env, check=True, timeout=60)
    until = time.monotonic() + 20
    while any(process.info["cwd"] == str(tmp_path) for process in psutil.process_iter(["cwd"])):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert not (tmp_path / "worked").exists()
