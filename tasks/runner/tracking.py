"""Tracking with MLflow, which only this module imports: one run per pipeline run, and below it one run per stage.

A stage writes rows into a local file, its record: `.scratch/tracking/<stage>-<start>-<process>.jsonl`. One helper
process per pipeline run, the sender, reads all these files and sends their rows to MLflow. It has a session of its own,
so it outlives a stage that dies, and it ends soon after the pipeline run. If the server is absent, dies or hangs, a
stage only waits a short bounded time at its end; `python -m tasks.runner.tracking upload` sends the remaining rows
later. If MLflow gives a run id after its stage has ended, the sender writes it into the stage's ledger. Nothing here
decides or changes a result, and no call raises.

Environment: `MLFLOW_TRACKING_URI` names a server (default: a database in `.scratch/mlflow/`),
`BREADCRUMB_TRACKING=off` keeps the local file only, `BREADCRUMB_RUN` names the pipeline run,
`BREADCRUMB_OWNER` is the process id with which it ends.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tasks import conf, store
from tasks.runner.git import Commit, read_commit
from tasks.runner.ledger import LEDGER
from tasks.runner.lock import LOCKS

Row = dict[str, Any]

FOLDER = Path(".scratch/tracking")
EXPERIMENT = "breadcrumb"
WAIT_AT_END_S = 1.5
WAIT_FOR_IDS_S = 6.0
SECONDS_BETWEEN_LOOKS = 1.0
LINGER_S = 2.0  # The sender waits so long for more rows after the pipeline run has ended.
OUTLIVE_S = 25.0  # The sender ends at the latest so long after the pipeline run.
LEDGER_FOLLOWS_END_S = 120.0
WAIT_TO_DETACH_S = 5.0
POLL_S = 0.2
MAX_ROWS = 200
MAX_BATCH = 1000
MAX_TRACES = 50
MAX_ARTIFACT_MB = 200
SHARED_TAGS = ("git_commit", "git_dirty", "config_digest", "data_sha256")  # The same for all stages of a pipeline run.
HTTP_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
SECRET_KEY = re.compile(r"(^|[._])(secret|password|passwd|token|api_?key|access_?key|credentials?)$", re.IGNORECASE)
USER_IN_URL = re.compile(r"://[^/@\s]+@")


class Track:
    """The handle that a stage reports to. Every method returns at once; a failure gives one warning."""

    def __init__(self, name: str, path: Path | None, root: Path, send: bool) -> None:
        self._name = name
        self._path = path
        self._root = root
        self._file: IO[str] | None = None
        self._is_sent = send
        self._looked = time.monotonic()
        self._num_trajectories = 0
        if path is None:
            return
        with self._guard():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def log_params(self, settings: object) -> None:
        """The settings that were used, a dataclass or a mapping; nested keys are joined with dots."""
        self._write({"kind": "params", "params": flatten(conf.plain(settings))})

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step."""
        self._write({"kind": "metrics", "step": int(step), "metrics": {k: float(v) for k, v in metrics.items()}})

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Labels of the run, such as data hashes, seed and system."""
        self._write({"kind": "tags", "tags": {key: hide(key, value) for key, value in tags.items()}})

    def log_inputs(self, name: str, path: Path, digest: str, num_rows: int | None = None, context: str = "") -> None:
        """A data set that the stage read: its name, its path in the clone, and the hash of its content."""
        row = {"kind": "input", "name": name, "path": str(path), "digest": digest, "num_rows": num_rows}
        self._write({**row, "context": context})

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """A file or folder to keep with the run; above 200 MB only its path is kept."""
        self._write({"kind": "artifact", "path": str(path), "folder": folder})

    def log_table(self, name: str, markdown: str) -> None:
        """A result table, kept with the stage's run and with the pipeline's."""
        self._write({"kind": "table", "name": name, "text": markdown})

    def log_results(self, metrics: Mapping[str, float]) -> None:
        """Final numbers by which pipeline runs are compared, kept with the stage's run and with the pipeline's."""
        self._write({"kind": "results", "metrics": {k: float(v) for k, v in metrics.items()}})

    def log_trajectory(self, row: Row) -> None:
        """One row of `trajectories.jsonl`, shown as a trace; the first 50 of a stage are sent."""
        self._num_trajectories += 1
        if self._num_trajectories <= MAX_TRACES:
            self._write({"kind": "trajectory", "row": row})

    def end(self, status: str, seconds: float) -> str | None:
        """Close the run as FINISHED, FAILED or KILLED; returns its MLflow id if it is known by now."""
        self._write({"kind": "end", "status": status, "seconds": round(seconds, 2)})
        with self._guard():
            until = time.monotonic() + WAIT_AT_END_S
            while self._path is not None:
                if run_id := _read_state(self._path).get("run_id"):  # Also if the server has died since.
                    return str(run_id)
                if not self._is_sent or time.monotonic() > until:
                    break
                self._look()
                time.sleep(0.03)
        return None

    def _write(self, row: Row) -> None:
        if self._file is None:
            return
        with self._guard():
            self._file.write(json.dumps({"time": time.time(), **row}, ensure_ascii=False) + "\n")
            self._file.flush()
            if time.monotonic() - self._looked > SECONDS_BETWEEN_LOOKS:
                self._look()

    def _look(self) -> None:
        """Stop tracking, with one warning, if the sender has given up."""
        self._looked = time.monotonic()
        if not self._is_sent or self._path is None:
            return
        reason = _read_state(self._path).get("failed") or _reason_down(self._root)
        if reason:
            self._is_sent = False
            _warn(reason)
            _claim_warning(self._root)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Tracking must never stop the work, whatever goes wrong in it.
            self._file = None
            print(f"warning: tracking of {self._name} stopped: {error!r}", file=sys.stderr, flush=True)


def start(name: str, params: Row, root: Path = Path("."), code: Commit | None = None) -> Track:
    """Open the record of stage `name` and describe this process in it; the module lists the environment variables.

    `code` is the commit at which the stage started; None takes the current one.
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    path = root / FOLDER / f"{name}-{stamp}-{os.getpid()}.jsonl"
    is_on = os.environ.get("BREADCRUMB_TRACKING", "on") != "off"
    track = Track(name, path, root, is_on)
    key, owner = _pipeline()

    with track._guard():
        _forget_sent(root, name)
        if is_on and (reason := _reason_down(root)):
            track._is_sent = False
            if _claim_warning(root):
                _warn(reason)

    code = code or read_commit(root)
    group, _, item = name.partition("@")
    seed = tail if (tail := item.rpartition("-")[2]).isdecimal() else ""
    where = address_digest(root) if is_on else None
    track._write({"kind": "start", "stage": name, "pipeline": key, "owner": owner, "address": where})
    track.set_tags(
        {
            "stage": group,
            "item": item,
            "seed": seed,
            "system": item.rpartition("-")[0] if seed else item,
            "git_commit": code.sha or "none",
            "git_dirty": code.is_dirty,
            "config_digest": store.digest(params),
        }
    )
    track.log_params({"params": params})

    with track._guard():
        # After the first row is written; see `_follow`.
        if track._is_sent and not _has_sender(root):
            start_sender(root, key, owner)
    return track


