"""Starts, guards and records one stage: `run(name, body)` is the last line of every entry point.

The body gets a `Context` and does the stage's work; everything around it (death with the parent, messages,
resume folder, ledger, tracking) is here. Nothing here may change what a stage writes to its outputs.
"""

from __future__ import annotations

import ctypes
import datetime
import errno
import fcntl
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tasks import conf, store
from tasks.retrieval import RetrievalError

if TYPE_CHECKING:
    from tasks.stages.tracking import Track

T = TypeVar("T")

SCRATCH = Path(".scratch")
DATA = Path("artifacts/data")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
SECONDS_BETWEEN_LINES = 5.0
SECONDS_FOR_TURN = 30


@dataclass(frozen=True)
class Context:
    """What a stage's body may use besides its arguments.

    Attributes:
        name: stage and matrix item, such as `train@search_r1_grpo-0`.
        root: root of the clone, where `params.yaml` is.
        params: `params.yaml`, checked.
        track: the tracking handle (`log_params`, `log_inputs`, `log_artifact`, `log_table`, ...); it never raises.
    """

    name: str
    root: Path
    params: conf.Params
    track: Track
    _scratch: list[Path] = field(default_factory=list, repr=False)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Report metrics of one step to tracking; the record itself is the stage's own `metrics.jsonl`."""
        self.track.log_metrics(step, metrics)

    def track_data(self, purpose: str, num_rows: int) -> None:
        """Tell tracking that the stage reads `artifacts/data`: so many questions (or passages), and what for."""
        self.track.log_inputs(self.params.data, DATA, self.data_sha256, num_rows, purpose)
        self.track.set_tags({"data_sha256": self.data_sha256})

    @functools.cached_property
    def data_sha256(self) -> str:
        """Hash of questions and corpus together, from the data manifest."""
        return str(store.read_json(self.root / DATA / "manifest.json")["data_sha256"])

    @functools.cached_property
    def scratch(self) -> Path:
        """Folder for resume state, named by everything the stage's result depends on; made on first use.

        Another setting, another input or another line of the stage's code gives another folder, so a
        resumed stage never continues somebody else's state.
        """
        folder = self.root / SCRATCH / "work" / f"{self.name}-{fingerprint(self.root, self.name)}"
        folder.mkdir(parents=True, exist_ok=True)
        self._scratch.append(folder)
        return folder

    def progress(
        self, iterable: Iterable[T], total: int | None = None, desc: str = "", initial: int = 0
    ) -> Iterator[T]:
        """Yield the items and show how far we are: a bar on a terminal, else a line every few seconds."""
        return progress(iterable, total, desc or self.name, initial)


def run(name: str, body: Callable[[Context], None], *, clean: bool = False, root: Path = Path(".")) -> None:
    """Run one stage and end the process with 1 if it failed.

    Args:
        name: stage and matrix item as artifacts name them, such as `evaluate@base-0`.
        body: the work. A ValueError (so also DataError) or RetrievalError is the user's to mend: it becomes one
            `error:` line. Any other exception is ours and shows its traceback. All are kept in `.scratch/logs/`.
        clean: delete the stage's resume folder after success.
        root: root of the clone.

    Raises:
        SystemExit: 1 after a failure, 143 after SIGTERM, 130 after an interrupt.
    """
    _die_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    started = time.monotonic()
    status, context = "FAILED", None
    try:
        from tasks.stages import tracking

        _wait_for_turn(root, name)
        params = conf.params(root)
        context = Context(name, root, params, tracking.start(name, params, root))
        body(context)
        status = "FINISHED"
    except SystemExit:
        status = "KILLED"
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        raise SystemExit(130) from None
    except Exception as error:
        _fail(root, name, error)
    finally:
        # From here on a second signal must not cut the record short; the work itself has ended.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        seconds, peak_rss_mb = time.monotonic() - started, _peak_rss_mb()
        run_id = context.track.end(status, seconds) if context is not None else None
        if status == "FINISHED" and context is not None:
            _write_ledger(root, name, seconds, peak_rss_mb, run_id)
            if clean:
                for folder in context._scratch:
                    shutil.rmtree(folder, ignore_errors=True)


def fingerprint(root: Path, name: str) -> str:
    """16 hex digits over what `dvc.yaml` says stage `name` depends on: settings, inputs and code.

    Inputs are read and hashed, so the answer does not rely on the order in which stages ran.

    Raises:
        ValueError: `dvc.yaml` has no such stage, or an input is missing.
    """
    stage, values = _stage(root, name)
    deps = {path: _hashes(root / path, root) for path in (_resolve(dep, values) for dep in stage.get("deps", []))}
    settings: dict[str, Any] = {}
    for entry in stage.get("params", []):
        for file, keys in entry.items() if isinstance(entry, dict) else [(str(conf.PARAMS), [entry])]:
            path = _resolve(file, values)
            tree = conf.read_yaml(root / path)
            settings.setdefault(path, {}).update({key: _lookup(tree, key) for key in keys} if keys else tree)
    return store.digest(stage.get("cmd"), values["item"], deps, settings)


