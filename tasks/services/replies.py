"""Fills prompts with placeholders and reads replies that should be JSON, for every caller of a chat model."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tasks import conf, store
from tasks.agent.grammar import inert_tokens
from tasks.conf import require
from tasks.services import Reply, ServiceError

T = TypeVar("T")
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)
_MARKS = re.compile("={3,}|<{3,}|>{3,}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_FEWEST, _MOST = 20, 100


class UnusableError(Exception):
    """A reply that cannot be used; its arguments are a reason and what was found."""


def require_whole(reply: Reply) -> None:
    """Raise the UnusableError for a reply that is cut off or empty."""
    if reply.finish_reason in ("length", "max_tokens"):
        raise UnusableError("cut_off", "the reply ended at its length limit; raise max_tokens of the request")
    if reply.finish_reason == "content_filter":
        raise UnusableError("cut_off", "the server's filter cut the reply off")
    if not reply.content.strip():
        raise UnusableError("empty_reply", f"no text in message.content, finish_reason {reply.finish_reason!r}")


@dataclass
class Unusable:
    """Ends a run in which too large a share of a model's last replies cannot be used: each stands for a score of 0.

    The share is that of the last `_MOST` replies, so that a model that turns bad late is found as soon as one that was
    bad from the start; the first `_FEWEST` decide nothing.

    Attributes:
        where: the service.
        most: share that is allowed.
    """

    where: str
    most: float
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_MOST))

    def note(self, reason: str | None) -> None:
        """Take note of one reply: why it cannot be used, None if it can.

        Raises:
            ServiceError: too many cannot.
        """
        self._recent.append(reason is not None)
        num, num_unusable = len(self._recent), sum(self._recent)
        if reason is not None and num >= _FEWEST and num_unusable > self.most * num:
            raise ServiceError(
                f"{self.where}: {num_unusable} of the last {num} replies cannot be used, expected a share of at most "
                f"{self.most:g} (max_unusable_share). The last one: {reason}. Mend the prompt or the request, or take "
                "another model. Where the server was at fault, remove .scratch/replies as well: it keeps these replies."
            )


def check_prompt(prompt: str, placeholders: Iterable[str]) -> None:
    """Raise the ValueError for a prompt that lacks one of the placeholders."""
    for placeholder in placeholders:
        require(placeholder in prompt, "prompt", f"{prompt[:40]}...", f"text with {placeholder}")


def filled(prompt: str, values: Mapping[str, str]) -> str:
    """The prompt with its placeholders replaced, in one pass, so that a placeholder inside a value stays text.

    No value can begin or end a turn at the server that reads it.
    """
    return re.sub("|".join(map(re.escape, values)), lambda placeholder: inert_tokens(values[placeholder[0]]), prompt)


def inert(value: str) -> str:
    """Data that cannot end the marks (`===`, `<<<`, `>>>`) between which a prompt shows it: two of the signs are left.

    >>> inert("x\\n=== end ===\\n>>>> y")
    'x\\n== end ==\\n>> y'
    """
    return _MARKS.sub(lambda mark: mark[0][:2], value)


def one_paragraph(value: str) -> str:
    """Data that cannot end the paragraph in which a prompt shows it: each run of white space becomes one blank."""
    return " ".join(value.split())


def read_json(reply: Reply, schema: type[T]) -> T:
    """The JSON of a reply, alone or in one fenced block, as the dataclass `schema`.

    Raises:
        UnusableError: the reply is cut off, empty, no JSON, or JSON of another schema.
    """
    require_whole(reply)
    fenced = _FENCED.fullmatch(reply.content)
    try:
        tree = store.loads(fenced[1] if fenced else reply.content)
    except (ValueError, RecursionError) as error:
        raise UnusableError("not_json", f"{error}: {reply.content[:200]!r}") from None

    if _LONE_SURROGATE.search(json.dumps(tree, ensure_ascii=False)):
        raise UnusableError("wrong_schema", "found half of a surrogate pair, expected text")
    try:
        return conf.fill(schema, tree, "reply")
    except ValueError as error:
        raise UnusableError("wrong_schema", str(error)) from None
