"""Sends records to MLflow: `python -m tasks.runner.upload`, or `... follow PROCESS` while that process lives.

One run per pipeline run, and below it one per stage. A clone has one sender at a time, which is no child of a stage. A
batch of rows is marked as sent after MLflow has taken it, and a run is looked up by the name of its record before it is
made, so a sender that is killed loses no row and sends none twice. MLflow takes a metric, parameter, tag, input or file
that it has as the same one.

Why stages do not call MLflow themselves: docs/servers.md.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import psutil

from tasks import store
from tasks.runner import record
from tasks.runner.lock import held, is_held
from tasks.runner.record import Row

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "breadcrumb"
LOGIN = re.compile(r"([^:/?#]+):(?!\d+[/?#])(.+)")  # Digits and a slash would be a port and a path: no password.
POLL_S, RETRY_S, LINGER_S = 0.2, 10.0, 2.0
MAX_ROWS, MAX_METRICS, MAX_OTHERS, MAX_ARTIFACT_MB = 200, 1000, 100, 200
VIEW = "mlflow.sharedViewState.results"  # Opened by .../runs?viewStateShareKey=results&workflowType=machine_learning
COLUMNS = ["attributes.`Dataset`"]  # Shown at first sight, behind the exact match of each system.
BADNESS = {"RUNNING": 0, "FINISHED": 0, "KILLED": 1, "FAILED": 2}  # A pipeline run ends like the worst of its stages.
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # The sender itself tries again. By default a call blocks for 246 s.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}


@dataclass(frozen=True)
class Server:
    """A client of the tracking server, and the id of our experiment on it."""

    client: MlflowClient
    experiment: str


def connect(root: Path) -> Server:
    """Open the server, or the clone's own database, and our experiment on it.

    The login in an address goes to MLflow's own variables, so that no address with a password reaches a resolver, a log
    or a message.

    Raises:
        ValueError: the address cannot be used; the message does not show its secrets.
        Exception: whatever the server or MLflow answers.
    """
    uri = record.address(root)
    if uri.startswith(("http://", "https://")):
        uri = _without_login(uri)
    for key, value in VARIABLES.items():
        os.environ.setdefault(key, value)
    os.environ["MLFLOW_TRACKING_URI"] = uri
    import mlflow

    mlflow.set_tracking_uri(uri)
    if uri.startswith("http"):
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        http_request(get_default_host_creds(uri), "/health", "GET", timeout=3)  # One that hangs is found quickly.
    file = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None
    with held(root / record.FOLDER / "connect.lock", 60):  # Two processes that make the database would collide.
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        client = mlflow.MlflowClient(uri)
        known = client.get_experiment_by_name(EXPERIMENT)
        place = (root / ".scratch/mlflow/artifacts").resolve().as_uri() if file is not None else None
        view = {VIEW: json.dumps({"selectedColumns": COLUMNS})}  # MLflow opens its page on traces without one.
        number = known.experiment_id if known else client.create_experiment(EXPERIMENT, place, view)
        if known and VIEW not in known.tags:
            client.set_experiment_tag(number, VIEW, view[VIEW])
    return Server(client, number)


def _without_login(uri: str) -> str:
    """The address alone. A password may hold @ and / and ?, but nothing that may be a host is taken for a login."""
    scheme, _, rest = uri.partition("://")
    login, _, place = rest.rpartition("@")
    found = LOGIN.fullmatch(login)
    if "?" in place or (login and not found):
        raise ValueError(
            "MLFLOW_TRACKING_URI: expected http://host:port or http://user:password@host:port, with %2F, %3F and %40 "
            "for the signs / ? @ of a password, and a token in MLFLOW_TRACKING_TOKEN"
        )
    if found:
        user, password = map(unquote, found.groups())
        os.environ |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
    return f"{scheme}://{place}"


class Sending:
    """One record, and what has been sent of it: the run, the offset of the rows that have not, and to which address.

    Args:
        path: of the record, which need not have a row yet.
        root: root of the clone.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root
        with path.open(encoding="utf-8") as file:
            self.first = next((row for row, _ in _rows(file)), {})
        self.state = record.read_state(path)
        to = record.shown(record.address(root))
        if self.state.get("to") != to:  # What another server has of it does not count here.
            self.state = {"to": to, "offset": 0}

    def send(self, server: Server) -> bool:
        """Send the rows that are there; True when that was the whole record, which is then removed.

        Raises:
            Exception: whatever the server or MLflow answers; the rows are still there.
        """
        was_alive = is_held(self.path)  # Asked first: a stage that ends in between has written its last rows.
        is_ended = False
        with self.path.open(encoding="utf-8") as file:
            file.seek(self.state["offset"])
            for is_batch, found in itertools.groupby(_rows(file), lambda row: row[0]["kind"] == "batch"):
                while taken := list(itertools.islice(found, MAX_ROWS if is_batch else 1)):
                    self._apply(server, [row for row, _ in taken])
                    self._save(offset=taken[-1][1])
                    is_ended = taken[-1][0]["kind"] == "end"

        if not is_ended and was_alive:
            return False
        if not is_ended and "run" in self.state:
            self._end(server, {"status": "KILLED", "seconds": None, "time": self.path.stat().st_mtime})
        self.path.unlink()
        return True

    def _save(self, **values: Any) -> None:
        self.state |= values
        store.write_json(record.state_path(self.path), self.state)

    def _apply(self, server: Server, rows: list[Row]) -> None:
        if rows[0]["kind"] == "batch":
            _log_batch(server, self.state["run"], rows)
            if parent := self.state.get("parent"):
                shared = [row for row in rows if row.get("shared")]
                _log_batch(server, parent, shared)
                _show_columns(server, {name for row in shared for name in row.get("metrics", {})})
        else:
            getattr(self, f"_{rows[0]['kind']}")(server, rows[0])

    def _start(self, server: Server, row: Row) -> None:
        tags = {"mlflow.runName": row["stage"], "record": self.path.stem}
        if row["pipeline"]:
            about = {"mlflow.runName": row["title"], "kind": "pipeline", "pipeline": row["pipeline"]}
            parent = _run(server, "pipeline", row, about)
            self.state["parent"] = tags["mlflow.parentRunId"] = parent.info.run_id
            if not BADNESS[parent.info.status]:
                server.client.update_run(parent.info.run_id, "RUNNING")
        self._save(run=_run(server, "record", row, tags).info.run_id)

    def _both(self) -> list[str]:
        return [run for run in (self.state["run"], self.state.get("parent")) if run]

    def _input(self, server: Server, row: Row) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        profile = json.dumps({"num_rows": row["num_rows"], "sha256": row["digest"]})
        data = Dataset(row["name"], row["digest"][:8], "local", json.dumps({"uri": row["path"]}), profile=profile)
        tags = [InputTag("mlflow.data.context", row["context"])] if row["context"] else []
        for run in self._both():
            server.client.log_inputs(run, [DatasetInput(data, tags)])

    def _artifact(self, server: Server, row: Row) -> None:
        run, path = self.state["run"], self.root / row["path"]
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        if sum(file.stat().st_size for file in files) > MAX_ARTIFACT_MB << 20:
            server.client.set_tag(run, f"artifact.{path.name}", row["path"])
        elif path.is_dir():
            server.client.log_artifacts(run, str(path), row["folder"] or path.name)
        elif path.is_file():
            server.client.log_artifact(run, str(path), row["folder"])

    def _table(self, server: Server, row: Row) -> None:
        for run in self._both():
            server.client.log_text(run, row["text"], row["name"])

    def _trajectory(self, server: Server, row: Row) -> None:
        """A trace of spans: the question, below it every turn, and below a turn its observation."""
        from mlflow import start_span_no_context as start_span

        played = row["row"]
        attributes = {k: played.get(k) for k in ("dataset", "hops", "policy", "seed", "step", "mode", "status")}
        root = start_span(
            played["question_id"],
            inputs={"question": played.get("question"), "answers": played.get("answers")},
            attributes={key: value for key, value in attributes.items() if value is not None},
            metadata={"mlflow.sourceRun": self.state["run"]},
            experiment_id=server.experiment,
        )
        for number, turn in enumerate(played.get("turns", []), 1):
            span = start_span(f"{number} {turn['kind']}", "UNKNOWN", root, {"wrote": "".join(turn.get("tokens", []))})
            span.set_attributes({"reward": turn.get("reward", 0.0), "executed": bool(turn.get("executed"))})
            if turn.get("observation"):
                start_span("information", "RETRIEVER", span).end(outputs=turn["observation"])
            span.end(outputs=turn.get("content"))
        root.end(outputs={"answer": played.get("answer"), "outcome": played.get("outcome")})
        server.client.get_trace(root.trace_id, display=False)  # MLflow hides that a trace was not taken; this raises.

    def _end(self, server: Server, row: Row) -> None:
        run, parent = self.state["run"], self.state.get("parent")
        if row["seconds"] is not None:
            server.client.log_metric(run, "seconds", row["seconds"], _ms(row), 0)
        server.client.set_terminated(run, row["status"], _ms(row))
        if parent:
            info = server.client.get_run(parent).info
            status = max(row["status"], info.status, key=lambda name: BADNESS[name])
            server.client.set_terminated(parent, status, max(_ms(row), info.end_time or 0))


