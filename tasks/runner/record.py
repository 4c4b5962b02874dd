"""What a stage reports while it works: rows that it appends to a local file, its record.

The record is `.scratch/tracking/<stage>-<start>-<random>.jsonl`, and beside it a folder of the files to keep. A stage
never waits for a server and never imports MLflow: `tasks.runner.upload` sends the rows. The first stage starts that
process, one for all stages of the clone, and whatever it could not send stays in the record. Nothing here decides or
changes a result, and no call raises.

Environment: `MLFLOW_TRACKING_URI` names a server (default: a database in `.scratch/mlflow/`),
`BREADCRUMB_TRACKING=off` keeps the local file only, `BREADCRUMB_RUN` is the key of the pipeline run and
`BREADCRUMB_NAME` its name in MLflow.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tasks import conf, store
from tasks.runner.git import Commit
from tasks.runner.lock import is_held
from tasks.store import Row

FOLDER = Path(".scratch/tracking")
DATABASE = Path(".scratch/mlflow/mlflow.db")
REFUSED = FOLDER / "refused"  # Rows that the server does not take, each with the reason.
PIPELINE_NAME = "pipeline"  # Begins the name of the record of a whole run.
SENDER = FOLDER / "sender.lock"  # Held by the process that sends the records of this clone.
WARNING = FOLDER / "warning.txt"  # Written by the sender, printed and removed by the stage that sees it.
STATE = ".sent.json"  # Ends the name of the file in which the sender notes what it has sent of a record.
# In the background of a shell that ends at once: the sender must not die with the stage's children.
START = 'mkdir -p .scratch/logs; nice -n 5 "$0" -m tasks.runner.upload follow >>.scratch/logs/tracking.txt 2>&1 &'
MOST_NAMES = 4
MAX_ARTIFACT_MB = 200
SECRET_KEY = re.compile(r"(^|[._])(secret|password|passwd|token|api_?key|access_?key|credentials?)$", re.IGNORECASE)
# A login up to the last @, because a password may hold / and @; and what a query calls a secret.
SECRET = re.compile(r"(://)\S*(?=@)|([?&][\w.-]*(?:secret|passw|token|key|credential)[\w.-]*=)[^&\s]*", re.IGNORECASE)


class Track:
    """The handle that a stage reports to. Every method returns at once; a failure gives one warning."""

    def __init__(self, name: str, root: Path) -> None:
        self.record = f"{name}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"
        self._root = root
        self._file: IO[str] | None = None
        self._number = 0  # Of artifacts.
        with self._guard():
            (root / FOLDER).mkdir(parents=True, exist_ok=True)
            # Half of a surrogate pair, as a file's name may hold it, is no text that a server could take.
            path = root / FOLDER / f"{self.record}.jsonl"
            self._file = path.open("a", encoding="utf-8", errors="replace")
            fcntl.flock(self._file, fcntl.LOCK_EX)  # The kernel frees it when this process dies, however it does.

    def log_params(self, settings: object) -> None:
        """The settings that were used, a dataclass or a mapping; nested keys are joined with dots."""
        self._write("batch", params=flatten(conf.plain(settings)))

    def log_metrics(self, step: int, metrics: Mapping[str, float], shared: bool = False) -> None:
        """Metrics of one step; `shared` ones are those by which pipeline runs are compared, and the pipeline's, too."""
        numbers = {key: float(value) for key, value in metrics.items()}
        self._write("batch", step=int(step), metrics=numbers, shared=shared)

    def set_tags(self, tags: Mapping[str, object], shared: bool = False) -> None:
        """Labels of the run, such as data hashes, seed and system; `shared` ones are the pipeline's, too."""
        self._write("batch", tags={key: hide(key, value) for key, value in tags.items()}, shared=shared)

    def log_inputs(self, name: str, path: Path, digest: str, num_rows: int, context: str) -> None:
        """A data set that the stage read: its name, its path in the clone, the hash of its content, and what for."""
        self._write("input", name=name, path=str(path), digest=digest, num_rows=num_rows, context=context)
        self.set_tags({f"data.{name}": digest})

    def log_artifact(self, path: Path, shared: bool = False) -> None:
        """A file or folder to keep with the run, a `shared` one with the pipeline's, too; over 200 MB only its path.

        It is kept as it is now, by hard links beside the record: once the stage has ended, DVC moves its files into the
        cache and gives copies back, and a later run replaces them, perhaps before they are sent.
        """
        self._number += 1
        kept = FOLDER / self.record / str(self._number) / path.name
        try:
            if self._file is not None and _size(self._root / path) <= MAX_ARTIFACT_MB << 20:
                _link(self._root / path, self._root / kept)
        except OSError as error:  # Its path alone is sent then.
            shutil.rmtree(self._root / kept.parent, ignore_errors=True)
            print(f"warning: tracking does not keep {path}: {error!r}", file=sys.stderr, flush=True)
        self._write("artifact", path=str(path), kept=str(kept), shared=shared)

    def log_trajectory(self, row: Row) -> None:
        """One row of `trajectories.jsonl`, shown as a trace."""
        self._write("trajectory", row=row)

    def end(self, status: str, seconds: float) -> None:
        """Close the run as FINISHED, FAILED or KILLED."""
        self._write("end", status=status, seconds=round(seconds, 2))

    def _write(self, kind: str, **row: Any) -> None:
        with self._guard():
            if self._file is not None:
                self._file.write(json.dumps({"kind": kind, "time": time.time(), **row}, ensure_ascii=False) + "\n")
                self._file.flush()
            with contextlib.suppress(FileNotFoundError):
                if told := (self._root / WARNING).read_text(encoding="utf-8", errors="replace"):
                    print(told, file=sys.stderr, flush=True)
                (self._root / WARNING).unlink()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Tracking must never stop the work, whatever goes wrong in it.
            self._file = None
            print(f"warning: tracking of {self.record} stopped: {error!r}", file=sys.stderr, flush=True)