def _stage(root: Path, name: str) -> tuple[conf.Tree, conf.Tree]:
    """The group of `dvc.yaml` that runs `name`, and the values of its `${...}`.

    A matrix item with other dependencies than its siblings has a group of its own: `evaluate@base-0`
    is item `0` of `evaluate_base` where that group exists, else item `base-0` of `evaluate`.
    """
    groups = conf.read_yaml(root / "dvc.yaml")["stages"]
    group, _, item = name.partition("@")
    first, _, rest = item.partition("-")
    if f"{group}_{first}" in groups:
        group, item = f"{group}_{first}", rest
    if group not in groups:
        raise ValueError(f"dvc.yaml: there is no stage {group!r} for {name!r}. Known: {', '.join(groups)}.")
    stage = groups[group]
    keys = list(stage.get("matrix", {}))
    parts = item.split("-") if item else []
    if len(keys) != len(parts):
        raise ValueError(f"dvc.yaml: {name!r} has {len(parts)} matrix items, stage {group!r} has {len(keys)}: {keys}.")
    values = conf.read_yaml(root / conf.PARAMS)
    values["item"] = dict(zip(keys, parts, strict=True))
    return stage, values


def _resolve(text: str, values: conf.Tree) -> str:
    return re.sub(r"\$\{([\w.\[\]]+)\}", lambda match: str(_lookup(values, match[1])), text)


def _lookup(tree: Any, key: str) -> Any:
    for part in re.findall(r"\w+", key):
        if isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
            continue
        if not isinstance(tree, dict) or part not in tree:
            raise ValueError(f"dvc.yaml: key {key!r} is not in the settings. Add it to params.yaml or mend dvc.yaml.")
        tree = tree[part]
    return tree


def _hashes(path: Path, root: Path) -> list[list[str]]:
    """`[relative path, sha256]` of a file, or of every file below a folder."""
    if path.is_file():
        return [[path.name, store.sha256(path)]]
    if not path.is_dir():
        raise ValueError(f"{path}: the stage needs this and it is missing. Run `make run`, which makes it.")
    # As .dvcignore has it: the documents of a room are not its code.
    kept = (p for p in path.rglob("*") if p.suffix != ".md" and "__pycache__" not in p.parts)
    files = sorted(p for p in kept if p.is_file())
    return [[str(p.relative_to(path)), store.sha256(p)] for p in files]


def progress(iterable: Iterable[T], total: int | None, desc: str, initial: int = 0) -> Iterator[T]:
    """See `Context.progress`; on standard error, so that standard output stays for results.

    `initial` items were done before (a resumed stage): they count as done and not in the rate.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(
            iterable, total=total, initial=initial, desc=desc, mininterval=0.3, dynamic_ncols=True, smoothing=0.1
        )
        return
    started = shown = time.monotonic()
    done = initial
    for item in iterable:
        yield item
        done += 1
        if (now := time.monotonic()) - shown >= SECONDS_BETWEEN_LINES:
            shown = now
            print(_line(desc, done, initial, total, now - started), file=sys.stderr, flush=True)
    if shown != started or done == initial:
        print(_line(desc, done, initial, total, time.monotonic() - started), file=sys.stderr, flush=True)


def _line(desc: str, done: int, initial: int, total: int | None, seconds: float) -> str:
    rate = (done - initial) / seconds if seconds > 0 else 0.0
    if not total:
        return f"{desc}: {done} ({rate:.2f}/s)"
    left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
    return f"{desc}: {done}/{total} ({100 * done / total:.0f}%, {rate:.2f}/s{left})"


def _die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies: killing DVC alone would leave its command writing."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # It died between the two calls.
        raise SystemExit(143)


def _wait_for_turn(root: Path, name: str) -> None:
    """Hold the stage's lock until this process ends: a stage just killed may need a moment to stop writing.

    Raises:
        ValueError: another process still works on the stage after half a minute.
    """
    path = root / SCRATCH / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # Never closed: the lock is the process's.
    for _ in range(SECONDS_FOR_TURN * 10):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            return
        except BlockingIOError:
            time.sleep(0.1)
    holder = os.read(handle, 20).decode() or "unknown"
    raise ValueError(f"{name}: process {holder} is running this stage in this clone. Wait for it or stop it.")


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _fail(root: Path, name: str, error: Exception) -> NoReturn:
    log = root / SCRATCH / "logs" / f"{name}.txt"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        pass  # The message below matters more than its copy.
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" while writing {error.filename}" if error.filename else ""
        message = f"no space left on the disk{where}. Free some and run again; finished work is kept."
    elif isinstance(error, (ValueError, RetrievalError)):
        message = " ".join(str(error).split("\n"))
    else:
        traceback.print_exception(error)
        message = f"{name}: unexpected {type(error).__name__}: {error}"
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    print(f"(traceback in {SCRATCH / 'logs' / log.name})", file=sys.stderr, flush=True)
    raise SystemExit(1)


def git_state(root: Path) -> tuple[str | None, bool]:
    """`(commit or None, whether code or settings differ from it)`; `(None, True)` outside a repository."""
    code = ("tasks", "flows", "conf", "dvc.yaml", "params.yaml", "requirements")
    head = _git(root, "rev-parse", "--verify", "-q", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *code)
    return head or None, head is None or changes is None or bool(changes)


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _peak_rss_mb() -> float:
    """Most memory this process, or a child it has waited for, ever held."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return max(resource.getrusage(one).ru_maxrss for one in who) / unit


def _write_ledger(root: Path, name: str, seconds: float, peak_rss_mb: float, run_id: str | None) -> None:
    commit, dirty = git_state(root)
    row = {
        "stage": name,
        "seconds": round(seconds, 2),
        "mlflow_run_id": run_id,
        "git_commit": commit,
        "git_dirty": dirty,
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "peak_rss_mb": round(peak_rss_mb, 1),
    }
    try:
        store.write_json(root / SCRATCH / "ledger" / f"{name}.json", row)
    except OSError as error:
        print(f"warning: the ledger of {name} could not be written: {error}", file=sys.stderr)