def silent(name: str = "none") -> Track:
    """A handle that records nothing, for code that needs one outside a stage."""
    return Track(name, None, Path("."), False)


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as `a.b.c: text`, secrets hidden.

    >>> flatten({"train": {"lr": 0.1, "token": "abc"}, "seeds": [0, 1]})
    {'train.lr': '0.1', 'train.token': '***', 'seeds': '[0, 1]'}
    """
    if not isinstance(tree, Mapping):
        return {prefix: hide(prefix, tree)}
    result: dict[str, str] = {}
    for key, value in tree.items():
        result.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return result


def hide(key: str, value: object) -> str:
    """`value` as text, with passwords, tokens and the user part of addresses replaced by `***`."""
    return "***" if SECRET_KEY.search(key) else USER_IN_URL.sub("://***@", str(value))


def address(root: Path) -> str:
    """The address of the server: `MLFLOW_TRACKING_URI`, else the clone's own database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(root / '.scratch/mlflow/mlflow.db').resolve()}"


def address_digest(root: Path) -> str:
    """A hash that identifies the address without showing it, because it may contain a password."""
    return store.digest(address(root))


def pipeline_key() -> str:
    """Name of the pipeline run of this process, given by the flow or made of the `dvc` that started this process."""
    return _pipeline()[0]