def start(name: str, params: Row, root: Path, code: Commit) -> Track:
    """Open the record of stage `name`, started at commit `code`, and describe this process in it."""
    track = Track(name, root)
    with track._guard():
        _forget(name, root)
        given = os.environ.get("BREADCRUMB_NAME") or os.environ.get("DVC_EXP_NAME")
        track._write("start", stage=name, pipeline=_pipeline(), title=title(params, given), to=_to(root))

        group, _, item = name.partition("@")
        system, _, seed = item.rpartition("-")
        track.set_tags({"stage": group, "item": item, "seed": seed, "system": system})
        about = {"git_commit": code.sha or "none", "git_dirty": code.is_dirty, "config_digest": store.digest(params)}
        track.set_tags(about, shared=True)
        track._write("batch", params=flatten({"params": params}), shared=True)

        _start_sender(root)
    return track


@contextlib.contextmanager
def pipeline(root: Path, key: str, title: str, status: Callable[[], str]) -> Iterator[None]:
    """The record of a whole pipeline run, which lasts as long as the block.

    So MLflow knows how the run ended, wherever it was stopped: the stages that did end say nothing of those that had
    not begun. A killed run has a record without an end.

    Args:
        root: root of the clone.
        key: of the run; its stages have it in `BREADCRUMB_RUN`.
        title: the run's name.
        status: says how it ended: FINISHED, FAILED or KILLED.
    """
    track = Track(PIPELINE_NAME, root)
    with track._guard():
        _forget(PIPELINE_NAME, root)
        track._write("pipeline", pipeline=key, title=title, to=_to(root))
        _start_sender(root)
    ended = "KILLED"
    try:
        yield
        ended = status()
    except Exception:
        ended = "FAILED"
        raise
    finally:
        track._write("end", status=ended)


def _to(root: Path) -> str | None:
    """The address that the rows are for; None where nothing is sent."""
    return None if os.environ.get("BREADCRUMB_TRACKING") == "off" else shown(address(root))


def _forget(name: str, root: Path) -> None:
    """Remove the states of records of this name that are sent whole, and so are gone, and the warning of an old sender.

    A new sender meets what is wrong anew; what stood in the way of an earlier run is no news.
    """
    if not is_held(root / SENDER):
        (root / WARNING).unlink(missing_ok=True)
    for state in (root / FOLDER).glob(f"{glob.escape(name)}-*{STATE}"):
        if not Path(str(state).removesuffix(STATE) + ".jsonl").exists():
            state.unlink(missing_ok=True)


