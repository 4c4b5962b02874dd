"""A chat model as judge (SLATE), behind an OpenAI-compatible server.

Three prompts ask for an explanation and then for a score. A reply is data: it counts only if it is
whole and its last pair of score tags holds -1, 0 or 1. One that cannot be read is asked for again once, at another
temperature; after that the score is 0 and the judgement says that it could not be read. A server that is down, or whose
replies mostly cannot be read, ends the run (`ServiceError`) instead of scoring everything 0. The endpoint keeps every
reply, so a run that was killed asks no question twice.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

from tasks.conf import Share, require
from tasks.records.usage import Usage
from tasks.services import Chat, Judged, Judgement, Messages, Refusal, Reply, Resources, Role
from tasks.services.endpoint import Endpoint
from tasks.services.replies import Unusable, UnusableError, check_prompt, filled, inert, require_whole
from tasks.types import Hit, Turn

_SCORE = re.compile(r"<score>((?:(?!<score>).)*?)</score>", re.DOTALL)
_VALUE = re.compile(r"[ \t\r\n]*([+-]?[01])[ \t\r\n]*")
_EXPLANATION = re.compile(r"<explanation>(.*?)</explanation>", re.DOTALL)
_FORM = re.compile(r"<(?=\s*/?\s*(?:score|explanation)\b)", re.IGNORECASE)
_SHOWN = 600
_PLACEHOLDERS = {
    "thought": ("{question}", "{context}", "{thought}"),
    "query": ("{question}", "{context}", "{thought}", "{query}"),
    "answer": ("{question}", "{context}", "{answer}", "{golds}"),
}


@dataclass(frozen=True)
class ChatJudge:
    """The model that judges.

    SLATE Appendix A.14 (arXiv 2602.23440; docs/methods/slate.md)

    Attributes:
        thought, query, answer: the prompts, with the placeholders of `_PLACEHOLDERS`.
        second_temperature: of the request that follows a reply without a score.
        chat: the server, the model and its budget.
        max_unusable_share: largest share of the judgements that may stand for a reply without a score; more end the
            run.
    """

    role: ClassVar[Role] = "judge"
    needs_reference: ClassVar[bool] = False

    thought: str
    query: str
    answer: str
    second_temperature: float
    chat: Endpoint
    max_unusable_share: Share = 0.5

    def __post_init__(self) -> None:
        for name, placeholders in _PLACEHOLDERS.items():
            check_prompt(getattr(self, name), placeholders)
        require(0 < self.second_temperature <= 2, "second_temperature", self.second_temperature, "above 0, at most 2")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ModelJudge]:
        """Open and close the connections to the server."""
        with self.chat.opened(resources) as chat:
            yield ModelJudge(chat, self)


@dataclass
class ModelJudge:
    """Asks `chat` for every score; items that are alike are asked for once.

    Attributes:
        num_repeated: replies without a score that were asked for again.
        num_judged: all scores.
        num_unreadable: those of 0 that stand for a reply without a score.
    """

    chat: Chat
    conf: ChatJudge
    num_repeated: int = 0
    num_judged: int = 0
    num_unreadable: int = 0

    def __post_init__(self) -> None:
        self._unusable = Unusable("services: judge", self.conf.max_unusable_share)

    @property
    def usage(self) -> Usage:
        """That of `chat`, whose failures include replies without a score, also those that were asked for again."""
        return self.chat.usage

    def judge(self, items: Sequence[Judged]) -> list[Judgement]:
        """See `tasks.services.Judge`.

        Raises:
            ServiceError: also where too many replies have no score.
        """
        prompts = [self._prompt(item) for item in items]
        different = list(dict.fromkeys(prompts))
        judged = self._ask(different, {})

        again = [prompt for prompt in different if not judged[prompt].is_readable]
        self.num_repeated += len(again)
        if again:
            judged |= self._ask(again, {"temperature": self.conf.second_temperature})

        judgements = [judged[prompt] for prompt in prompts]
        self.num_judged += len(judgements)
        self.num_unreadable += sum(not judgement.is_readable for judgement in judgements)
        for judgement in judgements:
            self._unusable.note(None if judgement.is_readable else judgement.reason)
        return judgements

    def _ask(self, prompts: Sequence[str], request: Mapping[str, Any]) -> dict[str, Judgement]:
        conversations: list[Messages] = [[{"role": "user", "content": prompt}] for prompt in prompts]
        judged = {}
        with closing(self.chat.replies(conversations, request)) as replies:
            for prompt, reply in zip(prompts, replies, strict=True):
                judged[prompt] = read_judgement(reply)
                self.usage.failures += isinstance(reply, Reply) and not judged[prompt].is_readable
        return judged

    def _prompt(self, item: Judged) -> str:
        values = {
            "{question}": item.question.question,
            "{context}": "\n".join(map(_shown_turn, item.before)) or "(nothing yet)",
            "{thought}": item.thought or "(no thought)",
            "{query}": item.content,
            "{answer}": item.content or "(empty)",
            "{golds}": " / ".join(item.question.answers),
        }
        # No data may end its marks or look like the form of a reply.
        return filled(getattr(self.conf, item.aspect), {name: inert(_FORM.sub("‹", v)) for name, v in values.items()})


def _shown_turn(turn: Turn) -> str:
    """An earlier turn as the judge reads it: what was written, and all passages in full."""
    return "\n".join([turn.text.strip(), *map(_shown_hit, turn.hits)])


def _shown_hit(hit: Hit) -> str:
    return f"[document] {hit.title}: {hit.text}"


def read_judgement(reply: Reply | Refusal) -> Judgement:
    """The score of a reply with its explanation; 0, marked as unreadable, where it has no score."""
    if isinstance(reply, Refusal):
        return Judgement(0, f"refused: {reply.detail}"[:_SHOWN], is_readable=False)
    try:
        require_whole(reply)
        score = read_score(reply.content)
    except UnusableError as error:
        return Judgement(0, ": ".join(map(str, error.args))[:_SHOWN], is_readable=False)
    explanation = _EXPLANATION.search(reply.content)
    return Judgement(score, explanation[1].strip()[:_SHOWN] if explanation else "")


def read_score(content: str) -> int:
    """The number in the last pair of score tags.

    Raises:
        UnusableError: there is no such pair, or it holds something else than -1, 0 or 1.

    >>> read_score("It ended in 1945. <score>+1</score>")
    1
    """
    pairs = _SCORE.findall(content)
    value = _VALUE.fullmatch(pairs[-1]) if pairs else None
    if value is None:
        found = f"{pairs[-1]!r}" if pairs else "no pair of score tags"
        raise UnusableError("no score", f"found {found}, expected -1, 0 or 1 in score tags")
    return int(value[1])


PART = ChatJudge
