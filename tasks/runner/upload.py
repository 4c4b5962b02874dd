"""Sends records to MLflow: `python -m tasks.runner.upload`, or `... follow` while stages work.

One run per pipeline run, and below it one per stage. A clone has one sender at a time, which is no child of a stage. A
batch of rows is marked as sent after MLflow has taken it, and a run is looked up by the name of its record before it is
made, so a sender that is killed loses no row and sends none twice: MLflow takes a metric, parameter, tag, input or file
that it has as the same one. A row that MLflow does not take, although it takes others, is put aside. Why stages do not
call MLflow themselves: docs/servers.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import sqlite3
import sys
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock, Timeout

from tasks import program, store
from tasks.runner import record
from tasks.runner.lock import PIPELINE, is_held
from tasks.runner.record import DATABASE
from tasks.store import Row

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "breadcrumb"
POLL_S, RETRY_S, LINGER_S = 0.3, 2.0, 3.0  # Between two stages of a bare `dvc repro` pass 1.5 s.
ARTIFACTS = Path(".scratch/mlflow/artifacts")
PLACES = ("artifact_location", "artifact_uri", "source", "storage_location", "value")
"""Columns of MLflow's store that hold paths of artifacts; `value` is that of a tag."""
DATABASES = "sqlite|postgres|mysql|mssql|file:|/|[.]"  # What begins so may hold a login or none; MLflow hides it.
BEST = "best/em"
VIEW = "mlflow.sharedViewState.results"  # Opened by .../runs?viewStateShareKey=results&workflowType=machine_learning
# Shown at first sight, behind name and time; a page of 1,400 pixels has room for three, and the first 20 letters of a
# name. MLflow puts metrics before parameters, so a second metric would push the seeds out of sight.
COLUMNS = ["metrics.`best/em`", "params.`params.scale`", "params.`params.seeds`"]
STATUSES = ("RUNNING", "FINISHED", "KILLED", "FAILED")  # A pipeline run ends like the worst of its stages.
MAX_NAME, MAX_PARAM, MAX_TAG, MAX_DATASET = 250, 6000, 8000, 500  # Characters that MLflow takes.
ASIDE = f"All else is sent; `make upload` lists what lies in {record.REFUSED}"
ABOUT = ("dataset", "hops", "policy", "seed", "step", "mode", "status")  # Of a trajectory, shown with its trace.
KEPT = f"the rows are kept in {record.FOLDER} and sent by the next run, or by `make upload`"
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # The sender itself tries again. By default a call blocks for 246 s.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


class Server(NamedTuple):
    """A client of the tracking server, and the id of our experiment on it."""

    client: MlflowClient
    experiment: str


def connect(root: Path) -> Server:
    """Open the server, or the clone's own database, and our experiment on it.

    Raises:
        ValueError: the address may hold secrets, which MLflow would show in messages and send to resolvers.
        Exception: whatever the server or MLflow answers.
    """
    uri = record.address(root)
    if not re.match(DATABASES, uri, re.IGNORECASE) and re.search("[@?]", uri):
        raise ValueError(
            "MLFLOW_TRACKING_URI: expected http://host:port, without a login or a query. Put the login into "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a token into MLFLOW_TRACKING_TOKEN."
        )
    if "MLFLOW_TRACKING_URI" not in os.environ:
        _follow_clone(root)
    os.environ |= VARIABLES | os.environ
    import mlflow

    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient(uri)
    known = client.get_experiment_by_name(EXPERIMENT)
    if known and known.lifecycle_stage == "deleted":  # On MLflow's page; what comes now belongs there all the same.
        client.restore_experiment(known.experiment_id)
    place = _place(root) if uri.startswith("sqlite:") else None
    view = json.dumps({"selectedColumns": COLUMNS})  # MLflow opens its page on traces without one.
    if known is None:
        return Server(client, client.create_experiment(EXPERIMENT, place, {VIEW: view}))
    if known.tags.get(VIEW) != view:
        client.set_experiment_tag(known.experiment_id, VIEW, view)
    return Server(client, known.experiment_id)


