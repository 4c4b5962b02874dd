"""Services: models and simulators that the parts of a method may call besides the policy under training.

A part names the roles it calls, a file of `conf/service/` says which kind of service plays a role, and `opened` starts
them for a run. A kind is a file of this folder; its `PART` is the dataclass of its settings. This file holds only
protocols, so that a part may name a role without depending on any kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, cast

from tasks import conf, parts
from tasks.records.usage import Usage
from tasks.trained import Trained
from tasks.types import Hit, Question, Trajectory, Turn

if TYPE_CHECKING:
    from tasks.engine import Policy

ROOM = "services"
Role = Literal["chat", "log_probs", "turn_scores", "documents", "labeller", "reward_model", "judge", "reader"]
Head = Literal["success", "hazard"]
"""What a reward model's number means: the probability of success, or of the first error at this step (the release)."""
Messages = Sequence[Mapping[str, str]]
"""A conversation: objects with `role` and `content`, as chat models take them."""
Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation."""


class ServiceError(ValueError):
    """A service cannot be used now; the message says why, and where finished work is kept."""


@dataclass(frozen=True)
class Reply:
    """The text of a chat model, why it stopped, and the number of tokens of prompt and reply together."""

    content: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Refusal:
    """The server refuses to answer this conversation, for the reason in `detail`; it may answer others."""

    detail: str


class Chat(Protocol):
    """A chat model."""

    @property
    def model(self) -> str:
        """Its name, for records."""
        ...

    @property
    def usage(self) -> Usage:
        """What it did so far; a caller adds the replies that it could not use to the failures."""
        ...

    def replies(
        self, conversations: Iterable[Messages], request: Mapping[str, Any] | None = None
    ) -> Generator[Reply | Refusal, None, None]:
        """One answer per conversation, in order. Conversations are read ahead, because several are sent at once.

        Closing the generator sends nothing more and waits for the requests in flight.

        Args:
            conversations: what is sent.
            request: further fields of these requests, such as `temperature`; they replace those of the service.

        Raises:
            ServiceError: the service cannot answer now.
        """
        ...


class LogProbs(Protocol):
    """A frozen language model that gives the likelihood of continuations."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens before or after it."""
        ...

    def mean_logprobs(self, pairs: Sequence[Pair]) -> list[float]:
        """Mean natural log-probability of each continuation's tokens, given its context."""
        ...