def wait_for_ids(root: Path, timeout_s: float = WAIT_FOR_IDS_S) -> None:
    """Wait until the ledger has the run ids of all ended stages, as long as a sender is at work."""
    with contextlib.suppress(Exception):
        where = address_digest(root)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and _has_sender(root) and not _reason_down(root):
            paths = [path for path in (root / FOLDER).glob("*.jsonl") if not _has_live_writer(path)]
            states = [(path, _read_state(path)) for path in paths]
            unsent = [path for path, state in states if not (state.get("settled") or state.get("failed"))]
            if all(_start_row(path).get("address") != where for path in unsent):
                return
            time.sleep(0.1)


def start_sender(root: Path, key: str, owner: int) -> None:
    """Start the sender of this clone; if there is one already, the new one ends at once.

    Args:
        root: root of the clone.
        key: name of the pipeline run.
        owner: process id with which the pipeline run ends.
    """
    log = root / ".scratch/logs/tracking.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tasks.runner.tracking", "follow", key, str(owner)]
    with log.open("ab") as output, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        ).wait(WAIT_TO_DETACH_S)


def _pipeline() -> tuple[str, int]:
    """Name of the pipeline run, and the process id with which it ends."""
    key, owner = os.environ.get("BREADCRUMB_RUN"), os.environ.get("BREADCRUMB_OWNER", "")
    if key:
        return key, int(owner) if owner.isdecimal() else os.getpid()
    import psutil

    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = [Path(word).name for word in parent.cmdline()[:3]]
            if "dvc" in words:
                return f"dvc-{parent.pid}-{int(parent.create_time())}", parent.pid
    return "", os.getpid()


def _warn(reason: str) -> None:
    print(
        f"warning: tracking stopped: {reason}. The work goes on; the rows are kept in {FOLDER} and can be sent "
        "later: python -m tasks.runner.tracking upload",
        file=sys.stderr,
        flush=True,
    )


def _state_path(path: Path) -> Path:
    return path.with_suffix(".sent.json")