def _place(root: Path) -> str:
    return (root / ARTIFACTS).resolve().as_uri()


def _follow_clone(root: Path) -> None:
    """Point the clone's own store at the artifacts of this clone, if it was moved or copied: MLflow notes whole paths.

    Otherwise it would write into the folder that the clone was made in, and read policies from there.
    """
    path, place = root / DATABASE, _place(root)
    if not path.is_file():
        return
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as store, store:
        noted = store.execute("SELECT artifact_location FROM experiments WHERE name = ?", [EXPERIMENT]).fetchone()
        if noted is None or noted[0] == place or not str(noted[0]).endswith(f"/{ARTIFACTS}"):
            return
        for (table,) in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, column, *_ in store.execute(f'PRAGMA table_info("{table}")').fetchall():
                if column in PLACES:
                    moved = f'UPDATE "{table}" SET "{column}" = ? || substr("{column}", ?)'
                    length = len(noted[0]) + 1
                    begins = f'{moved} WHERE substr("{column}" || ?, 1, ?) = ?'  # The place, or what lies in it.
                    store.execute(begins, [place, length, "/", length, f"{noted[0]}/"])


class Sending:
    """One record, and what has been sent of it: the run, the offset of the rows that have not, and to which address."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root, self.state = path, root, record.read_state(path)
        self.reason = ""  # Why a row was put aside.
        self.first = next(_rows(path, 0), ({}, 0))[0]
        to = record.shown(record.address(root))
        if self.state.get("to") != to:  # What another server has of it does not count here.
            self.state = {"to": to, "offset": 0}

    def has_news(self) -> bool:
        """Whether there are more rows, or the stage has ended."""
        return self.path.stat().st_size > self.state["offset"] or not is_held(self.path)

    def send(self, server: Server) -> bool:
        """Send the rows that are there; True when that was the whole record, which is then removed.

        Raises:
            Exception: whatever the server or MLflow answers; the rows are still there.
        """
        self.client, self.experiment = server
        is_alive = is_held(self.path)  # Asked first: a stage that ends in between has written its last rows.
        for (kind, _), found in itertools.groupby(_rows(self.path, self.state["offset"]), _chunk):
            rows, offsets = zip(*found, strict=True)
            self._take(kind, rows)
            self._save(offset=offsets[-1], has_ended=kind == "end" or self.state.get("has_ended", False))

        if not self.state.get("has_ended"):
            if is_alive:
                return False
            if "run" in self.state:
                self._end({"status": "KILLED", "time": self.path.stat().st_mtime})
        shutil.rmtree(self.path.with_suffix(""), ignore_errors=True)
        self.path.unlink()
        return True

    def _take(self, kind: str, rows: Sequence[Row]) -> None:
        """Hand rows of one kind to MLflow, or put those aside which it does not take while it takes others.

        Raises:
            Exception: MLflow takes nothing now, or a file cannot be read or written.
        """
        try:
            return self._hand_on(kind, rows)
        except Exception as error:
            if isinstance(error, OSError) and getattr(error, "response", None) is None:
                raise  # A full disk, a folder of another user: not the fault of these rows.
            if len(rows) > 1:
                for row in rows:
                    self._take(kind, [row])
                return None

        self.client.set_experiment_tag(self.experiment, "asked", str(time.time()))  # Raises where nothing is taken.
        try:
            self._hand_on(kind, rows)
        except Exception as error:
            self._put_aside(rows[0], error)

    def _hand_on(self, kind: str, rows: Sequence[Row]) -> None:
        if "run" not in self.state and kind not in ("start", "pipeline"):
            raise ValueError("its run was not begun")
        getattr(self, f"_{kind}")(*rows)

    def _put_aside(self, row: Row, error: Exception) -> None:
        """Keep a row with the reason in a file beside the queue."""
        reason = " ".join(record.hide("", f"{type(error).__name__}: {error}").split())[:300]
        path = self.root / record.REFUSED / self.path.name
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"reason": reason, **row}) + "\n")
        self.reason = self.reason or f"{self.path.stem}: {reason}"

    def _save(self, **values: Any) -> None:
        self.state |= values
        store.write_json(self.path.with_suffix(record.STATE), self.state)

    @property
    def _runs(self) -> list[str]:
        """The stage's run and the pipeline's, if there is one."""
        return [self.state[key] for key in ("run", "parent") if key in self.state]

    def _start(self, row: Row) -> None:
        tags = {"mlflow.runName": _cut(row["stage"], MAX_NAME), "record": self.path.stem}
        if row["pipeline"]:
            self.state["parent"] = tags["mlflow.parentRunId"] = self._pipeline_run(row)
        self._save(run=self._run("record", row, tags).run_id)

    def _pipeline(self, row: Row) -> None:
        self._save(run=self._pipeline_run(row), is_pipeline=True)

    def _pipeline_run(self, row: Row) -> str:
        """The id of the pipeline's run, to which something is added now."""
        about = {"mlflow.runName": _cut(row["title"], MAX_NAME), "kind": "pipeline", "pipeline": row["pipeline"]}
        found = self._run("pipeline", row, about)
        if found.status == "FINISHED":
            self.client.update_run(found.run_id, "RUNNING")
        return str(found.run_id)

    def _run(self, key: str, row: Row, tags: dict[str, str]) -> Any:
        """Of the run whose tag `key` is that of `tags`; it is made if there is none."""
        tags[key] = re.sub(r"['\"`\\]", "_", tags[key])  # It is quoted in the search.
        known = self.client.search_runs([self.experiment], f"tags.{key} = '{tags[key]}'", max_results=1)
        return (known[0] if known else self.client.create_run(self.experiment, _ms(row), tags)).info

    def _batch(self, *rows: Row) -> None:
        from mlflow.entities import Metric, Param, RunTag

        shared = [row for row in rows if row.get("shared")]
        for run, chosen in zip(self._runs, (rows, shared), strict=False):
            metrics = [Metric(k, v, _ms(row), row["step"]) for row in chosen for k, v in _named(row, "metrics")]
            params = [Param(k, _cut(v, MAX_PARAM)) for row in chosen for k, v in _named(row, "params")]
            tags = [RunTag(k, _cut(v, MAX_TAG)) for row in chosen for k, v in _named(row, "tags")]
            self.client.log_batch(run, metrics, params, tags)

        if scores := {name: value for row in shared for name, value in _named(row, "metrics") if name.endswith("/em")}:
            self._show_score(scores.get(BEST, next(iter(scores.values()))))

    def _show_score(self, score: float) -> None:
        """Begin the pipeline's name with its exact match: it is what MLflow's page shows on every screen."""
        if "parent" in self.state:
            run = self.client.get_run(self.state["parent"])
            name = re.sub(r"^EM \S+ · ", "", run.info.run_name)
            self.client.update_run(run.info.run_id, name=_cut(f"EM {score:.3f} · {name}", MAX_NAME))

    def _input(self, row: Row) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        profile = json.dumps({"num_rows": row["num_rows"], "sha256": row["digest"]})
        name = _cut(row["name"], MAX_DATASET) or "data"
        data = Dataset(name, row["digest"][:8], "local", json.dumps({"uri": row["path"]}), profile=profile)
        for run in self._runs:
            self.client.log_inputs(run, [DatasetInput(data, [InputTag("mlflow.data.context", row["context"])])])

    def _artifact(self, row: Row) -> None:
        path = self.root / (row.get("kept") or row["path"])
        for run in self._runs if row.get("shared") else self._runs[:1]:
            if path.exists():
                self.client.log_artifact(run, str(path))
            else:  # Too large to be kept.
                self.client.set_tag(run, named(f"artifact.{path.name}"), _cut(row["path"], MAX_TAG))

    def _trajectory(self, row: Row) -> None:
        """A trace of spans: the question, below it every turn, and below a turn its observation."""
        from mlflow import start_span_no_context as start

        played = row["row"]
        asked = {key: played.get(key) for key in ("question", "answers")}
        about = {key: played[key] for key in ABOUT if played.get(key) is not None}
        source = {"mlflow.sourceRun": self.state["run"]}
        name, experiment = played["question_id"], self.experiment
        trace = start(name, inputs=asked, attributes=about, metadata=source, experiment_id=experiment)
        for number, turn in enumerate(played["turns"], 1):
            # A system that is asked over HTTP has texts, and no tokens.
            wrote = {"wrote": "".join(turn.get("tokens") or []) or turn.get("text") or turn.get("content")}
            about = {"reward": turn.get("reward", 0.0), "executed": bool(turn.get("executed"))}
            span = start(f"{number} {turn['kind']}", parent_span=trace, inputs=wrote, attributes=about)
            if turn.get("observation"):
                start("information", "RETRIEVER", span).end(outputs=turn["observation"])
            span.end(outputs=turn.get("content"))
        trace.end(outputs={key: played.get(key) for key in ("answer", "outcome")})
        self.client.get_trace(trace.trace_id, display=False)  # MLflow hides that a trace was not taken; this raises.

    def _end(self, row: Row) -> None:
        run, *parents = self._runs
        if "seconds" in row:
            self.client.log_metric(run, "seconds", row["seconds"], _ms(row), 0)
        if not self.state.get("is_pipeline"):
            self.client.set_terminated(run, row["status"], _ms(row))
        for pipeline in [run] if self.state.get("is_pipeline") else parents:
            info = self.client.get_run(pipeline).info
            status = max(row["status"], info.status, key=STATUSES.index)
            self.client.set_terminated(pipeline, status, max(_ms(row), info.end_time or 0))


