"""Models behind a service: what the parts of a method may call besides the policy they train.

A part names the roles it calls, a file of `conf/service/` says which kind of service plays a role, and `opened` starts
them for a run. A kind is a file of this folder; its `PART` is the dataclass of its settings. This file holds protocols
only, so that a part may name a role without depending on any kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, cast

from tasks.types import Question, Trajectory

if TYPE_CHECKING:
    from tasks.engine import Policy

Role = Literal["log_probs", "turn_scores"]
Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation."""


class LogProbs(Protocol):
    """A frozen language model that says how likely a continuation is."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens at its ends."""
        ...

    def mean_logprobs(self, pairs: Sequence[Pair]) -> list[float]:
        """Mean natural log-probability of each continuation's tokens, given its context."""
        ...


class TurnScores(Protocol):
    """A model that judges the turns of trajectories, such as a process reward model."""

    def score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[list[float]]:
        """For each trajectory one value a turn, in order."""
        ...


class Services(TypedDict, total=False):
    """The services of a run, by role."""

    log_probs: LogProbs
    turn_scores: TurnScores


NO_SERVICES: Services = {}


@dataclass(frozen=True)
class Resources:
    """What a service may use of the run that starts it.

    Attributes:
        root: root of the clone.
        scratch: folder for files of this run.
        policy: the engine's policy; it answers as the start policy where the service `needs_reference`.
        tokenizer: the policy's.
        max_batch_tokens: tokens of one forward, padding included.
    """

    root: Path
    scratch: Path
    policy: Policy
    tokenizer: Any
    max_batch_tokens: int


class Kind(Protocol):
    """Settings of a service: one file of `conf/service/`."""

    @property
    def role(self) -> Role:
        """What it can be called for."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether the engine must hold a frozen copy of the start policy."""
        ...

    def opened(self, resources: Resources) -> AbstractContextManager[Any]:
        """Start the service when the block begins and close it when the block ends."""
        ...


@contextlib.contextmanager
def opened(kinds: Mapping[Role, Kind], resources: Resources) -> Iterator[Services]:
    """Start these services in order; close all that were started in reverse order, also after a failure."""
    with ExitStack() as stack:
        running = {role: stack.enter_context(kind.opened(resources)) for role, kind in kinds.items()}
        yield cast(Services, running)
