"""What a pipeline run executes, what it leaves, and what it says, on a real DVC repository."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from flows import dag
from flows.child import Outcome, Stopper, execute
from flows.pipeline import Run
from tasks import planned, store
from tasks.params import lent
from tasks.runner import record, runs
from tests.pipeline.conftest import First
from tests.pipeline.toy import NAMES, PARAMS_YAML, Toy, kill_group
from tests.test_program import PIPE_CLOSED

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_first_run_executes_all_and_the_second_none(first: First, finished: Toy) -> None:
    assert first.counts == NAMES
    assert "hello from train@a-0" in first.printed
    assert "evaluate@a-0 3 conf" in [line.strip() for line in first.printed.splitlines()]
    assert not any(str(ROOT) in line for line in first.printed.splitlines())
    (kept,) = runs.names(finished.root)
    assert f"Kept:    runs/{kept} (this report with its settings" in first.printed
    second = finished.flow("--no-prefect")
    assert second.returncode == 0
    assert runs.names(finished.root) == [kept]
    assert finished.counts() == []
    assert "0 of 7 stages executed, 7 cached" in second.stdout
    assert finished.bytes() == first.bytes
    # DVC's advice to its own users, and the command of a stage, would hide what the stages say.
    advice = ("git add", "dvc push", "auto staging", "exec python")
    assert [words for words in advice if words in first.printed] == []


def test_a_setting_re_executes_what_depends_on_it_and_one_for_this_run_only_is_put_back(finished: Toy) -> None:
    before = finished.bytes()
    done = finished.flow("--no-prefect", "--keep", "--set", "evaluate.top_k=5")
    assert done.returncode == 0, done.stderr
    assert finished.counts() == ["plan", "evaluate@a-0", "evaluate@b-0", "report"]
    assert "4 of 7 stages executed, 3 cached" in done.stdout
    assert "params.yaml: evaluate.top_k: 3 -> 5" in done.stdout
    latest = finished.root / "runs/latest"
    assert "evaluate@a-0 5 conf" in (latest / "results.md").read_text()
    assert (latest / "params.yaml").read_text() == (finished.root / "params.yaml").read_text()
    text = (finished.root / "params.yaml").read_text()
    assert "top_k: 5           # passages" in text
    assert "# Toy settings." in text
    assert "systems: [a, b]      # two systems" in text
    written = (finished.root / "params.yaml").read_bytes()
    finished.forget()
    done = finished.flow("--no-prefect", "--set", "evaluate.top_k=3")
    assert "0 of 7 stages executed" in done.stdout, done.stderr  # What was replaced comes back from the cache.
    assert (finished.counts(), finished.bytes()) == ([], before)
    assert "evaluate@a-0 3 conf" in (latest / "results.md").read_text(), "the first run's copy is the latest again"
    assert len(runs.names(finished.root)) == 2
    assert (finished.root / "params.yaml").read_bytes() == written


def test_settings_that_the_plan_refuses_are_not_kept(finished: Toy) -> None:
    before, kept = (finished.root / "params.yaml").read_bytes(), runs.names(finished.root)
    finished.flag("fail-plan")
    done = finished.flow("--no-prefect", "--keep", "--force", "plan", "--set", "evaluate.top_k=7")
    assert done.returncode == 1
    assert "params.yaml is as it was: settings are kept once the plan has accepted them." in done.stderr
    assert "Changed:" not in done.stdout + done.stderr
    assert (finished.root / "params.yaml").read_bytes() == before
    assert runs.names(finished.root) == kept
    finished.flag("fail-plan", on=False)
    finished.flag("fail-report")
    done = finished.flow("--no-prefect", "--keep", "--force", "report", "--set", "evaluate.top_k=7")
    assert done.returncode == 1
    assert b"top_k: 7 " in (finished.root / "params.yaml").read_bytes(), "another failure is no fault of theirs"


def test_a_run_that_fails_leaves_nothing_to_the_next(finished: Toy) -> None:
    """Neither its settings nor a report; the plan was made and a stage evaluated with them."""
    before, made = (finished.root / "params.yaml").read_bytes(), finished.bytes()
    kept = runs.names(finished.root)
    finished.flag("fail-train@a-0")
    done = finished.flow("--no-prefect", "--set", "evaluate.top_k=7", "--force", "train@a-0")
    assert done.returncode == 1
    assert "error: train@a-0: toy.yaml: train@a-0 was told to fail." in done.stderr
    assert finished.counts() == ["plan", "train@a-0", "evaluate@b-0"]
    assert "Changed:" not in done.stdout + done.stderr
    assert (finished.root / "params.yaml").read_bytes() == before
    assert runs.names(finished.root) == kept
    finished.flag("fail-train@a-0", on=False)
    assert finished.flow("--no-prefect").returncode == 0
    assert (finished.bytes(), runs.names(finished.root)) == (made, kept)


def test_a_comparison_runs_its_methods_and_seeds_and_leaves_dvc_nothing_to_do(finished: Toy) -> None:
    (finished.root / "conf" / "compare").mkdir()
    (finished.root / "conf" / "compare" / "main.yaml").write_text("methods: [c]\nseeds: [0, 1]\n")
    done = finished.flow("--no-prefect", "--keep", "--compare", "main", "--set", "seeds=[0]")  # What is set is set.
    assert done.returncode == 0, done.stderr
    assert "systems: [a, b] -> [a, c]" in done.stdout
    names = (finished.root / ".scratch/count.txt").read_text().split()
    assert sorted(names) == ["evaluate@c-0", "plan", "report", "train@c-0"]
    before = finished.bytes()
    assert finished.command("dvc", "repro", "report").returncode == 0
    assert (finished.root / ".scratch/count.txt").read_text().split() == names
    assert finished.bytes() == before


def test_bare_dvc_repro_gives_the_same_bytes_and_leaves_the_flow_nothing_to_do(toy: Toy, first: First) -> None:
    done = toy.command("dvc", "repro")
    assert done.returncode == 0, done.stderr
    assert toy.counts() == NAMES
    assert toy.bytes() == first.bytes
    toy.forget()
    assert "0 of 7 stages executed" in toy.flow("--no-prefect").stdout
    assert toy.counts() == []


def test_force_repeats_a_group_and_gives_the_same_bytes(finished: Toy) -> None:
    before = finished.bytes()
    assert finished.flow("--no-prefect", "--force", "evaluate").returncode == 0
    assert finished.counts() == ["evaluate@a-0", "evaluate@b-0"]
    assert finished.bytes() == before


def test_hosts_are_asked_again_before_anything_else_is_made(finished: Toy) -> None:
    (finished.root / "conf/cluster").mkdir()
    (finished.root / "conf/cluster/local.yaml").write_text("hosts: [{}]\n")
    assert finished.flow("--no-prefect").returncode == 0
    for words, counts in ((["--force", "report"], ["plan", "report"]), ([], [])):
        finished.forget()
        done = finished.flow("--no-prefect", *words, BREADCRUMB_CLUSTER="local")
        assert done.returncode == 0, done.stderr
        assert finished.counts() == counts


def test_a_second_run_or_one_beside_bare_dvc_is_refused(finished: Toy) -> None:
    finished.flag("slow-report")
    first = finished.start("--no-prefect", "--force", "report")
    try:
        finished.wait_for("report")
        second = finished.flow("--no-prefect", "--set", "evaluate.top_k=9")
        assert second.returncode == 1
        assert f"another pipeline run (process {first.pid}) is at work in this clone" in second.stderr
        assert "top_k: 3 " in (finished.root / "params.yaml").read_text()
        finished.flag("slow-report", on=False)
        assert first.wait(60) == 0
    finally:
        if first.poll() is None:
            kill_group(first)
    finished.flag("slow-report")
    finished.forget()
    bare = finished.command_in_background("dvc", "repro", "--force", "--single-item", "report")
    try:
        finished.wait_for("report")
        second = finished.flow("--no-prefect")
        assert second.returncode == 1
        assert f"another DVC command (process {bare.pid}) is at work in this clone" in second.stderr
    finally:
        kill_group(bare)


def test_dvc_started_between_two_stages_of_a_run_is_refused_and_the_run_waits_for_it(finished: Toy) -> None:
    before = finished.bytes()
    finished.flag("slow-train@a-0")
    run = finished.start("--no-prefect", "--max-parallel", "1", "--force", "train", "--force", "report")
    try:
        finished.wait_for("train@a-0")
        bare = finished.command("dvc", "repro", "--force", "--single-item", "report")
        assert bare.returncode != 0
        assert f"error: another pipeline run (process {run.pid}) is at work in this clone" in bare.stderr
        rwlock = json.loads((finished.root / ".dvc/tmp/rwlock").read_text())
        with subprocess.Popen(["sleep", "60"]) as blocker:
            rwlock["write"][str(finished.root / "reports")] = {"pid": blocker.pid, "cmd": "dvc repro report"}
            (finished.root / ".dvc/tmp/rwlock").write_text(json.dumps(rwlock))
            finished.flag("slow-train@a-0", on=False)
            assert run.stdout is not None
            for line in run.stdout:
                if "A second DVC command is at work" in line:
                    blocker.kill()
        assert run.wait(60) == 0
        assert finished.counts() == ["train@a-0", "train@b-0", "report"]
        assert finished.bytes() == before
    finally:
        if run.poll() is None:
            kill_group(run)


def test_what_dvc_removes_before_it_is_refused_comes_back_for_the_stage_that_reads_it(finished: Toy) -> None:
    before = finished.bytes()
    finished.flag("slow-train@a-0")
    run = finished.start("--no-prefect", "--max-parallel", "1", "--force", "train@a-0")
    try:
        finished.wait_for("train@a-0")
        bare = finished.command("dvc", "repro", "--force", "--single-item", "evaluate@b-0")
        assert f"another pipeline run (process {run.pid}) is at work in this clone" in bare.stderr
        assert not (finished.root / "artifacts/evaluate/b-0").exists()
        finished.flag("slow-train@a-0", on=False)
        printed, _ = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            kill_group(run)
    assert run.returncode == 0, printed
    told = "report | artifacts/evaluate/b-0 was removed while this run was at work. It is back, from DVC's cache."
    assert told in printed
    assert finished.bytes() == before


@pytest.mark.parametrize("gone", [["artifacts/train/a-0", "artifacts/train/b-0"], ["artifacts/plan"]])
def test_outputs_come_back_as_they_were_and_what_has_no_copy_does_not(finished: Toy, gone: list[str]) -> None:
    before = finished.bytes()
    for one in gone:
        shutil.rmtree(finished.root / one)
    assert dag.bring_back(finished.root, gone) == gone
    assert finished.bytes() == before
    shutil.rmtree(finished.root / gone[0])
    shutil.rmtree(finished.root / ".dvc/cache")
    assert dag.bring_back(finished.root, gone) == gone[1:]


def test_kills_and_a_failure_stop_what_depends_on_them_and_the_next_run_resumes(toy: Toy, first: First) -> None:
    """Killed in its first stages, failed, killed in a later stage; the last run gives what an undisturbed one gives."""

    def kill_in(name: str) -> list[str]:
        toy.flag(f"slow-{name}")
        toy.forget()
        run = toy.start("--no-prefect")
        toy.wait_for(name, 90)
        kill_group(run)
        toy.flag(f"slow-{name}", on=False)
        return toy.counts()

    assert kill_in("data") == ["plan", "data"]
    toy.flag("fail-train@a-0")
    toy.forget()
    broken = toy.flow("--no-prefect")
    assert broken.returncode == 1
    assert "error: train@a-0: toy.yaml: train@a-0 was told to fail. Remove the flag." in broken.stderr
    assert toy.counts() == ["data", "train@a-0", "train@b-0", "evaluate@b-0"]
    assert not (toy.root / "reports").exists()
    toy.flag("fail-train@a-0", on=False)
    toy.flag("killed-train@a-0")
    killed = toy.flow("--no-prefect")
    assert "error: train@a-0: the system killed it (signal 9), as it does where memory runs out." in killed.stderr
    toy.flag("killed-train@a-0", on=False)
    assert kill_in("evaluate@a-0") == ["train@a-0", "evaluate@a-0"]
    toy.forget()
    again = toy.flow("--no-prefect")
    assert again.returncode == 0, again.stdout + again.stderr
    assert toy.counts() == ["evaluate@a-0", "report"]
    assert toy.bytes() == first.bytes


def test_the_stages_of_a_flow_end_with_it_killed_or_terminated(finished: Toy) -> None:
    finished.flag("slow-report")
    killed = finished.start("--no-prefect", "--force", "report", SHELL="/bin/sh")  # may stay below DVC, others do not
    finished.wait_for("report")
    killed.kill()  # The flow alone, not its group.
    killed.wait()
    until = time.monotonic() + 10
    while finished.processes() and time.monotonic() < until:
        time.sleep(0.1)
    assert finished.processes() == []
    finished.forget()
    ended = finished.start("--no-prefect", "--force", "report")
    finished.wait_for("report")
    ended.terminate()
    assert ended.wait(10) != 0
    assert not finished.processes()
    finished.flag("slow-report", on=False)
    assert finished.flow("--no-prefect").returncode == 0


@pytest.mark.parametrize(
    ("setting", "reader"),
    [("evaluate.top_k=3", "head -1"), ("evaluate.num_bootstrap=700", "head -1"), ("evaluate.top_k=3", "head -c 0")],
)
def test_a_reader_that_goes_ends_a_run_quietly(finished: Toy, setting: str, reader: str) -> None:
    """Where nothing has to run, and where `params.yaml` holds settings of the run when the reader goes."""
    before = (finished.root / "params.yaml").read_bytes()
    script = f'set -o pipefail; "$0" -m flows.reproduce --no-prefect --set {setting} | {reader}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], cwd=finished.root, env=finished.env(), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    first = "reading settings and stages ...\n" if reader == "head -1" else ""
    assert (done.returncode, done.stdout, done.stderr) == (PIPE_CLOSED, first, "")
    assert ((finished.root / "params.yaml").read_bytes(), finished.counts()) == (before, [])
    assert not (finished.root / lent.KEPT).exists()


def test_torn_files_of_a_killed_dvc_are_mended(finished: Toy) -> None:
    before = finished.bytes()
    lent.lend(finished.root, PARAMS_YAML.replace("top_k: 3", "top_k: 9").encode())
    lock = finished.root / "dvc.lock"
    lock.write_bytes(lock.read_bytes()[:-37] + b"\n  - : {")
    (finished.root / ".dvc/tmp/rwlock").write_text('{"write": {"x"')
    (finished.root / "artifacts/train/.a-0.k3j2h1").mkdir()
    partial = finished.root / "artifacts/.data.6sx2qerx.partial"  # A folder that held an unfinished file.
    partial.mkdir()
    (partial / ".rows.jsonl.v8xbezwl").touch()
    done = finished.flow("--no-prefect")
    assert done.returncode == 0, done.stdout + done.stderr
    assert finished.counts() == []
    assert finished.bytes() == before
    assert not (finished.root / "artifacts/train/.a-0.k3j2h1").exists()
    assert not partial.exists()
    assert f"after an earlier kill: {lent.PUT_BACK}\n" in done.stdout
    assert (finished.root / "params.yaml").read_text() == PARAMS_YAML


def test_an_edit_made_after_a_kill_stays_and_the_next_run_says_so(finished: Toy) -> None:
    """Although it goes no further, because it names hosts that are in no file."""
    lent.lend(finished.root, PARAMS_YAML.replace("top_k: 3", "top_k: 9").encode())
    edited = PARAMS_YAML.replace("seeds: [0]", "seeds: [7, 8, 9]")
    (finished.root / "params.yaml").write_text(edited)
    done = finished.flow("--no-prefect", BREADCRUMB_CLUSTER="nowhere")
    assert (done.returncode, "error: CLUSTER=nowhere" in done.stderr) == (1, True), done.stderr
    assert "after an earlier kill: params.yaml was edited since and stays so; params.old-" in done.stdout
    assert (finished.root / "params.yaml").read_text() == edited
    (old,) = finished.root.glob("params.old-*.yaml")
    assert old.read_text() == PARAMS_YAML


def test_busy_paths_of_a_process_id_used_again_are_mended(finished: Toy) -> None:
    rwlock = {"write": {str(finished.root / "reports"): {"pid": 1, "cmd": "dvc repro report"}}, "read": {}}
    (finished.root / ".dvc/tmp/rwlock").write_text(json.dumps(rwlock))
    done = finished.flow("--no-prefect", "--force", "report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert finished.counts() == ["report"]


def test_ledger_tells_what_a_stage_cost_and_git_sees_only_sources(finished: Toy) -> None:
    row = json.loads((finished.root / ".scratch/ledger/train@a-0.json").read_text())
    assert row["stage"] == "train@a-0"
    assert row["seconds"] >= 0
    assert row["peak_rss_mb"] > 5
    assert row["git_dirty"] is True
    assert row["record"].startswith("train@a-0-")
    shown = subprocess.run(
        ["git", "-C", str(finished.root), "status", "--porcelain"], capture_output=True, text=True, check=True
    ).stdout
    assert not any(part in shown for part in ("artifacts", "reports", ".scratch"))


def test_ctrl_c_is_no_success(finished: Toy) -> None:
    """What is left of the last run's table must not pass for this one's; its record says that it was stopped."""
    finished.flag("slow-report")
    before, records = (finished.root / "params.yaml").read_bytes(), _records(finished)
    flow = finished.start("--no-prefect", "--force", "report", "--set", "evaluate.num_bootstrap=700")
    finished.wait_for("report", 90)
    os.killpg(flow.pid, signal.SIGINT)
    output, _ = flow.communicate(timeout=90)
    assert flow.returncode == 130, output
    assert "stopped. Run again to go on where it stopped." in output
    assert "report | stopped in" in output
    assert "Done:" not in output
    assert (finished.root / "params.yaml").read_bytes() == before
    (written,) = _records(finished) - records
    ended = json.loads(written.read_text().splitlines()[-1])
    assert (ended["kind"], ended["status"]) == ("end", "KILLED")
    finished.flag("slow-report", on=False)
    assert finished.flow("--no-prefect").returncode == 0


def _records(toy: Toy) -> set[Path]:
    """The records of whole runs, which tracking would send."""
    return set((toy.root / record.FOLDER).glob(f"{record.PIPELINE_NAME}-*.jsonl"))


def test_ctrl_c_is_ignored_where_it_was_ignored_before(finished: Toy) -> None:
    """As in a script's background: the terminal's Ctrl-C is meant for another program."""
    finished.flag("slow-report")
    words = [sys.executable, "-m", "flows.reproduce", "--no-prefect", "--force", "report"]
    flow = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' INT; exec \"$0\" \"$@\"", *words], cwd=finished.root, env=finished.env(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    finished.wait_for("report", 90)
    flow.send_signal(signal.SIGINT)
    finished.flag("slow-report", on=False)
    output, _ = flow.communicate(timeout=90)
    assert flow.returncode == 0, output


def test_ctrl_c_while_libraries_are_loading(finished: Toy, tmp_path: Path) -> None:
    (tmp_path / "pydantic").mkdir()
    (tmp_path / "pydantic/__init__.py").write_text("import time; open('.scratch/loading', 'w'); time.sleep(60)")
    flow = finished.start("--no-prefect", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    until = time.monotonic() + 60
    while not (finished.root / ".scratch/loading").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(flow.pid, signal.SIGINT)
    output, _ = flow.communicate(timeout=60)
    assert flow.returncode == 130, output
    assert output == "stopped. Run again to go on where it stopped.\n"


def test_stages_side_by_side_take_no_more_threads_than_there_are_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        "one": {"num_threads": 1},
        "two": {"num_threads": 1},
        "three": {"num_threads": 2},
        "four": {"kind": "vllm"},
    }
    names = list(parts)
    for name, part in parts.items():
        store.write_json(tmp_path / planned.path_of(name), {"settings": {"train": part}})
    monkeypatch.setattr(planned, "PROCESSORS", 2)
    together: list[set[str]] = []
    at_work: set[str] = set()

    def work(name: str) -> None:
        at_work.add(name)
        together.append(set(at_work))
        time.sleep(0.3)
        at_work.discard(name)
        run.outcomes[name] = Outcome(name, "executed")

    graph = dag.Dag(dict.fromkeys(names, frozenset()), frozenset(names))
    run = Run(tmp_path, "key", "title", graph, max_parallel=4)
    with ThreadPoolExecutor(4) as pool:
        run._run_each(list(names), lambda name: pool.submit(work, name))
    assert {frozenset(one) for one in together} >= {
        frozenset({"three"}),
        frozenset({"four"}),
        frozenset({"one", "two"}),
    }
    assert all(one == {"one", "two"} or len(one) == 1 for one in together)


def test_a_stopped_stage_was_not_executed(finished: Toy) -> None:
    finished.flag("slow-report")
    stopper = Stopper()
    with ThreadPoolExecutor(1) as pool:
        words = ["dvc", "repro", "--single-item", "--force", "report"]
        running = pool.submit(execute, "report", words, finished.root, lambda line: None, stopper)
        finished.wait_for("report", 90)
        stopper.stop(signal.SIGTERM)
        outcome = running.result(60)
    assert (outcome.result, outcome.message) == ("stopped", "")


def test_a_stop_before_the_first_stage_starts_none(tmp_path: Path) -> None:
    graph = dag.Dag({"plan": frozenset(), "report": frozenset({"plan"})}, frozenset({"plan", "report"}))
    run = Run(tmp_path, "key", "title", graph)
    run.stopper.stop(signal.SIGTERM)
    run.run()
    assert run.outcomes == {}
    assert run.verdict == "stopped, 0 of 2 stages executed; run again to go on there"


def test_a_stopped_run_says_what_became_of_settings_to_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dag.Dag({"plan": frozenset(), "report": frozenset({"plan"})}, frozenset({"plan", "report"}))
    run = Run(tmp_path, "key", "title", graph, changes=["a: 1 -> 2"], keeps=True)
    run.stopper.stop(signal.SIGINT)
    assert run.close() == 130
    assert capsys.readouterr().err.startswith("params.yaml is as it was: ")
    run.outcomes["plan"] = Outcome("plan", "executed")
    assert run.close() == 130
    assert capsys.readouterr().err.startswith("Changed: params.yaml; ")


@pytest.mark.parametrize(
    ("results", "is_stopped", "status"),
    [
        (("executed", "cached"), False, "FINISHED"),
        (("executed",), False, "KILLED"),
        (("executed", "cached"), True, "KILLED"),
        (("executed", "failed"), False, "FAILED"),
        (("failed",), True, "FAILED"),
    ],
)
def test_a_run_is_finished_where_every_stage_has_ended_and_nobody_stopped_it(
    tmp_path: Path, results: tuple[Any, ...], is_stopped: bool, status: str
) -> None:
    graph = dag.Dag({"plan": frozenset(), "report": frozenset({"plan"})}, frozenset({"plan", "report"}))
    run = Run(tmp_path, "key", "title", graph)
    run.outcomes |= {name: Outcome(name, result) for name, result in zip(graph.needs, results, strict=False)}
    if is_stopped:
        run.stopper.stop(signal.SIGTERM)
    assert run.status == status


def test_results_whose_copies_in_the_cache_are_damaged_are_made_again(finished: Toy) -> None:
    before, names = finished.bytes(), ("artifacts/evaluate/a-0", "reports")
    for name in names:
        file = next((finished.root / name).iterdir())
        digest = hashlib.md5(file.read_bytes()).hexdigest()
        cached = finished.root / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
        mode = cached.stat().st_mode
        cached.chmod(0o644)
        cached.write_bytes(file.read_bytes()[:-2] + b"9\n")
        cached.chmod(mode)
        shutil.rmtree(finished.root / name)
    done = finished.flow("--no-prefect")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        assert f"DVC's cache is damaged: its copy of {name} is not what dvc.lock names. Running again." in done.stdout
    assert finished.counts() == ["evaluate@a-0", "report"]
    assert finished.bytes() == before
    finished.forget()
    for name in names:
        shutil.rmtree(finished.root / name)
    assert finished.flow("--no-prefect").returncode == 0
    assert (finished.counts(), finished.bytes()) == ([], before)


def test_a_lock_file_that_another_stage_is_writing_is_waited_for(
    finished: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dvc.repo import Repo

    monkeypatch.chdir(finished.root)
    path = finished.root / "dvc.lock"
    whole = path.read_text(encoding="utf-8")
    with ThreadPoolExecutor() as pool, Repo() as writer:
        with writer.lock:
            path.write_text(whole[: len(whole) // 2], encoding="utf-8")
            reader = pool.submit(dag.remove_damaged, Path.cwd(), "data")
            assert wait([reader], timeout=2).not_done
            path.write_text(whole, encoding="utf-8")
        assert reader.result(60) == []


UNREADABLE = "schema: '2.0'\nstages: {report: {outs: 7}}\n"


def test_a_lock_file_that_dvc_cannot_read_costs_no_result(finished: Toy) -> None:
    good, before = (finished.root / "dvc.lock").read_text(), finished.bytes()
    (finished.root / "dvc.lock").write_text(UNREADABLE)
    done = finished.flow("--no-prefect")
    assert done.returncode == 0, done.stderr
    assert "after an earlier kill: removed the torn dvc.lock" in done.stdout
    assert (finished.counts(), finished.bytes()) == ([], before)
    assert yaml.safe_load((finished.root / "dvc.lock").read_text()) == yaml.safe_load(good)


@pytest.mark.parametrize("text", [UNREADABLE, "schema: '9.0'\nstages: {}\n", "[1, 2]\n", "x: " + "[" * 5000])
def test_whatever_it_is_that_dvc_cannot_read_is_removed(tmp_path: Path, text: str) -> None:
    (tmp_path / "dvc.lock").write_text(text)
    assert dag.repair(tmp_path) == ["removed the torn dvc.lock"]
    assert not (tmp_path / "dvc.lock").exists()


def test_a_run_that_has_just_taken_the_lock_is_named_without_its_number(finished: Toy) -> None:
    (finished.root / ".scratch/pipeline.pid").unlink()
    with FileLock(finished.root / ".scratch/pipeline.lock"):
        second = finished.flow("--no-prefect")
    assert second.returncode == 1
    assert "error: another pipeline run (process unknown) is at work in this clone" in second.stderr
