"""The only importer of MLflow: one run for a pipeline run, below it one run a stage.

A stage writes what it has to tell as rows of a local file, `.scratch/tracking/<stage>-<start>.jsonl`: that is
the record. A helper process follows the file and sends the rows to MLflow, so a server that is absent, dies
or hangs costs the stage nothing but a bounded wait at its end; rows not sent stay for
`python -m tasks.stages.tracking upload`. Nothing here decides or changes a result, and no call raises.

Environment: `MLFLOW_TRACKING_URI` names a server (default: a database in `.scratch/mlflow/`),
`BREADCRUMB_TRACKING=off` keeps the local file only, `BREADCRUMB_RUN` names the pipeline run.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tasks import conf, store

Row = dict[str, Any]

FOLDER = Path(".scratch/tracking")
EXPERIMENT = "breadcrumb"
WAIT_AT_END_S = 10.0
POLL_S = 0.3
MAX_BATCH = 1000
MAX_TRACES = 50
MAX_ARTIFACT_MB = 200
FAILED = 3
HTTP_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
SECRET_KEY = re.compile(r"(^|[._])(secret|password|passwd|token|api_?key|access_?key|credentials?)$", re.IGNORECASE)
USER_IN_URL = re.compile(r"://[^/@\s]+@")


class Track:
    """Handle a stage reports to. Every method returns at once; a failure is one warning and then silence."""

    def __init__(self, name: str, path: Path | None, root: Path, send: bool) -> None:
        self._name, self._path, self._root = name, path, root
        self._file: IO[str] | None = None
        self._sender: subprocess.Popen[bytes] | None = None
        self._num_trajectories = 0
        if path is None:
            return
        with self._guard():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        if send and self._file is not None:
            with self._guard():
                self._sender = _start_sender(path, root)

    def log_params(self, settings: object) -> None:
        """Settings actually used: a dataclass or a mapping; nested keys are joined with dots."""
        self._write({"kind": "params", "params": flatten(conf.plain(settings))})

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step."""
        self._write({"kind": "metrics", "step": int(step), "metrics": {k: float(v) for k, v in metrics.items()}})

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Labels of the run, such as data hashes, seed and method."""
        self._write({"kind": "tags", "tags": {key: hide(key, value) for key, value in tags.items()}})

    def log_inputs(self, name: str, path: Path, digest: str, num_rows: int | None = None, context: str = "") -> None:
        """A data set the stage read: its name, where it lies in the clone, and the hash of its content."""
        row = {"kind": "input", "name": name, "path": str(path), "digest": digest, "num_rows": num_rows}
        self._write({**row, "context": context})

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """A file or folder to keep with the run; above 200 MB only its path is kept."""
        self._write({"kind": "artifact", "path": str(path), "folder": folder})

    def log_table(self, name: str, markdown: str) -> None:
        """A result table, kept with the stage's run and with the pipeline's."""
        self._write({"kind": "table", "name": name, "text": markdown})

    def log_trajectory(self, row: Row) -> None:
        """One row of `trajectories.jsonl`, shown as a trace; the first 50 of a stage are sent."""
        self._num_trajectories += 1
        if self._num_trajectories <= MAX_TRACES:
            self._write({"kind": "trajectory", "row": row})

    def end(self, status: str, seconds: float) -> str | None:
        """Close the run as FINISHED, FAILED or KILLED; returns its MLflow id where it could be opened."""
        self._write({"kind": "end", "status": status, "seconds": round(seconds, 2)})
        if self._sender is None or self._path is None:
            return None
        with self._guard():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sender.wait(WAIT_AT_END_S)
            if self._sender.poll() is None:
                self._sender.kill()
                self._sender.wait()
                _mark_down(self._root, f"no answer within {WAIT_AT_END_S:.0f} s")
                self._warn(f"no answer within {WAIT_AT_END_S:.0f} s")
            self._look_after_sender()
            return _read_state(self._path).get("run_id")
        return None

    def _write(self, row: Row) -> None:
        if self._file is None:
            return
        with self._guard():
            self._file.write(json.dumps({"time": time.time(), **row}, ensure_ascii=False) + "\n")
            self._file.flush()
            self._look_after_sender()

    def _look_after_sender(self) -> None:
        if self._sender is not None and self._sender.poll() == FAILED and self._path is not None:
            self._warn(_read_state(self._path).get("failed", "it could not be reached"))

    def _warn(self, reason: str) -> None:
        self._sender = None
        print(
            f"warning: tracking stopped: {reason}. The work goes on; the rows are kept in {FOLDER} and can be sent "
            "later: python -m tasks.stages.tracking upload",
            file=sys.stderr,
            flush=True,
        )

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Tracking must never stop the work, whatever goes wrong in it.
            self._file = None
            print(f"warning: tracking of {self._name} stopped: {error!r}", file=sys.stderr, flush=True)


def start(name: str, params: conf.Params, root: Path = Path(".")) -> Track:
    """Open the record of stage `name` and tell it who we are; see the module for the environment variables."""
    from tasks.stages.runner import git_state

    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    path = root / FOLDER / f"{name}-{stamp}-{os.getpid()}.jsonl"
    send = os.environ.get("BREADCRUMB_TRACKING", "on") != "off" and not _is_down(root)
    _forget_sent(root, name)
    track = Track(name, path, root, send)
    commit, dirty = git_state(root)
    group, _, item = name.partition("@")
    settings = conf.plain(params)
    track._write({"kind": "start", "stage": name, "pipeline": pipeline_key()})
    track.set_tags(
        {
            "stage": group,
            "item": item,
            "seed": item.rpartition("-")[2],
            "method": item.rpartition("-")[0],
            "git_commit": commit or "none",
            "git_dirty": dirty,
            "config_digest": store.digest(settings),
        }
    )
    track.log_params({"params": settings})
    return track


def silent(name: str = "none") -> Track:
    """A handle that keeps nothing, for code that needs one outside a stage."""
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
    """Where to send: `MLFLOW_TRACKING_URI`, else the absolute address of the clone's own database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(root / '.scratch/mlflow/mlflow.db').resolve()}"


