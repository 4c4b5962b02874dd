"""Opens a trained policy that writes evidence, and lets it search for questions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tasks import conf, generate, parts, retrieval, store, systems
from tasks.generate import Generator
from tasks.model import check_folder
from tasks.model_files import require_weights
from tasks.retrieval import QueryError, RetrievalError, Retriever
from tasks.rewards.blocks import evidence_of, is_verbatim
from tasks.store import DataError
from tasks.systems import System
from tasks.tool import policies
from tasks.tool.live import Audience, LiveRetriever, StoppableGenerator
from tasks.types import Hit, Question, Trajectory

_SEED = 0  # Greedy play draws nothing.


@dataclass(frozen=True)
class Found:
    """What the agent found for one question.

    Attributes:
        evidence: what it wrote as evidence after a search; empty without any.
        queries: what it searched, in order.
        passages: the passages that it read, in order, each once.
        is_verbatim: whether the evidence stands in one of them word for word.
    """

    evidence: str
    queries: tuple[str, ...]
    passages: tuple[Hit, ...]
    is_verbatim: bool


@dataclass
class EvidenceAgent:
    """Plays questions greedily; threads may share it.

    Attributes:
        system: the trained policy with its prompt, grammar and budgets.
        retriever: the search engine that it uses.
        identity: hash of policy and settings.
        audience: asked whether the play is still wanted.
    """

    system: System
    retriever: Retriever
    identity: str
    audience: Audience

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def check(self, questions: Sequence[str]) -> None:
        """Refuse questions that the agent cannot take; threads may call it while others are played.

        Raises:
            QueryError: one is too long, or holds half of a surrogate pair, which is no text.
        """
        for text in questions:
            _check_text(text)
        try:
            cast(Any, self.system).player.prompts(_asked(questions))
        except DataError as error:
            raise QueryError(f"the agent cannot take this question: {error}") from error

    def find(self, questions: Sequence[str], is_wanted: Callable[[], bool] = lambda: True) -> list[Found]:
        """What the agent found for each question, in order.

        Args:
            questions: what is asked.
            is_wanted: see `tasks.tool.live.Audience`; the play ends before its next call or search.

        Raises:
            QueryError: as `check`.
            RetrievalError: a search failed.
            StoppedError: the play was not wanted any more.
        """
        self.check(questions)
        found: list[Found] = []
        asked = _asked(questions)
        with self._lock:
            self.audience.is_wanted = is_wanted
            for first in range(0, len(asked), self.system.batch_questions):
                episodes = self.system.play(asked[first : first + self.system.batch_questions], "greedy", _SEED)
                found += [_found(cast(Trajectory, episode)) for episode in episodes]
        return found


def _asked(questions: Sequence[str]) -> list[Question]:
    return [Question(f"asked-{i}", "asked", "test", text, ("",), 1) for i, text in enumerate(questions)]


def _check_text(question: str) -> None:
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise QueryError(
            f"the agent cannot take this question: found half of a surrogate pair at character {error.start}, expected "
            "text. Send whole characters."
        ) from None


def _found(trajectory: Trajectory) -> Found:
    if trajectory.status == "failed":
        raise RetrievalError(f"a search of the agent failed: {trajectory.error}")
    searched = [turn for turn in trajectory.turns if turn.executed]
    passages = {hit.passage_id: hit for turn in searched for hit in turn.hits}
    queries = tuple(query for turn in searched for query in turn.action.searches)
    evidence = evidence_of(trajectory)
    return Found(evidence, queries, tuple(passages.values()), is_verbatim(trajectory, evidence))


@contextlib.contextmanager
def at_play(
    kind: systems.Kind,
    policy: Path,
    sha256: str | None,
    retriever: Retriever,
    start_generator: Callable[[Path], Generator],
) -> Iterator[EvidenceAgent]:
    """The agent of a policy.

    Args:
        kind: prompt, grammar and budgets with which the policy plays.
        policy: folder of its weights.
        sha256: of its weights as trained; None where nothing says so.
        retriever: the search engine.
        start_generator: starts what writes the policy's text.

    Raises:
        DataError: there is no model in it, or its weights are others.
    """
    check_folder(policy)
    audience = Audience()
    identity = store.digest(require_weights(policy, sha256), parts.plain(kind))

    def start(folder: Path) -> Generator:
        return cast(Generator, StoppableGenerator(start_generator(folder), audience))

    with kind.opened(systems.Resources(policy, LiveRetriever(retriever, audience), 0, start, {})) as system:
        yield EvidenceAgent(system, retriever, identity, audience)


@contextlib.contextmanager
def opened(
    trained: str | Path,
    retriever: Retriever,
    generator: str = "plain",
    root: Path = conf.ROOT,
    index: Path | None = None,
) -> Iterator[EvidenceAgent]:
    """The agent of a trained policy, such as `artifacts/train/r_search-0`.

    Args:
        trained: its folder or its name; see `tasks.tool.policies`.
        retriever: the search engine.
        generator: file of `conf/generator/` that writes the policy's text.
        root: root of the clone.
        index: folder that must be of the index that the policy has learned to search; None takes any.

    Raises:
        DataError: no such policy, one that writes no evidence, or one that was trained over another index.
    """
    policy = policies.find(trained, root)
    policy.require_evidence()
    if index is not None:
        policy.require_index(index)
    writer = generate.load(generator, root)

    def start(folder: Path) -> Generator:
        return writer.start(folder, policy.dtype)

    with at_play(policy.kind(), policy.weights, policy.sha256, retriever, start) as agent:
        yield agent


def open_search(index: Path, corpus: Path | None) -> Retriever:
    """The index in a folder; `corpus`, if given, must be the one it was built from."""
    return retrieval.open_retriever(index, corpus)
