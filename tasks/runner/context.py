"""What a stage's body gets."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from tasks import conf, store
from tasks.reached import divided
from tasks.runner.progress import Bar, progress
from tasks.runner.record import Track
from tasks.runner.resume import fingerprint

T = TypeVar("T")
S = TypeVar("S")

WORK = Path(".scratch/work")
DATA = Path("artifacts/data")
NUM_TRACKED = 8  # Trajectories of a stage that are shown as traces.


@dataclass(frozen=True)
class Context(Generic[S]):
    """What a stage's body may use besides its arguments.

    Attributes:
        name: stage and matrix item, such as `train@search_r1_grpo-0`.
        root: root of the clone, where `dvc.yaml` is.
        settings: what the stage's plan says; see `tasks.planned`.
        data: the name under which tracking knows the data, as in `params.yaml`.
        track: the tracking handle (`log_params`, `log_artifact`, ...); it never raises.
        measured: facts of this execution that another one would not repeat, for the stage's ledger.
    """

    name: str
    root: Path
    settings: S
    data: str
    track: Track
    measured: dict[str, store.Row] = field(default_factory=dict)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Report metrics of one step to tracking; the record itself is the stage's own `metrics.jsonl`."""
        self.track.log_metrics(step, metrics)

    def track_data(self, purpose: str, num_rows: int) -> None:
        """Tell tracking that the stage reads `artifacts/data`: so many questions (or passages), and what for."""
        self.track.log_inputs(self.data, DATA, self.data_sha256, num_rows, purpose)
        self.track.set_tags({"data_sha256": self.data_sha256}, shared=True)

    def track_outcome(self, folder: Path, trajectories: Sequence[store.Row]) -> None:
        """Keep a finished stage's folder (policy, metrics, scores) and its last trajectories with its run."""
        self.track.log_artifact(folder)
        for row in trajectories[-NUM_TRACKED:]:
            self.track.log_trajectory(row)

    @functools.cached_property
    def data_sha256(self) -> str:
        """Hash of questions and corpus together, from the data manifest."""
        return str(store.read_json(self.root / DATA / "manifest.json")["data_sha256"])

    @functools.cached_property
    def config_sha256(self) -> str:
        """Hash of the settings in the plan, by which a number in the result table names those it was measured with."""
        decisive, _ = divided(conf.plain(self.settings))
        return hashlib.sha256(store.dump(decisive).encode()).hexdigest()

    @functools.cached_property
    def scratch(self) -> Path:
        """Folder for resume state, made on first use and named by everything the stage's result depends on.

        So a resumed stage never continues the state of another setting, input or line of code.
        """
        folder = self.root / WORK / f"{self.name}-{fingerprint(self.root, self.name)}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def progress(self, iterable: Iterable[T], total: int | None = None, desc: str = "") -> Iterator[T]:
        """Yield the items and show how far we are: a bar on a terminal, else a line every few seconds."""
        return iter(progress(iterable, total, desc))

    def bar(self, total: int, max_tokens: int = 0, unit: str = "") -> Bar:
        """Shows the progress of work that reports how far it is, and hands its metrics to tracking; see `Bar`."""
        return Bar(self.name, total, self.log, max_tokens, unit)
