"""The writer that asks a chat model, with one request per question and a checked reply.

The model sees the question, its answer and its decomposition with `#k` resolved, and gives back JSON:
`{"hops": [{"hop": 1, "question": text, "answer": text, "queries": [text, ...]}, ...]}`, alone or in one fenced block.
A reply of another schema rejects the question; replies are never corrected. The decomposition says which passage
supports a hop, so the model is not asked for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

from tasks.augment import Rejection, Written
from tasks.data.decomposition import hops_of
from tasks.services import Chat, Messages, Refusal, Reply
from tasks.services.replies import UnusableError, filled, read_json
from tasks.types import Hop, Question


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


class OpenAIWriter:
    """See the module."""

    def __init__(self, chat: Chat, prompt: str, num_queries: int) -> None:
        """Ask `chat` for `num_queries` queries a hop."""
        self.chat, self.prompt, self.num_queries = chat, prompt, num_queries

    def write(self, questions: Iterable[Question]) -> Generator[Written, None, None]:
        """See `tasks.augment.Writer`."""
        asked: deque[Question] = deque()

        def conversations() -> Iterator[Messages]:
            for question in questions:
                asked.append(question)
                yield [{"role": "user", "content": self._prompt(question)}]

        with closing(self.chat.replies(conversations())) as replies:
            for reply in replies:
                written = _written(asked.popleft(), reply)
                self.chat.usage.failures += isinstance(reply, Reply) and written.rejection is not None
                yield written

    def _prompt(self, question: Question) -> str:
        lines = [f"{i}. {hop.question} -> {hop.answer}" for i, hop in enumerate(hops_of(question), 1)]
        values = {
            "{question}": question.question,
            "{answer}": question.answers[0],
            "{hops}": "\n".join(lines),
            "{num_queries}": str(self.num_queries),
        }
        return filled(self.prompt, values)


def _written(question: Question, reply: Reply | Refusal) -> Written:
    if isinstance(reply, Refusal):
        return Written(question, rejection=Rejection("write", "refused", reply.detail))
    try:
        return Written(question, _read(reply, question), tokens=reply.tokens)
    except UnusableError as error:
        reason, detail = error.args
        return Written(question, rejection=Rejection("write", reason, detail), tokens=reply.tokens)


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