def _rows(path: Path, offset: int) -> Iterator[tuple[Row, int]]:
    """The rows from `offset` on, each with the offset behind it, without one that is still being written."""
    with path.open("rb") as file:
        file.seek(offset)
        while (line := file.readline()).endswith(b"\n"):
            yield _read(line), file.tell()


def _read(line: bytes) -> Row:
    """A row; one that a disk has damaged is of kind `unreadable`, which nothing takes."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(row := json.loads(line), dict) and isinstance(row.get("kind"), str):
            return row
    return {"kind": "unreadable", "line": line.decode("utf-8", "replace")}


def _named(row: Row, key: str) -> Iterator[tuple[str, Any]]:
    """The entries of one mapping of a row, under names that MLflow takes."""
    entries: Mapping[str, Any] = row.get(key) or {}
    for name, value in entries.items():
        yield named(name), value


def named(text: str) -> str:
    """The text as a name of a metric, parameter or tag; one that had to be changed ends with its hash.

    So two names stay two, whatever was replaced in them.

    >>> named("nq/em"), named("2Wiki (v2)/em")
    ('nq/em', '2Wiki _v2_/em 04bc12')
    """
    parts = re.sub(r"[^\w./: -]", "_", unicodedata.normalize("NFC", text)).split("/")
    # MLflow takes a name for a path, which must not be another one than it seems.
    name = "/".join(part if part.strip(".") and not part.startswith("..") else f"_{part.strip('.')}" for part in parts)
    if name == text and len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 7]} {hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _chunk(found: tuple[Row, int]) -> tuple[str, int]:
    """Rows that are sent together: those of kind `batch` in 64 KB of the record; every other one is alone."""
    row, offset = found
    return row["kind"], offset >> 16 if row["kind"] == "batch" else offset


def _ms(row: Row) -> int:
    return int(row["time"] * 1000)


class Sender:
    """Sends the records of one clone.

    Args:
        root: root of the clone.
        is_following: only records for our address; else all.
    """

    def __init__(self, root: Path, is_following: bool) -> None:
        self.root, self.to, self.is_following = root, record.shown(record.address(root)), is_following
        self.refused: set[Path] = set()
        self.num_sent = 0
        self._has_warned = False

    def waiting(self) -> list[Sending]:
        """The records that are not sent whole, in the order of their starts, without those that MLflow refused."""
        paths = set((self.root / record.FOLDER).glob("*.jsonl")) - self.refused
        begun = [one for one in (Sending(path, self.root) for path in paths) if one.first]
        if self.is_following:
            begun = [one for one in begun if one.first.get("to") == self.to]
        return sorted(begun, key=lambda one: one.first.get("time", 0))  # The first one says when the run began.

    def send(self, sendings: list[Sending]) -> bool:
        """Send what is there; False if the server cannot be used."""
        server = None
        for sending in filter(Sending.has_news, sendings):
            try:
                server = server or connect(self.root)
                self.num_sent += sending.send(server)
                (self.root / record.WARNING).unlink(missing_ok=True)
                if sending.reason:
                    self._warn("a part of a record was put aside", sending.reason, f"{ASIDE}.")
            except Exception as error:
                self._warn("tracking stopped", error, f"The work goes on; {KEPT}.")
                if server is None:
                    return False
                self.refused.add(sending.path)
        return True

    def _warn(self, what: str, reason: object, then: str) -> None:
        """Print the failure into our log; leave the first one for a stage to print."""
        told = f"{self.to}: {' '.join(record.hide('', reason).split())}"[:300]
        print(told, flush=True)
        if self.is_following and not self._has_warned:
            self._has_warned = True
            with store.replacing(self.root / record.WARNING) as file:  # A stage reads it at any time.
                file.write(f"warning: {what}: {told}. {then}".encode(errors="replace"))

    def follow(self) -> bool:
        """Send until stages and flow have been at rest for a moment; False if the server cannot be used then."""
        last_busy = time.monotonic()
        while True:
            sendings = self.waiting()
            is_usable = self.send(sendings)
            if any(is_held(sending.path) for sending in sendings):
                last_busy = time.monotonic()
            elif not is_usable or time.monotonic() - last_busy > LINGER_S:
                if not is_held(self.root / PIPELINE):  # Asked seldom: a run that begins finds its lock free.
                    return is_usable
                last_busy = time.monotonic()
            time.sleep(POLL_S if is_usable else RETRY_S)


def main(words: list[str], root: Path = Path(".")) -> int:
    """Send what earlier runs have left, or be the sender of this clone while stages work."""
    (root / record.FOLDER).mkdir(parents=True, exist_ok=True)
    sender = Sender(root, is_following=words == ["follow"])
    lock = FileLock(root / record.SENDER, timeout=0.5 if sender.is_following else 30)
    try:
        if sender.is_following:
            _follow(sender, lock)
            return 0
        with lock:
            sender.send(sender.waiting())
            with contextlib.suppress(Exception):
                connect(root)  # Our experiment is there even if no record is.
    except Timeout:
        print("tracking: a run is at work in this clone, and its sender has these records.")
        return 1

    num_left = len(sender.refused) + len(sender.waiting())
    print(f"tracking: {sender.num_sent} records sent to {sender.to}, {num_left} left.")
    for line in refused(root):
        print(line)
    return 1 if num_left else 0


def refused(root: Path) -> list[str]:
    """One line for each record of which MLflow did not take everything."""
    lines = []
    for path in sorted((root / record.REFUSED).glob("*.jsonl")):
        rows = [row for row, _ in _rows(path, 0)]
        if rows:  # None where the disk was full.
            lines += [f"MLflow did not take {len(rows)} rows of {path.relative_to(root)}: {rows[0].get('reason')}"]
    return [*lines, f"All else was sent. Remove {record.REFUSED} when you have read it."] if lines else []


def _follow(sender: Sender, lock: FileLock) -> None:
    """A stage writes its first row and then looks for a sender; a sender frees its lock and then looks for rows."""
    is_usable = True
    while is_usable and sender.waiting():
        with lock:
            is_usable = sender.follow()


if __name__ == "__main__":
    program.run(lambda: main(sys.argv[1:]))