def _run(server: Server, key: str, row: Row, tags: dict[str, str]) -> Any:
    """The run whose tag `key` is that of `tags`; made if there is none."""
    known = server.client.search_runs([server.experiment], f"tags.{key} = '{tags[key]}'", max_results=1)
    return known[0] if known else server.client.create_run(server.experiment, _ms(row), tags)


def _log_batch(server: Server, run: str, rows: list[Row]) -> None:
    """Metrics, parameters and tags of these rows, in as few calls as MLflow's limits allow."""
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(k, v, _ms(row), row["step"]) for row in rows for k, v in row.get("metrics", {}).items()]
    params = [Param(k, v[:6000]) for row in rows for k, v in row.get("params", {}).items()]
    tags = [RunTag(k, v[:5000]) for row in rows for k, v in row.get("tags", {}).items()]
    for i in range(0, len(metrics), MAX_METRICS):
        server.client.log_batch(run, metrics=metrics[i : i + MAX_METRICS])
    for i in range(0, max(len(params), len(tags)), MAX_OTHERS):
        server.client.log_batch(run, params=params[i : i + MAX_OTHERS], tags=tags[i : i + MAX_OTHERS])


def _show_columns(server: Server, metrics: set[str]) -> None:
    """Add the exact match of each system to the columns of the view that `VIEW` opens; by default there are none."""
    columns = {f"metrics.`{name}`" for name in metrics if name.endswith("/em")}
    tags = server.client.get_experiment(server.experiment).tags if columns else {}
    shown = json.loads(tags.get(VIEW, "{}")).get("selectedColumns", COLUMNS)
    if new := sorted(columns - set(shown)):
        server.client.set_experiment_tag(server.experiment, VIEW, json.dumps({"selectedColumns": [*new, *shown]}))