def _start_sender(root: Path) -> None:
    """Start the clone's sender, if it has none; the caller has written its first row.

    A sender that ends frees its lock and then looks for rows once more, so none is overlooked.
    """
    if _to(root) is not None and not is_held(root / SENDER):
        command = ["/bin/sh", "-c", START, sys.executable]
        subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, start_new_session=True, check=False)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def _link(path: Path, to: Path) -> None:
    """Make `to` the same file or folder of files as `path`, without a second copy of the bytes where the disk can."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # Another file system, or one that has no hard links.
            shutil.copyfile(one, other)

    to.parent.mkdir(parents=True)
    if path.is_dir():
        shutil.copytree(path, to, copy_function=link)
    else:
        link(str(path), str(to))


def run_id(root: Path, record: str) -> str | None:
    """The MLflow run of a record; None where none was begun."""
    return read_state(root / FOLDER / f"{record}.jsonl").get("run")


def read_state(path: Path) -> Row:
    """What the sender has noted of the record `path`; empty where it has sent nothing."""
    with contextlib.suppress(OSError, ValueError):
        return dict(store.read_json(path.with_suffix(STATE)))
    return {}


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as `a.b.c: text`, secrets hidden.

    >>> flatten({"train": {"lr": 0.1, "token": "abc"}, "seeds": [0, 1], "set": [{"a": 1}]})
    {'train.lr': '0.1', 'train.token': '***', 'seeds': '[0, 1]', 'set.0.a': '1'}
    """
    if isinstance(tree, list | tuple) and any(isinstance(value, Mapping | list | tuple) for value in tree):
        tree = dict(enumerate(tree))  # A list that holds settings, which may be secrets.
    if not isinstance(tree, Mapping):
        return {prefix: hide(prefix, tree)}
    parts = [flatten(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items()]
    return {key: text for part in parts for key, text in part.items()}


def hide(key: str, value: object) -> str:
    """`value` as text, with passwords, tokens and the login of addresses replaced by `***`.

    >>> hide("server", "http://me:hunter2/x@host/a?top=3&token=abc")
    'http://***@host/a?top=3&token=***'
    """
    return "***" if SECRET_KEY.search(key) else SECRET.sub(r"\1\2***", str(value))


def address(root: Path) -> str:
    """The address of the server: `MLFLOW_TRACKING_URI`, else the clone's own database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(root / DATABASE).resolve()}"


def shown(address: str) -> str:
    """The address without login and query, which may hold secrets.

    >>> shown("http://me:a@b@host:5000/mlflow?token=abc")
    'http://***@host:5000/mlflow'
    >>> shown("me:hunter2@host")
    '***@host'
    """
    login, at, place = address.rpartition("@")
    scheme = login.partition("://")[0] + "://" if "://" in login else ""
    return (f"{scheme}***@{place}" if at else address).partition("?")[0]


def title(params: Row, given: str | None = None) -> str:
    """What a run with these settings is, in words: scale, seeds, and the name that was `given` to it.

    Without one it names the systems, but for the one that all are compared with.

    >>> title({"systems": ["base", "dspo"], "scale": "smoke", "seeds": [0, 1], "evaluate": {"reference": "base"}})
    'smoke · seeds 0,1 · dspo'
    >>> title({"scale": "smoke", "seeds": [0]}, "mine")
    'smoke · seed 0 · mine'
    """
    systems, seeds = (list(map(str, params.get(key) or [])) for key in ("systems", "seeds"))
    reference = (params.get("evaluate") or {}).get("reference")
    systems = [name for name in systems if name != reference] or systems
    names = ", ".join(systems) if len(systems) <= MOST_NAMES else f"{systems[0]} and {len(systems) - 1} others"
    return f"{params.get('scale')} · seed{'s' if len(seeds) > 1 else ''} {','.join(seeds)} · {given or names}"


def _pipeline() -> str:
    """Key of the pipeline run: that of the flow, or one for all stages of a bare `dvc repro`, which is the parent."""
    if "DVC_STAGE" not in os.environ or "BREADCRUMB_RUN" in os.environ:
        return os.environ.get("BREADCRUMB_RUN", "")
    import psutil

    return f"dvc-{os.getppid()}-{int(psutil.Process(os.getppid()).create_time())}"
