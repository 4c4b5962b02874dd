"""What a stage reports while it works: rows that it appends to a local file, its record.

The record is `.scratch/tracking/<stage>-<start>-<random>.jsonl`. A stage never waits for a server and never imports
MLflow: `tasks.runner.upload` sends the rows. The first stage starts that process, one for all stages of the clone, and
whatever it could not send stays in the record. Nothing here decides or changes a result, and no call raises.

Environment: `MLFLOW_TRACKING_URI` names a server (default: a database in `.scratch/mlflow/`),
`BREADCRUMB_TRACKING=off` keeps the local file only, `BREADCRUMB_RUN` is the key of the pipeline run and
`BREADCRUMB_NAME` its name in MLflow, `BREADCRUMB_OWNER` is the process with which it ends.
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
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tasks import conf, store
from tasks.runner.git import Commit, read_commit
from tasks.runner.lock import is_held

Row = dict[str, Any]

FOLDER = Path(".scratch/tracking")
SENDER = FOLDER / "sender.lock"  # Held by the process that sends the records of this clone.
WARNING = FOLDER / "warning.txt"  # Written by the sender, printed and removed by the first stage that sees it.
SECONDS_BETWEEN_LOOKS = 1.0
MOST_NAMES = 4
SECRET_KEY = re.compile(r"(^|[._])(secret|password|passwd|token|api_?key|access_?key|credentials?)$", re.IGNORECASE)
LOGIN = re.compile(r"://\S*@")  # Up to the last @, because a password may hold / and @.
SECRET_IN_QUERY = re.compile(r"([?&][\w.-]*(?:secret|passw|token|key|credential)[\w.-]*=)[^&\s]*", re.IGNORECASE)


class Track:
    """The handle that a stage reports to. Every method returns at once; a failure gives one warning."""

    def __init__(self, name: str, path: Path | None, root: Path) -> None:
        self.record = None if path is None else path.stem
        self._name, self._root = name, root
        self._file: IO[str] | None = None
        self._looked = 0.0
        if path is not None:
            with self._guard():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8")
                fcntl.flock(self._file, fcntl.LOCK_EX)  # The kernel frees it when this process dies, however it does.

    def log_params(self, settings: object) -> None:
        """The settings that were used, a dataclass or a mapping; nested keys are joined with dots."""
        self._write("batch", params=flatten(conf.plain(settings)))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step."""
        self._write("batch", step=int(step), metrics={key: float(value) for key, value in metrics.items()})

    def log_results(self, metrics: Mapping[str, float]) -> None:
        """Final numbers by which pipeline runs are compared, kept with the stage's run and with the pipeline's."""
        self._write("batch", step=0, metrics={key: float(value) for key, value in metrics.items()}, shared=True)

    def set_tags(self, tags: Mapping[str, object], shared: bool = False) -> None:
        """Labels of the run, such as data hashes, seed and system; `shared` ones are the pipeline's, too."""
        self._write("batch", tags={key: hide(key, value) for key, value in tags.items()}, shared=shared)

    def log_inputs(self, name: str, path: Path, digest: str, num_rows: int | None = None, context: str = "") -> None:
        """A data set that the stage read: its name, its path in the clone, and the hash of its content."""
        self._write("input", name=name, path=str(path), digest=digest, num_rows=num_rows, context=context)
        self.set_tags({f"data.{name}": digest})

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """A file or folder to keep with the run; above 200 MB only its path is kept."""
        self._write("artifact", path=str(path), folder=folder)

    def log_table(self, name: str, markdown: str) -> None:
        """A result table, kept with the stage's run and with the pipeline's."""
        self._write("table", name=name, text=markdown)

    def log_trajectory(self, row: Row) -> None:
        """One row of `trajectories.jsonl`, shown as a trace."""
        self._write("trajectory", row=row)

    def end(self, status: str, seconds: float) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        self._looked = 0.0
        self._write("end", status=status, seconds=round(seconds, 2))

    def _write(self, kind: str, **row: Any) -> None:
        if self._file is None:
            return
        with self._guard():
            self._file.write(json.dumps({"kind": kind, "time": time.time(), **row}, ensure_ascii=False) + "\n")
            self._file.flush()
            if time.monotonic() - self._looked > SECONDS_BETWEEN_LOOKS:
                self._looked = time.monotonic()
                self._show_warning()

    def _show_warning(self) -> None:
        """Print the sender's warning. Only one process can rename the file, so only one prints it."""
        shown = (self._root / WARNING).with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            (self._root / WARNING).rename(shown)
            print(shown.read_text(encoding="utf-8"), file=sys.stderr, flush=True)
            shown.unlink()

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
    _forget(root, name)
    track = Track(name, root / FOLDER / f"{name}-{stamp}-{uuid.uuid4().hex[:8]}.jsonl", root)
    is_on = os.environ.get("BREADCRUMB_TRACKING", "on") != "off"
    key, owner = _pipeline()
    to = shown(address(root)) if is_on else None
    given = os.environ.get("BREADCRUMB_NAME") or os.environ.get("DVC_EXP_NAME")
    track._write("start", stage=name, pipeline=key, title=given or title(params), owner=owner, to=to)

    code = code or read_commit(root)
    group, _, item = name.partition("@")
    system, _, last = item.rpartition("-")
    seed = last if last.isdecimal() else ""
    track.set_tags({"stage": group, "item": item, "seed": seed, "system": system if seed else item})
    about = {"git_commit": code.sha or "none", "git_dirty": code.is_dirty, "config_digest": store.digest(params)}
    track.set_tags(about, shared=True)
    track._write("batch", params=flatten({"params": params}), shared=True)

    with track._guard():
        # After the first row is written: a sender that ends frees its lock and then looks for rows once more.
        if is_on and not is_held(root / SENDER):
            _start_sender(root, owner)
    return track