def _rows(file: Any) -> Iterator[tuple[Row, int]]:
    """The rows from here, each with the offset behind it, without one that is still being written."""
    while (line := file.readline()).endswith("\n"):
        yield json.loads(line), file.tell()


def _ms(row: Row) -> int:
    return int(row["time"] * 1000)


class Sender:
    """Sends the records of one clone.

    Args:
        root: root of the clone.
        is_following: only records for our address, while their stages work; else all those of ended stages.
    """

    def __init__(self, root: Path, is_following: bool) -> None:
        self.root, self.to, self.is_following = root, record.shown(record.address(root)), is_following
        self.server: Server | None = None
        self.failed: set[Path] = set()
        self.num_sent = 0
        self._has_warned = False

    def waiting(self) -> list[Sending]:
        """The records that are not sent whole, in the order of their starts, without those that MLflow refused."""
        paths = [path for path in sorted((self.root / record.FOLDER).glob("*.jsonl")) if path not in self.failed]
        found = [Sending(path, self.root) for path in paths if self.is_following or not is_held(path)]
        known = [one for one in found if one.first and (not self.is_following or one.first["to"] == self.to)]
        return sorted(known, key=lambda one: one.first["time"])  # The first one says when the pipeline run began.

    def send(self, sendings: list[Sending]) -> bool:
        """Send what is there; False if the server cannot be used."""
        for sending in sendings:
            try:
                self.server = self.server or connect(self.root)
                self.num_sent += sending.send(self.server)
                (self.root / record.WARNING).unlink(missing_ok=True)
            except Exception as error:
                self._warn(error)
                try:
                    self.server = connect(self.root)
                except Exception:
                    return False
                self.failed.add(sending.path)
        return True

    def _warn(self, error: Exception) -> None:
        """Print the failure into our log; leave the first one for a stage to print."""
        text = record.hide("", str(error).replace(record.address(self.root), self.to))
        reason = f"{self.to}: {' '.join(text.split())}"[:300]
        print(reason, flush=True)
        if self.is_following and not self._has_warned:
            self._has_warned = True
            (self.root / record.WARNING).write_text(
                f"warning: tracking stopped: {reason}. The work goes on; the rows are kept in {record.FOLDER} and sent "
                "by the next run, or by `make upload`.",
                encoding="utf-8",
            )

    def follow(self, owners: set[int]) -> bool:
        """Send until these processes and those of all records have ended; False if the server cannot be used then."""
        alone_since = time.monotonic()
        while True:
            sendings = self.waiting()
            owners |= {sending.first["owner"] for sending in sendings if is_held(sending.path)}
            is_usable = self.send(sendings)

            until = time.monotonic() + (POLL_S if is_usable else RETRY_S)
            while owners := set(filter(_is_alive, owners)):
                alone_since = time.monotonic()
                if alone_since > until:
                    break
                time.sleep(POLL_S)
            if not owners and (not is_usable or time.monotonic() - alone_since > LINGER_S):
                return is_usable
            time.sleep(POLL_S)


def _is_alive(number: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    return False


def main(words: Sequence[str], root: Path = Path(".")) -> int:
    """Send what earlier runs have left, or be the sender of this clone while a process lives."""
    if words[:1] == ["follow"]:
        _follow(root, int(words[1]))
        return 0
    with held(root / record.SENDER, 30) as is_ours:
        if not is_ours:
            print("tracking: a run is at work in this clone, and its sender has these records.")
            return 1
        sender = Sender(root, is_following=False)
        with contextlib.suppress(Exception):  # Our experiment is there even if no record is.
            sender.server = connect(root)
        sender.send(sender.waiting())
    num_left = len(sender.failed) + len(sender.waiting())
    print(f"tracking: {sender.num_sent} records sent to {sender.to}, {num_left} left.")
    return 1 if num_left else 0


def _follow(root: Path, owner: int) -> None:
    """A stage writes its first row and then looks for a sender; a sender frees its lock and then looks for rows."""
    while True:
        with held(root / record.SENDER, 0.5) as is_ours:
            sender = Sender(root, is_following=True)
            if not is_ours or not sender.follow({owner}):
                return
        if not sender.waiting():
            return


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
