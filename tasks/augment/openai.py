"""The writer that asks a model: one request a question over the chat-completions protocol, one checked reply.

The model sees the question, its answer and its decomposition with `#k` resolved, and gives back JSON:
`{"hops": [{"hop": 1, "question": text, "answer": text, "queries": [text, ...]}, ...]}`, alone or in one fenced block.
Another shape rejects the question; a reply is never mended. Which passage supports a hop is known from the
decomposition and not asked.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tasks import conf
from tasks.augment import Rejection, WriterError, Written
from tasks.augment.endpoint import Endpoint, RefusedError, Reply
from tasks.data.decomposition import hops_of
from tasks.types import Hop, Question

T = TypeVar("T")
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_AHEAD = 4  # Questions under way or waiting, for each request in flight: a slow reply should not hold up the others.


@dataclass(frozen=True)
class _ReplyHop:
    """One hop of a reply."""

    hop: int
    question: str
    answer: str
    queries: tuple[str, ...]


@dataclass(frozen=True)
class _ReplyHops:
    """The schema of a reply."""

    hops: tuple[_ReplyHop, ...]


class UnusableError(Exception):
    """A reply that is not what was asked for: a reason and what was found."""


class OpenAIWriter:
    """See the module."""

    def __init__(self, endpoint: Endpoint, num_queries: int) -> None:
        """Ask `endpoint` for `num_queries` queries a hop."""
        self.endpoint, self.num_queries = endpoint, num_queries

    def write(self, questions: Iterable[Question]) -> Generator[Written, None, None]:
        """See `tasks.augment.Writer`; never more than `max_in_flight` requests at once."""
        in_flight = self.endpoint.conf.max_in_flight
        waiting: deque[Future[Written]] = deque()
        pool = ThreadPoolExecutor(in_flight, thread_name_prefix="augment")
        try:
            for question in questions:
                waiting.append(pool.submit(self._write_one, question))
                if len(waiting) >= _AHEAD * in_flight:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            self.endpoint.stop()
            pool.shutdown(wait=True, cancel_futures=True)  # What is in flight is paid for: let it reach the cache.

    def _write_one(self, question: Question) -> Written:
        try:
            reply = self.endpoint.complete([{"role": "user", "content": self._prompt(question)}])
        except RefusedError as error:
            return Written(question, rejection=Rejection("write", "refused", str(error)))
        except WriterError as error:
            self.endpoint.stop(error)  # Before this thread takes the next question.
            raise
        try:
            return Written(question, _read(reply, question), tokens=reply.tokens)
        except UnusableError as error:
            reason, detail = error.args
            return Written(question, rejection=Rejection("write", reason, detail), tokens=reply.tokens)

    def _prompt(self, question: Question) -> str:
        lines = [f"{i}. {hop.question} -> {hop.answer}" for i, hop in enumerate(hops_of(question), 1)]
        values = {
            "{question}": question.question,
            "{answer}": question.answers[0],
            "{hops}": "\n".join(lines),
            "{num_queries}": str(self.num_queries),
        }
        return filled(self.endpoint.conf.prompt, values)


def filled(prompt: str, values: Mapping[str, str]) -> str:
    """The prompt with its placeholders replaced, in one pass, so that a placeholder inside a value stays text."""
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], prompt)


def _read(reply: Reply, question: Question) -> tuple[Hop, ...]:
    """The hops of a reply.

    Raises:
        UnusableError: as `read_json`, or hops that are not numbered 1, 2, ...
    """
    found = read_json(reply, _ReplyHops).hops
    if [hop.hop for hop in found] != list(range(1, len(found) + 1)):
        raise UnusableError("wrong_order", f"found hops {[hop.hop for hop in found]}, expected 1, 2, ...")
    support = [hop.support_passage_id for hop in question.decomposition] + [None] * len(found)
    return tuple(
        Hop(" ".join(hop.question.split()), " ".join(hop.answer.split()), support[i], hop.queries)
        for i, hop in enumerate(found)
    )


def read_json(reply: Reply, schema: type[T]) -> T:
    """The JSON of a reply, alone or in one fenced block, as the dataclass `schema`.

    Raises:
        UnusableError: cut off, empty, not JSON, or another shape.
    """
    if reply.finish_reason == "length":
        raise UnusableError("cut_off", "the reply ended at its length limit; raise max_tokens of the request")
    if not reply.content.strip():
        told = f"no text in message.content, finish_reason {reply.finish_reason!r}"
        raise UnusableError("empty_reply", told)
    fenced = _FENCED.fullmatch(reply.content)
    try:
        tree = json.loads(fenced[1] if fenced else reply.content)
    except (ValueError, RecursionError) as error:
        raise UnusableError("not_json", f"{error}: {reply.content[:200]!r}") from None
    if _LONE_SURROGATE.search(json.dumps(tree, ensure_ascii=False)):
        raise UnusableError("wrong_schema", "found half of a surrogate pair, expected text")
    try:
        return conf.fill(schema, tree, "reply")
    except ValueError as error:
        raise UnusableError("wrong_schema", str(error)) from None
