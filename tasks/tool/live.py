"""A question at play, told while it is played: what the policy writes, token by token, and what its searches find.

The play itself is that of every evaluation (`System.play`). What tells of it stands between the player and its
generator, and between the player and its search engine, so that neither knows of it and no draw changes. The generator
is asked for one token at a time: the player then looks after each token whether the call is complete, where a stop
string would have made it look.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from tasks.types import Hit

if TYPE_CHECKING:
    from tasks.generate import Call, Generator, Sampling, Session
    from tasks.retrieval import Retriever

Part = Literal["thought", "search", "evidence", "answer"]
PARTS: dict[str, Part] = {
    "think": "thought",
    "search": "search",
    "tool_call": "search",
    "original_evidence": "evidence",
    "answer": "answer",
}
"""Tag -> part of a call; text outside of all tags is a thought."""
_TAG = re.compile(rf"<(/?)({'|'.join(PARTS)})>")
_UNFINISHED = re.compile(r"</?[a-z_]{0,20}\Z")
_BROKEN = "\ufffd"  # What a tokenizer makes of the first bytes of a character.


@dataclass(frozen=True)
class Wrote:
    """The next piece of text that the policy writes, without tags."""

    part: Part
    text: str


@dataclass(frozen=True)
class Found:
    """The passages of each query, best first."""

    queries: tuple[str, ...]
    hits: tuple[tuple[Hit, ...], ...]


@dataclass(frozen=True)
class Complained:
    """The call was neither a search nor an answer, and the policy reads that it was not."""


Event = Wrote | Found | Complained


class StoppedError(Exception):
    """Nobody wants to know any more how the play ends."""


@dataclass
class Audience:
    """Who is told of the play that is going on.

    Attributes:
        tell: takes an event.
        is_wanted: asked before each token and each search; False ends the play with a `StoppedError`.
        has_found: whether the call that was written last has found passages.
    """

    tell: Callable[[Event], None] = lambda event: None
    is_wanted: Callable[[], bool] = lambda: True
    has_found: bool = False

    def require(self) -> None:
        """Raise the StoppedError where the play is not wanted any more."""
        if not self.is_wanted():
            raise StoppedError


@dataclass
class CallText:
    """The text of one call, read token by token: its parts without the tags, each piece once.

    A piece that may be the beginning of a tag or of a character waits for the next token.
    """

    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    read: int = 0
    part: Part = "thought"

    def add(self, token_ids: Sequence[int], is_over: bool = False) -> list[Wrote]:
        """What is new with these tokens; `is_over` gives what has waited."""
        self.ids += token_ids
        text = str(self.tokenizer.decode(self.ids, skip_special_tokens=False))
        end = len(text)
        if not is_over:
            text = text.rstrip(_BROKEN)
            end = start.start() if (start := _UNFINISHED.search(text)) else len(text)

        pieces = []
        while (tag := _TAG.search(text, self.read, end)) is not None:
            pieces.append(Wrote(self.part, text[self.read : tag.start()]))
            self.read = tag.end()
            self.part = "thought" if tag[1] else PARTS[tag[2]]
        pieces.append(Wrote(self.part, text[self.read : end]))
        self.read = max(self.read, end)
        return [piece for piece in pieces if piece.text]


class LiveSession:
    """See `tasks.generate.Session`; tells what its only row writes."""

    def __init__(self, session: Session, tokenizer: Any, audience: Audience) -> None:
        self._session, self._tokenizer, self._audience = session, tokenizer, audience
        self._text = CallText(tokenizer)

    def __getattr__(self, name: str) -> Any:
        """All else is that of the session."""
        return getattr(self._session, name)

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """One token; the call counts as stopped after each, so that the player looks whether it is complete."""
        self._audience.require()
        (call,) = self._session.generate(rows, [1 for _ in max_new_tokens])
        self._tell(call.token_ids, is_over=not call.token_ids)
        return [replace(call, stopped=bool(call.token_ids))]

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """See `Session.append`; the next token begins a new call."""
        self._session.append(rows, token_ids)
        self._text = CallText(self._tokenizer)
        if not self._audience.has_found:
            self._audience.tell(Complained())
        self._audience.has_found = False

    def close(self, rows: Sequence[int]) -> None:
        """See `Session.close`; the player calls it at the end of each call, for no row where none is over."""
        self._tell((), is_over=True)
        self._session.close(rows)

    def _tell(self, token_ids: Sequence[int], is_over: bool) -> None:
        for piece in self._text.add(token_ids, is_over):
            self._audience.tell(piece)


@dataclass
class LiveGenerator:
    """See `tasks.generate.Generator`; its sessions tell what they write."""

    generator: Generator
    tokenizer: Any
    audience: Audience

    def __getattr__(self, name: str) -> Any:
        """All else is that of the generator."""
        return getattr(self.generator, name)

    def open(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int
    ) -> LiveSession:
        """See `Generator.open`; one row."""
        session = self.generator.open(prompts, copies, sampling, max_total_tokens)
        return LiveSession(session, self.tokenizer, self.audience)


class StoppableSession:
    """See `tasks.generate.Session`; ends before a call that nobody wants any more."""

    def __init__(self, session: Session, audience: Audience) -> None:
        self._session, self._audience = session, audience

    def __getattr__(self, name: str) -> Any:
        """All else is that of the session."""
        return getattr(self._session, name)

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """See `Session.generate`."""
        self._audience.require()
        return self._session.generate(rows, max_new_tokens)


@dataclass
class StoppableGenerator:
    """See `tasks.generate.Generator`; its sessions end where their play is not wanted any more."""

    generator: Generator
    audience: Audience

    def __getattr__(self, name: str) -> Any:
        """All else is that of the generator."""
        return getattr(self.generator, name)

    def open(self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int) -> Session:
        """See `Generator.open`. Rows that go on by themselves end with their next search."""
        from tasks.generate import FreeSession

        session = self.generator.open(prompts, copies, sampling, max_total_tokens)
        return (
            session if isinstance(session, FreeSession) else cast("Session", StoppableSession(session, self.audience))
        )


@dataclass
class LiveRetriever:
    """See `tasks.retrieval.Retriever`; tells what it finds."""

    retriever: Retriever
    audience: Audience

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """See `Retriever.search`."""
        self.audience.require()
        hits = self.retriever.search(queries, top_k)
        self.audience.has_found = True
        self.audience.tell(Found(tuple(queries), tuple(map(tuple, hits))))
        return hits
