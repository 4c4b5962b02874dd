"""A policy that answers single questions, and tells how it comes to its answers while it does."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tasks import conf, generate, retrieval, store, systems
from tasks.agent.prompts import prompt_ids
from tasks.agent.rollout import Player
from tasks.generate import Generator
from tasks.retrieval import Retriever
from tasks.retrieval import manifest as manifests
from tasks.store import DataError
from tasks.systems import System
from tasks.tool.live import Audience, Event, LiveGenerator, LiveRetriever
from tasks.tool.policies import Policy
from tasks.tool.questions import QuestionError, require_text
from tasks.types import Episode, Question

CORPUS = Path("artifacts/data/corpus.jsonl")
_GREEDY = 0  # The seed of greedy play, which draws nothing.
_UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class Played:
    """A question that was played: its record, and the seconds that it took."""

    episode: Episode
    seconds: float

    @property
    def outcome(self) -> str:
        """How it ended, for people, where there is no answer; empty where there is one."""
        return {
            "answered": "",
            "open": "no answer: the policy has used up its turns",
            "overflow": "no answer: the text has reached the policy's max_total_tokens",
            "failed": f"a search failed: {self.episode.error}",
        }[self.episode.status]

    @property
    def cost(self) -> str:
        """What it took, in one line."""
        cost, searches = self.episode.cost, sum(len(t.action.searches) for t in self.episode.turns if t.executed)
        written, read = cost.generated_tokens, cost.prefill_tokens
        return (
            f"{_count(searches, 'search', 'es')}, {_count(written, 'token')} written, {_count(read, 'token')} read, "
            f"{self.seconds:.2f} s"
        )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


@dataclass
class Asker:
    """A policy with its search engine; one question is played at a time, greedily.

    Attributes:
        policy: what plays.
        about: policy and index, for people.
        system: plays it; the audience is told.
        audience: who is told.
        limit, limited_by: the most tokens of a question's prompt, and the setting that says so.
    """

    policy: Policy
    about: str
    system: System
    audience: Audience
    limit: int
    limited_by: str

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def checked(self, text: str) -> Question:
        """The question of a text.

        Raises:
            QuestionError: the text is blank, is no text, or is too long for the policy.
        """
        require_text(text)
        question = Question("asked", "asked", "test", text, ("-",), 1)
        if (found := self._prompt_tokens(question)) > self.limit:
            raise QuestionError(
                f"question: its prompt has {found} tokens, expected at most {self.limit} ({self.limited_by} of "
                f"{self.policy.name}). Ask a shorter one.",
                is_too_long=True,
            )
        return question

    def _prompt_tokens(self, question: Question) -> int:
        player: Player = cast(Any, self.system).player
        return len(prompt_ids(player.tokenizer, player.prompt, question, player.grammar, _UNBOUNDED))

    def ask(
        self, question: Question, tell: Callable[[Event], None], is_wanted: Callable[[], bool] = lambda: True
    ) -> Played:
        """Play one question to its end.

        Args:
            question: of `checked`.
            tell: is told what happens, in the thread of the caller.
            is_wanted: see `Audience`.

        Raises:
            StoppedError: the play was not wanted any more.
        """
        with self._lock:
            self.audience.tell, self.audience.is_wanted, self.audience.has_found = tell, is_wanted, False
            started = time.perf_counter()
            (episode,) = self.system.play([question], "greedy", _GREEDY)
            return Played(episode, time.perf_counter() - started)


@contextlib.contextmanager
def opened(policy: Policy, search: Retriever, about: str, generator: str, root: Path = conf.ROOT) -> Iterator[Asker]:
    """The asker of a policy.

    Args:
        policy: what plays.
        search: the search engine.
        about: what the search engine is, for people.
        generator: file of `conf/generator/` that writes the policy's text.
        root: of the clone.

    Raises:
        DataError: its model cannot be loaded.
        ValueError: settings of another version of the code.
    """
    from tasks.device import use_threads
    from tasks.model import load_tokenizer

    use_threads(policy.num_threads)
    audience, kind = Audience(), policy.kind()
    tokenizer, writer = load_tokenizer(policy.weights), generate.load(generator, root)

    def start(folder: Path) -> Generator:
        return cast(Generator, LiveGenerator(writer.start(folder, policy.dtype), tokenizer, audience))

    resources = systems.Resources(policy.checked_weights(), LiveRetriever(search, audience), 0, start, {})
    with kind.opened(resources) as system:
        limit, limited_by = _limit(cast(Any, system).player.conf.max_prompt_tokens, policy.weights)
        yield Asker(policy, f"{policy.name} searches {about}", system, audience, limit, limited_by)


def _limit(max_prompt_tokens: int, weights: Path) -> tuple[int, str]:
    """The most tokens of a prompt, and what says so; the model must have room for a token behind it."""
    positions = store.read_json(weights / "config.json").get("max_position_embeddings")
    limits = [(max_prompt_tokens, "max_prompt_tokens")]
    if isinstance(positions, int):
        limits.append((positions - 1, "max_position_embeddings - 1"))
    return min(limits)


@contextlib.contextmanager
def search_opened(
    index: Path,
    retriever: str | None = None,
    root: Path = conf.ROOT,
    corpus: Path | None = None,
    policy: Policy | None = None,
) -> Iterator[tuple[Retriever, str]]:
    """The search engine, and what it is, for people.

    Args:
        index: folder of an index.
        retriever: file of `conf/retriever/`; another index than that of the folder is made for this process alone.
        root: of the clone.
        corpus: that the index must have been built from; None takes any.
        policy: that must have learned to search this index, or the same passages where `retriever` is given; None asks
            nothing.

    Raises:
        DataError: there is no index, or no server behind it, or it was built from another corpus, or is not the
            policy's.
        ValueError: there is no such file.
    """
    with contextlib.ExitStack() as stack:
        if retriever is not None:
            index = stack.enter_context(_made(index, retriever, root))
        manifest = manifests.read(index)
        if policy is not None:
            policy.require_index(index, is_another=retriever is not None)
        about = f"{retriever or index} ({manifest.backend}, {manifest.num_passages} passages)"
        yield retrieval.open_retriever(index, corpus), about


@contextlib.contextmanager
def _made(index: Path, retriever: str, root: Path) -> Iterator[Path]:
    """An index with the settings of a retriever: the one that is there, or one that lives as long as the block."""
    settings, corpus = retrieval.load_settings(retriever, root), root / CORPUS
    if (index / manifests.NAME).is_file() and manifests.read(index).settings == conf.plain(settings):
        yield index
        return
    if not corpus.is_file():
        raise DataError(f"{corpus}: RETRIEVER={retriever} needs the corpus, and it is missing. Run `make run` first.")

    # What a server serves may change, so an index that describes it is not kept for the next process.
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "index"
        retrieval.build(corpus, made, settings, root / retrieval.SCRATCH)
        yield made