def run_id(root: Path, record: str | None) -> str | None:
    """The MLflow run of a record; None where none was begun."""
    return read_state(root / FOLDER / f"{record}.jsonl").get("run") if record else None


def state_path(path: Path) -> Path:
    """The file in which the sender notes what it has sent of the record `path`."""
    return path.with_suffix(".sent.json")


def read_state(path: Path) -> Row:
    """What has been sent of the record `path`; empty where nothing has."""
    try:
        return dict(json.loads(state_path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


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
    """`value` as text, with passwords, tokens and the login of addresses replaced by `***`.

    >>> hide("server", "http://me:hunter2/x@host/a?top=3&token=abc")
    'http://***@host/a?top=3&token=***'
    """
    text = SECRET_IN_QUERY.sub(r"\1***", LOGIN.sub("://***@", str(value)))
    return "***" if SECRET_KEY.search(key) else text


def address(root: Path) -> str:
    """The address of the server: `MLFLOW_TRACKING_URI`, else the clone's own database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(root / '.scratch/mlflow/mlflow.db').resolve()}"


def shown(address: str) -> str:
    """The address without login and query, which may hold secrets.

    >>> shown("http://me:a@b@host:5000/mlflow?token=abc")
    'http://***@host:5000/mlflow'
    """
    return LOGIN.sub("://***@", address).partition("?")[0]


def title(params: Row) -> str:
    """What a run with these settings is, in words: systems, scale, seeds.

    >>> title({"systems": ["base", "dspo"], "scale": "smoke", "seeds": [0, 1]})
    'base, dspo; smoke; seeds 0, 1'
    """
    systems, seeds = (list(map(str, params.get(key) or [])) for key in ("systems", "seeds"))
    names = ", ".join(systems) if len(systems) <= MOST_NAMES else f"{systems[0]} and {len(systems) - 1} others"
    return f"{names}; {params.get('scale')}; seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"


def _pipeline() -> tuple[str, int]:
    """Key of the pipeline run, and the process id with which it ends: the flow's, or those of a bare `dvc`."""
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


def _forget(root: Path, name: str) -> None:
    """Remove what is known of earlier runs of this stage that are sent whole; the sender has removed their rows."""
    with contextlib.suppress(OSError):
        for state in (root / FOLDER).glob(f"{name}-*.sent.json"):
            if not state.with_suffix("").with_suffix(".jsonl").exists():
                state.unlink(missing_ok=True)


def _start_sender(root: Path, owner: int) -> None:
    """Start the sender in the background of a shell that ends at once: it must not die with the stage's children."""
    log = root / ".scratch/logs/tracking.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = ["nice", "-n", "5", sys.executable, "-m", "tasks.runner.upload", "follow", str(owner)]
    with log.open("ab") as output:
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command], cwd=root, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True, check=False,
        )  # fmt: skip