class TurnScores(Protocol):
    """A model that judges the turns of trajectories, such as a process reward model."""

    def score(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[list[float]]:
        """For each trajectory, one value per turn, in order."""
        ...


Aspect = Literal["thought", "query", "answer"]
"""What of an action is judged."""


@dataclass(frozen=True)
class Judged:
    """One thing to judge: the thought, the query or the answer of an action.

    Attributes:
        aspect: which of the three.
        question: with its gold answers.
        before: the turns before the action, with the passages that were found.
        thought: of the action; empty where it has none.
        content: the query or the answer; empty where the thought is judged.
    """

    aspect: Aspect
    question: Question
    before: tuple[Turn, ...]
    thought: str
    content: str = ""


@dataclass(frozen=True)
class Judgement:
    """A score of -1, 0 or 1 with its reason; `is_readable` is False where a reply gave none and 0 stands for it."""

    score: int
    reason: str
    is_readable: bool = True

    def __post_init__(self) -> None:
        conf.require(self.score in (-1, 0, 1), "judge: score", self.score, "-1, 0 or 1")


class Judge(Protocol):
    """Judges single thoughts, queries and answers."""

    def judge(self, items: Sequence[Judged]) -> list[Judgement]:
        """One judgement per item, in order.

        Raises:
            ServiceError: the service cannot answer now.
        """
        ...


class Reader(Protocol):
    """A frozen model that answers from evidence alone."""

    def answers(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """The whole reply to each question and its evidence, in order.

        Raises:
            ServiceError: the model cannot answer now; no answer is made up.
        """
        ...


class Documents(Protocol):
    """A simulator that answers searches in place of an index: a `tasks.retrieval.Retriever`."""

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """`top_k` hits for each query; they depend on the query and on the last `announce`."""
        ...

    def announce(self, noise: float, seed: str) -> None:
        """From now on, a share `noise` of the queries gets noisy documents; `seed` decides which."""
        ...


@dataclass(frozen=True)
class StepLabels:
    """Which executed searches of a trajectory are pivots, in order.

    Attributes:
        labels: one for each executed search; None where the labeller gave nothing that can be used.
        reason: what it said, or why there are no labels.
    """

    labels: tuple[bool, ...] | None
    reason: str = ""


class Labeller(Protocol):
    """Says which searches of a trajectory are pivots: those that found the next golden sub-answer with its query."""

    def label(self, played: Iterable[tuple[Question, Sequence[Turn]]]) -> Iterator[StepLabels]:
        """Labels for each played question, in order; its `decomposition` holds the golden sub-queries and sub-answers.

        Raises:
            ServiceError: the labeller cannot answer now.
        """
        ...


@dataclass(frozen=True)
class Probabilities:
    """What a reward model says of one trajectory.

    Attributes:
        before: its probability given the question alone.
        after: one for each turn, given all up to its action; None where the model gave none: the turn searched
            nothing and is not the last, or lies beyond the length that the model reads.
    """

    before: float
    after: tuple[float | None, ...]


class RewardModel(Protocol):
    """A frozen model of how likely it is that the final answer will be right, or of a hazard.

    Its kind says which of the two in a field `head`, and checks the model itself when it is opened or answers.
    """

    def probabilities(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Probabilities]:
        """One for each trajectory, in order.

        Raises:
            ServiceError: the model cannot answer now. The step then fails; no score is made up.
        """
        ...


class Services(TypedDict, total=False):
    """The services of a run, by role."""

    chat: Chat
    log_probs: LogProbs
    turn_scores: TurnScores
    documents: Documents
    labeller: Labeller
    reward_model: RewardModel
    judge: Judge
    reader: Reader


NO_SERVICES: Services = {}


@dataclass(frozen=True)
class Resources:
    """The things of a run that a service may use.

    Attributes:
        root: root of the clone.
        scratch: folder for files of this run.
        policy: the engine's policy, None outside training; it has a reference if a service `needs_reference`.
        tokenizer: the policy's.
        max_batch_tokens: tokens of one forward, padding included.
        models: the models that this pipeline has trained for the services of this run, by name; whoever loads one
            calls `Trained.checked`.
    """

    root: Path
    scratch: Path
    policy: Policy | None = None
    tokenizer: Any = None
    max_batch_tokens: int = 0
    models: Mapping[str, Trained] = field(default_factory=dict)


class Kind(Protocol):
    """Settings of a service: one file of `conf/service/`."""

    @property
    def role(self) -> Role:
        """The role that it plays."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether the engine must hold a frozen copy of the start policy."""
        ...

    def opened(self, resources: Resources) -> AbstractContextManager[Any]:
        """Start the service when the block begins and close it when the block ends."""
        ...


def load(role: Role, name: str, root: Path) -> Kind:
    """The service that `conf/service/<name>.yaml` describes.

    Raises:
        ValueError: there is no such file, its kind or a number is wrong, or its kind does not play this role.
    """
    where = str(conf.path_of("service", name, root))
    kind: Kind = parts.make(ROOM, conf.section("service", name, root), where)
    check_role(role, kind, where)
    return kind


def check_role(role: Role, kind: Kind, where: str) -> None:
    """Raise the ValueError for a service that does not play this role; `where` names its settings."""
    if kind.role != role:
        raise ValueError(
            f"{where}: kind={parts.kind_of(kind)!r} plays {kind.role}, expected one that plays {role}. Name another "
            "file of conf/service/."
        )


@contextlib.contextmanager
def opened(kinds: Mapping[Role, Kind], resources: Resources) -> Iterator[Services]:
    """Start these services in order; close all that were started in reverse order, also after a failure."""
    with ExitStack() as stack:
        running = {role: stack.enter_context(kind.opened(resources)) for role, kind in kinds.items()}
        yield cast(Services, running)