def _read_state(path: Path) -> Row:
    try:
        return dict(json.loads(_state_path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _down_path(root: Path) -> Path:
    return root / FOLDER / "down.json"


def _mark_down(root: Path, pipelines: Iterable[str], reason: str) -> None:
    with contextlib.suppress(OSError):
        row = {"pipelines": sorted(pipelines), "address": address_digest(root), "reason": reason, "is_told": False}
        store.write_json(_down_path(root), row)


def _read_down(root: Path) -> Row:
    """The note that this pipeline run has found its tracking server unusable; empty without one."""
    try:
        down = dict(json.loads(_down_path(root).read_text(encoding="utf-8")))
    except (ValueError, OSError):
        return {}
    is_ours = pipeline_key() in down.get("pipelines", []) and down.get("address") == address_digest(root)
    return down if is_ours else {}


def _reason_down(root: Path) -> str:
    return str(_read_down(root).get("reason", ""))


def _claim_warning(root: Path) -> bool:
    """Whether this process is the first to warn that the server is unusable; it notes that for the others."""
    down = _read_down(root)
    if not down or down["is_told"]:
        return False
    with contextlib.suppress(OSError):
        store.write_json(_down_path(root), {**down, "is_told": True})
    return True


def _start_row(path: Path) -> Row:
    """The first row of a record, with stage, pipeline, owner and address; empty before it is written."""
    try:
        with path.open(encoding="utf-8") as file:
            return dict(json.loads(file.readline()))
    except (OSError, ValueError):
        return {}


def _sender_lock(root: Path) -> Path:
    return root / FOLDER / f"sender-{address_digest(root)}.lock"


def _has_sender(root: Path) -> bool:
    """Whether a sender for our address is at work in this clone."""
    with _held(_sender_lock(root), fcntl.LOCK_SH) as is_free:
        return not is_free


@contextlib.contextmanager
def _held(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Hold a lock inside the block if it is free; yields whether it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _forget_sent(root: Path, name: str) -> None:
    with contextlib.suppress(OSError):
        for path in (root / FOLDER).glob(f"{name}-*.jsonl"):
            if _read_state(path).get("settled"):
                path.unlink()
                _state_path(path).unlink(missing_ok=True)


# From here on: the sender. Only it, and `upload`, import MLflow.


class Target:
    """A client of the tracking server, and our experiment on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.client: Any = None
        self.experiment = ""

    def connect(self) -> None:
        """Open the server or make the database, once.

        Raises:
            Exception: whatever the server or MLflow answers.
        """
        if self.client is not None:
            return
        for key, value in HTTP_LIMITS.items():
            os.environ.setdefault(key, value)
        uri = address(self.root)
        self.check()
        import mlflow
        from mlflow.tracking import MlflowClient

        mlflow.set_tracking_uri(uri)
        with _lock(self.root):  # Two processes that create the database at the same time would collide.
            if uri.startswith("sqlite:///"):
                Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            client = MlflowClient(uri)
            existing = client.get_experiment_by_name(EXPERIMENT)
            if existing is None:
                local = uri.startswith("sqlite:///")
                store_at = (self.root / ".scratch/mlflow/artifacts").resolve().as_uri() if local else None
                self.experiment = client.create_experiment(EXPERIMENT, artifact_location=store_at)
            else:
                self.experiment = existing.experiment_id
        self.client = client

    def check(self) -> None:
        """Ask a server for its health.

        Raises:
            OSError: the server does not answer or is not healthy.
        """
        uri = address(self.root)
        if uri.startswith("http"):
            probe(uri)


class Sender:
    """Sends the rows of one record to MLflow, remembers which were sent, and completes the stage's ledger."""

    def __init__(self, path: Path, root: Path, target: Target) -> None:
        self.path, self.root, self.target = path, root, target
        self.state = _read_state(path)
        self.stage = str(_start_row(path).get("stage", ""))
        self._file: IO[str] | None = None

    @property
    def is_over(self) -> bool:
        """Whether everything is sent, or the rest is left to `upload` after a failure."""
        return bool(self.state.get("settled") or self.state.get("failed"))

    def send(self) -> None:
        """Send the rows written since the last call; if the stage has ended or died, close its run.

        Raises:
            Exception: whatever the server or MLflow answers.
        """
        if not self.state.get("complete"):
            # Before reading: a stage that ends in between may have written its last rows.
            is_alive = _has_live_writer(self.path)
            if not self._take():
                return
            assert self._file is not None
            while rows := list(itertools.islice(_complete_rows(self._file), MAX_ROWS)):
                self._apply(rows)
                self._save(offset=self._file.tell())
            if not is_alive and not self.state.get("complete"):
                self._finish({"time": time.time(), "status": "KILLED", "seconds": None})
        if self.state.get("complete") and not self.state.get("settled"):
            self._settle()

    def close(self) -> None:
        """Close the record."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def fail(self, error: Exception) -> str:
        """Store the reason of a failure where the stage finds it; returns the reason."""
        reason = " ".join(f"{hide('', address(self.root))}: {error}".split())[:300]
        self._save(failed=reason)
        print(f"{self.path.name}: {error!r}", flush=True)
        return reason

    def _take(self) -> bool:
        """Open the record at the first row that is not sent; False if another process is sending it."""
        if self._file is None:
            file = self.path.open(encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            self.state = _read_state(self.path)
            file.seek(self.state.get("offset", 0))
            self._file = file
        return True

    def _settle(self) -> None:
        """Write the run id into the ledger that the stage wrote without it.

        While the stage, or a later run of it, may write the ledger, it holds the stage's lock, and we wait.
        """
        if self.state["status"] == "FINISHED":
            with _held(self.root / LOCKS / f"{self.stage}.lock") as is_free:
                if not is_free:
                    return
                path = self.root / LEDGER / f"{self.stage}.json"
                with contextlib.suppress(ValueError, OSError):
                    row = store.read_json(path)
                    if row["mlflow_run_id"] is None and self._wrote(row):
                        store.write_json(path, {**row, "mlflow_run_id": self.state["run_id"]})
        self._save(settled=True, failed=None)
        self.close()

    def _wrote(self, row: Row) -> bool:
        """Whether record and ledger describe the same execution, judged by its end and its duration."""
        later = datetime.datetime.fromisoformat(row["ended"]).timestamp() - self.state["ended"]
        return bool(row["seconds"] == self.state["seconds"] and -2 < later < LEDGER_FOLLOWS_END_S)

    def _apply(self, rows: list[Row]) -> None:
        self.target.connect()
        self.client, self.experiment = self.target.client, self.target.experiment
        if rows[0]["kind"] == "start" and "run_id" not in self.state:
            self._open(rows[0])
        run_id = self.state["run_id"]
        self._metrics(run_id, [row for row in rows if row["kind"] == "metrics"])
        for row in rows:
            handle = getattr(self, f"_send_{row['kind']}", None)
            if handle is not None:
                handle(run_id, row)
        for row in rows:
            if row["kind"] == "end":
                self._finish(row)

    def _open(self, row: Row) -> None:
        tags = {"mlflow.runName": row["stage"]}
        if row["pipeline"]:
            self.state["parent"] = tags["mlflow.parentRunId"] = self._parent(row)
        run = self.client.create_run(self.experiment, start_time=_ms(row), tags=tags)
        self._save(run_id=run.info.run_id)

    def _parent(self, row: Row) -> str:
        """The pipeline's run. The first stage creates it; the others find its id in a small file."""
        path = self.root / FOLDER / "pipelines" / f"{row['pipeline']}.json"
        with _lock(self.root):
            try:
                known = store.read_json(path)
            except ValueError:
                known = {}
            if known.get("address") == address_digest(self.root):
                self.client.update_run(known["run_id"], status="RUNNING")
                return str(known["run_id"])
            run = self.client.create_run(
                self.experiment, start_time=_ms(row), run_name=f"pipeline {row['pipeline']}", tags={"kind": "pipeline"}
            )
            store.write_json(path, {"address": address_digest(self.root), "run_id": run.info.run_id})
            return str(run.info.run_id)

    def _metrics(self, run_id: str, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(k, v, _ms(row), row["step"]) for row in rows for k, v in row["metrics"].items()]
        for i in range(0, len(metrics), MAX_BATCH):
            self.client.log_batch(run_id, metrics=metrics[i : i + MAX_BATCH])

    def _send_params(self, run_id: str, row: Row) -> None:
        from mlflow.entities import Param

        params = [Param(key, value[:6000]) for key, value in row["params"].items()]
        for i in range(0, len(params), 100):
            self.client.log_batch(run_id, params=params[i : i + 100])
        if (parent := self.state.get("parent")) and (shared := [p for p in params if p.key.startswith("params.")]):
            self.client.log_batch(parent, params=shared)  # params.yaml, the same for all stages.

    def _send_results(self, run_id: str, row: Row) -> None:
        for target in self._with_parent(run_id):
            for name, value in row["metrics"].items():
                self.client.log_metric(target, name, value, _ms(row))

    def _send_tags(self, run_id: str, row: Row) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(key, value[:5000]) for key, value in row["tags"].items()]
        self.client.log_batch(run_id, tags=tags)
        if (parent := self.state.get("parent")) and (shared := [tag for tag in tags if tag.key in SHARED_TAGS]):
            self.client.log_batch(parent, tags=shared)

    def _send_input(self, run_id: str, row: Row) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        profile = json.dumps({"num_rows": row["num_rows"], "sha256": row["digest"]})
        source = json.dumps({"uri": row["path"]})
        data = Dataset(row["name"], row["digest"][:36], "local", source, profile=profile)
        tags = [InputTag("mlflow.data.context", row["context"])] if row["context"] else []
        self.client.log_inputs(run_id, [DatasetInput(data, tags)])
        self.client.set_tag(run_id, f"data.{row['name']}", row["digest"])

    def _send_artifact(self, run_id: str, row: Row) -> None:
        path = self.root / row["path"]
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        if sum(p.stat().st_size for p in files) > MAX_ARTIFACT_MB << 20:
            self.client.set_tag(run_id, f"artifact.{path.name}", row["path"])
        elif path.is_dir():
            self.client.log_artifacts(run_id, str(path), row["folder"] or path.name)
        elif path.is_file():
            self.client.log_artifact(run_id, str(path), row["folder"])

    def _send_table(self, run_id: str, row: Row) -> None:
        for target in self._with_parent(run_id):
            self.client.log_text(target, row["text"], row["name"])

    def _with_parent(self, run_id: str) -> list[str]:
        return [target for target in (run_id, self.state.get("parent")) if target]

    def _send_trajectory(self, run_id: str, row: Row) -> None:
        """A trace of spans: the question, below it every turn, and below a turn its observation."""
        import mlflow

        mlflow.set_experiment(experiment_id=self.experiment)
        played = row["row"]
        attributes = {k: played.get(k) for k in ("dataset", "hops", "policy", "seed", "step", "mode", "status")}
        root = mlflow.start_span_no_context(
            played["question_id"],
            inputs={"question": played.get("question"), "answers": played.get("answers")},
            attributes={key: value for key, value in attributes.items() if value is not None},
            metadata={"mlflow.sourceRun": run_id},
        )
        for number, turn in enumerate(played.get("turns", [])):
            span = mlflow.start_span_no_context(
                f"{number + 1} {turn['kind']}", parent_span=root, inputs={"wrote": "".join(turn.get("tokens", []))}
            )
            span.set_attributes({"reward": turn.get("reward", 0.0), "executed": bool(turn.get("executed"))})
            if turn.get("observation"):
                seen = mlflow.start_span_no_context("information", parent_span=span, span_type="RETRIEVER")
                seen.end(outputs=turn["observation"])
            span.end(outputs=turn.get("content"))
        root.end(outputs={"answer": played.get("answer"), "outcome": played.get("outcome")})

    def _finish(self, row: Row) -> None:
        """Close the stage's run, unless the record ended before its first complete row."""
        if "run_id" in self.state:
            self.target.connect()
            client = self.target.client
            if row["seconds"] is not None:
                client.log_metric(self.state["run_id"], "seconds", row["seconds"])
            client.set_terminated(self.state["run_id"], row["status"], _ms(row))
            if parent := self.state.get("parent"):
                client.set_terminated(parent, row["status"], _ms(row))
        self._save(complete=True, status=row["status"], seconds=row["seconds"], ended=row["time"])

    def _save(self, **values: Any) -> None:
        self.state.update(values)
        store.write_json(_state_path(self.path), self.state)


def probe(uri: str) -> None:
    """Ask the server for its health, for at most 3 s, so that a dead or hanging one is found before MLflow is imported.

    Raises:
        OSError: no answer, or a status other than 200.
    """
    with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=3) as answer:
        if answer.status != 200:
            raise OSError(f"status {answer.status}")


def _complete_rows(file: IO[str]) -> Iterator[Row]:
    while True:
        before = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(before)
            return
        yield json.loads(line)


def _has_live_writer(path: Path) -> bool:
    """Whether the stage that writes `path` still runs; its process id ends the file's name."""
    pid = int(path.stem.rpartition("-")[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _ms(row: Row) -> int:
    return int(row["time"] * 1000)


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    path = root / FOLDER / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Follower:
    """Sends all records of this clone with our address, until the pipeline run has ended.

    Args:
        root: root of the clone.
        key: name of the pipeline run that started us.
        owner: process id with which it ends.
    """

    def __init__(self, root: Path, key: str, owner: int) -> None:
        self.root = root
        self.target = Target(root)
        self.pipelines = {key}
        self.owners = set(_processes([owner]))
        self.senders: dict[Path, Sender] = {}
        self.seen: set[Path] = set()
        self.gone_since = 0.0  # Time at which the last owner was found dead; 0 while one lives.

    def follow(self) -> bool:
        """Send until the owners have ended and everything is sent; False if the server cannot be used."""
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            self.target.connect()
            while True:
                self._find()
                if not self._send_all():
                    return False
                rest = time.monotonic() - self.gone_since
                if self.gone_since and rest > LINGER_S and not self.senders:
                    return True
                time.sleep(POLL_S)
        except Exception as error:
            self._give_up(f"{hide('', address(self.root))}: {error}")
            return False

    def has_work(self) -> bool:
        """Whether there is a record that no process sends."""
        self._find()
        return bool(self.senders)

    def _find(self) -> None:
        where = address_digest(self.root)
        for path in sorted((self.root / FOLDER).glob("*.jsonl")):
            if path in self.seen or not (first := _start_row(path)):
                continue
            self.seen.add(path)
            sender = Sender(path, self.root, self.target)
            if first.get("address") == where and not sender.is_over:
                self.senders[path] = sender
                self.pipelines.add(first["pipeline"])
                self.owners |= _processes([first["owner"]])

    def _send_all(self) -> bool:
        for path, sender in list(self.senders.items()):
            try:
                sender.send()
            except Exception as error:
                reason = sender.fail(error)
                try:
                    self.target.check()  # If the server is healthy, only this record is at fault and the others go on.
                except OSError:
                    self._give_up(reason)
                    return False
            if sender.is_over:
                sender.close()
                del self.senders[path]
        return True

    def _give_up(self, reason: str) -> None:
        reason = " ".join(reason.split())[:300]
        print(reason, flush=True)
        _mark_down(self.root, self.pipelines - {""}, reason)
        for sender in self.senders.values():
            sender._save(failed=reason)

    def _watch(self) -> None:
        """Note when the owners have ended; end a sender that hangs for long after that."""
        while True:
            if any(_is_same(pid, born) for pid, born in list(self.owners)):
                self.gone_since = 0.0
            else:
                self.gone_since = self.gone_since or time.monotonic()
                if time.monotonic() - self.gone_since > OUTLIVE_S:
                    os._exit(1)  # `upload` can send the remaining rows.
            time.sleep(0.5)


def _processes(pids: Iterable[int]) -> set[tuple[int, float]]:
    """Living processes among `pids` with their start times, because the system uses process ids again."""
    import psutil

    living = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            living.add((pid, psutil.Process(pid).create_time()))
    return living


def _is_same(pid: int, born: float) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == born and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _follow(root: Path, key: str, owner: int) -> None:
    """Be the sender of this clone unless there is one.

    A stage writes its first row and then checks for a sender. A sender frees its lock and then looks for rows once
    more. So no row is left without a sender.
    """
    while True:
        for _ in range(10):  # A stage that checks for a sender holds the lock for a moment.
            with _held(_sender_lock(root)) as is_free:
                if is_free:
                    follower = Follower(root, key, owner)
                    if not follower.follow():
                        return
                    break
            time.sleep(0.05)
        else:
            return
        if not Follower(root, key, owner).has_work():
            return


def _detach() -> None:
    """Leave the process that started us, so that a kill of it and its children does not end this one."""
    if os.fork():
        os._exit(0)
    with contextlib.suppress(OSError):
        os.nice(5)


def upload(root: Path = Path(".")) -> tuple[int, int]:
    """Send every record that is not complete; returns how many were sent and how many failed."""
    sent = failed = 0
    target = Target(root)
    for path in sorted((root / FOLDER).glob("*.jsonl")):
        sender = Sender(path, root, target)
        if sender.state.get("settled") or _has_live_writer(path):
            continue
        try:
            sender.send()
            sent += bool(sender.state.get("complete"))
        except Exception as error:
            sender.fail(error)
            failed += 1
        finally:
            sender.close()
    return sent, failed


def main(words: Iterable[str]) -> int:
    """`follow PIPELINE PROCESS` sends while that runs; `upload` sends what is left from earlier runs."""
    match list(words):
        case ["follow", key, owner]:
            _detach()
            _follow(Path("."), key, int(owner))
            return 0
        case ["upload"]:
            sent, failed = upload()
            print(f"tracking: {sent} records sent to {hide('', address(Path('.')))}, {failed} failed.")
            return 1 if failed else 0
    print("usage: python -m tasks.runner.tracking upload", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
