"""Labels pivots by a chat model, which sees golden hops and trajectory and gives back JSON with a label a search.

PiCA Appendix A (arXiv 2605.09287; docs/methods/pica.md) has the task; the prompt's words are ours.

Its reply is `{"reason": text, "labels": ["+", "-", ...]}`, alone or in one fenced block. Any other reply gives no
labels: it is never corrected. Texts of the trajectory stand between marks and are data; a passage that speaks to the
labeller changes nothing about the form of a reply.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar, Literal

from tasks.data.decomposition import hops_of
from tasks.records.usage import Usage
from tasks.services import Chat, Messages, Refusal, Reply, Resources, Role, StepLabels
from tasks.services.endpoint import Endpoint
from tasks.services.replies import UnusableError, check_prompt, filled, inert, read_json
from tasks.types import Question, Turn

PLACEHOLDERS = ("{answer}", "{hops}", "{num_hops}", "{trajectory}", "{num_searches}")


@dataclass(frozen=True)
class _ReplyLabels:
    """The schema of a reply."""

    reason: str
    labels: tuple[Literal["+", "-"], ...]


@dataclass(frozen=True)
class ChatLabeller:
    """The model that labels.

    Attributes:
        prompt: text with `PLACEHOLDERS`.
        chat: the server, the model and its budget.
    """

    role: ClassVar[Role] = "labeller"
    needs_reference: ClassVar[bool] = False

    prompt: str
    chat: Endpoint

    def __post_init__(self) -> None:
        check_prompt(self.prompt, PLACEHOLDERS)

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ModelLabeller]:
        """Open and close the connections to the server."""
        with self.chat.opened(resources) as chat:
            yield ModelLabeller(chat, self.prompt)


@dataclass(frozen=True)
class ModelLabeller:
    """See `tasks.services.Labeller`; replies come from the cache of `chat` where it has them."""

    chat: Chat
    prompt: str

    @property
    def usage(self) -> Usage:
        """That of `chat`, whose failures include replies without usable labels."""
        return self.chat.usage

    def label(self, played: Iterable[tuple[Question, Sequence[Turn]]]) -> Iterator[StepLabels]:
        """See `tasks.services.Labeller`. A trajectory without a search needs no reply."""
        waiting: deque[int] = deque()

        def conversations() -> Iterator[Messages]:
            for question, turns in played:
                count = sum(turn.executed for turn in turns)
                waiting.append(count)
                if count:
                    yield [{"role": "user", "content": self._filled(question, turns, count)}]

        with closing(self.chat.replies(conversations())) as replies:
            for reply in replies:
                while waiting and waiting[0] == 0:
                    yield _nothing(waiting)
                labels = _labels(reply, waiting.popleft())
                self.usage.failures += isinstance(reply, Reply) and labels.labels is None
                yield labels
        while waiting:
            yield _nothing(waiting)

    def _filled(self, question: Question, turns: Sequence[Turn], count: int) -> str:
        hops = hops_of(question)
        lines = [f"{i}. {hop.question} -> {hop.answer}" for i, hop in enumerate(hops, 1)]
        values = {
            "{answer}": question.answers[0],
            "{hops}": "\n".join(lines),
            "{num_hops}": str(len(hops)),
            "{trajectory}": "".join(turn.text + turn.observation for turn in turns),
            "{num_searches}": str(count),
        }
        return filled(self.prompt, {name: inert(value) for name, value in values.items()})


def _nothing(waiting: deque[int]) -> StepLabels:
    waiting.popleft()
    return StepLabels(())


def _labels(reply: Reply | Refusal, count: int) -> StepLabels:
    """The labels of a reply, or why there are none."""
    if isinstance(reply, Refusal):
        return StepLabels(None, f"refused: {reply.detail}")
    try:
        found = read_json(reply, _ReplyLabels)
    except UnusableError as error:
        return StepLabels(None, ": ".join(map(str, error.args)))
    if len(found.labels) != count:
        return StepLabels(None, f"wrong_number: found {len(found.labels)} labels, expected {count}, one a search")
    return StepLabels(tuple(label == "+" for label in found.labels), found.reason)


PART = ChatLabeller