def pipeline_key() -> str:
    """Name of the pipeline run this process belongs to: the flow hands it on, else the `dvc` that started us."""
    if key := os.environ.get("BREADCRUMB_RUN"):
        return key
    import psutil

    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = [Path(word).name for word in parent.cmdline()[:3]]
            if "dvc" in words:
                return f"dvc-{parent.pid}-{int(parent.create_time())}"
    return ""


def _start_sender(path: Path, root: Path) -> subprocess.Popen[bytes]:
    log = root / ".scratch/logs/tracking.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tasks.stages.tracking", "send", str(path.resolve())]
    with log.open("ab") as output:
        return subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _state_path(path: Path) -> Path:
    return path.with_suffix(".sent.json")


def _read_state(path: Path) -> Row:
    try:
        return dict(json.loads(_state_path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _down_path(root: Path) -> Path:
    return root / FOLDER / "down.json"


def _mark_down(root: Path, reason: str) -> None:
    with contextlib.suppress(OSError):
        store.write_json(_down_path(root), {"pipeline": pipeline_key(), "address": address(root), "reason": reason})


def _is_down(root: Path) -> bool:
    """Whether this pipeline run has already found its tracking server unusable: then it is not asked again."""
    try:
        down = store.read_json(_down_path(root))
    except (ValueError, OSError):
        return False
    return bool(down.get("pipeline")) and (down["pipeline"], down["address"]) == (pipeline_key(), address(root))


def _forget_sent(root: Path, name: str) -> None:
    with contextlib.suppress(OSError):
        for path in (root / FOLDER).glob(f"{name}-*.jsonl"):
            if _read_state(path).get("complete"):
                path.unlink()
                _state_path(path).unlink(missing_ok=True)


# From here on: the helper process. Only it imports MLflow.


class Sender:
    """Sends the rows of one file to MLflow and remembers how far it came."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        self.state = _read_state(path)
        self.client: Any = None
        self.experiment = ""

    def send(self, follow: bool) -> None:
        """Send what is not yet sent; with `follow`, until the stage writes its end or dies."""
        with self.path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return  # Another process is sending this file.
            file.seek(self.state.get("offset", 0))
            parent = os.getppid()
            while True:
                alive = follow and os.getppid() == parent
                rows = list(_complete_rows(file))
                if rows:
                    self._apply(rows)
                    self._save(offset=file.tell())
                if any(row["kind"] == "end" for row in rows):
                    break
                if not alive and not rows:
                    if not _has_live_writer(self.path):
                        self._finish({"time": time.time(), "status": "KILLED", "seconds": None})
                    break
                time.sleep(POLL_S)

    def _apply(self, rows: list[Row]) -> None:
        if self.client is None:
            self._connect()
        if rows[0]["kind"] == "start":
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

    def _connect(self) -> None:
        uri = address(self.root)
        if uri.startswith("http"):
            probe(uri)
        import mlflow
        from mlflow.tracking import MlflowClient

        mlflow.set_tracking_uri(uri)
        with _lock(self.root):  # Two processes that create the database at once collide.
            if uri.startswith("sqlite:///"):
                Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            self.client = MlflowClient(uri)
            found = self.client.get_experiment_by_name(EXPERIMENT)
            if found is None:
                local = uri.startswith("sqlite:///")
                store_at = (self.root / ".scratch/mlflow/artifacts").resolve().as_uri() if local else None
                self.experiment = self.client.create_experiment(EXPERIMENT, artifact_location=store_at)
            else:
                self.experiment = found.experiment_id

    def _open(self, row: Row) -> None:
        tags = {"mlflow.runName": row["stage"]}
        if row["pipeline"]:
            self.state["parent"] = tags["mlflow.parentRunId"] = self._parent(row)
        run = self.client.create_run(self.experiment, start_time=_ms(row), tags=tags)
        self._save(run_id=run.info.run_id)

    def _parent(self, row: Row) -> str:
        """The pipeline's run: made by whichever stage comes first, then shared through a small file."""
        path = self.root / FOLDER / "pipelines" / f"{row['pipeline']}.json"
        with _lock(self.root):
            try:
                known = store.read_json(path)
            except ValueError:
                known = {}
            if known.get("address") == address(self.root):
                self.client.update_run(known["run_id"], status="RUNNING")
                return str(known["run_id"])
            run = self.client.create_run(
                self.experiment, start_time=_ms(row), run_name=f"pipeline {row['pipeline']}", tags={"kind": "pipeline"}
            )
            store.write_json(path, {"address": address(self.root), "run_id": run.info.run_id})
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

    def _send_tags(self, run_id: str, row: Row) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(key, value[:5000]) for key, value in row["tags"].items()])

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
        for target in (run_id, self.state.get("parent")):
            if target:
                self.client.log_text(target, row["text"], row["name"])

    def _send_trajectory(self, run_id: str, row: Row) -> None:
        """A trace of spans: the question, below it every turn and what the search engine said to it."""
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
        if self.client is None:
            self._connect()
        if row["seconds"] is not None:
            self.client.log_metric(self.state["run_id"], "seconds", row["seconds"])
        self.client.set_terminated(self.state["run_id"], row["status"], _ms(row))
        if parent := self.state.get("parent"):
            self.client.set_terminated(parent, row["status"], _ms(row))
        self._save(complete=True)

    def _save(self, **values: Any) -> None:
        self.state.update(values)
        store.write_json(_state_path(self.path), self.state)


def probe(uri: str) -> None:
    """Ask the server for its health, at most 3 s: a dead or hanging one is found before MLflow is even imported.

    Raises:
        OSError: no good answer.
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


def upload(root: Path = Path(".")) -> tuple[int, int]:
    """Send every record that is not complete; returns how many were sent and how many failed."""
    sent = failed = 0
    for path in sorted((root / FOLDER).glob("*.jsonl")):
        if _read_state(path).get("complete") or _has_live_writer(path):
            continue
        if _try_send(path, root, follow=False):
            sent += 1
        else:
            failed += 1
    return sent, failed


def _close_killed(path: Path, root: Path) -> None:
    """Give earlier runs of the same stage that were killed together with their sender their true state."""
    name = path.name.rsplit("-", 2)[0]
    for other in sorted((root / FOLDER).glob(f"{name}-*.jsonl")):
        state = _read_state(other)
        if other.name == path.name or "run_id" not in state or state.get("complete") or state.get("failed"):
            continue
        if not _has_live_writer(other):
            _try_send(other, root, follow=False)


def _try_send(path: Path, root: Path, follow: bool) -> bool:
    for key, value in HTTP_LIMITS.items():
        os.environ.setdefault(key, value)
    sender = Sender(path, root)
    try:
        sender.send(follow)
    except Exception as error:
        reason = " ".join(f"{hide('', address(root))}: {error}".split())[:300]
        sender._save(failed=reason)
        _mark_down(root, reason)
        print(f"{path.name}: {error!r}", flush=True)
        return False
    return True


def main(words: Iterable[str]) -> int:
    """`send FILE` follows a running stage's record; `upload` sends what is left from earlier runs."""
    match list(words):
        case ["send", path]:
            _close_killed(Path(path), Path("."))
            return 0 if _try_send(Path(path), Path("."), follow=True) else FAILED
        case ["upload"]:
            sent, failed = upload()
            print(f"tracking: {sent} records sent to {hide('', address(Path('.')))}, {failed} failed.")
            return 1 if failed else 0
    print("usage: python -m tasks.stages.tracking upload", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
