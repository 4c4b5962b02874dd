"""The tokens of an observation: what the environment appends to a call. Rollouts and demonstrations share it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tasks.agent.grammar import SearchGrammar
from tasks.types import Action, Hit


def observation_ids(
    tokenizer: Any, grammar: SearchGrammar, action: Action, hits: Sequence[Sequence[Hit]] | None, max_tokens: int,
    is_last: bool,
) -> list[int]:  # fmt: skip
    """Opening tag, documents cut to their budget, closing tag: the tag survives any cut.

    Args:
        tokenizer, grammar: of the policy.
        action: what the call asked for.
        hits: passages of each of its queries; None where no search was asked, which is answered by a complaint.
        max_tokens: budget of the documents of one query.
        is_last: whether no further search will be executed.
    """
    last_message = _encode(tokenizer, grammar.last_message) if is_last and grammar.last_message else ()
    if hits is None:
        return [*_encode(tokenizer, grammar.complaint(action)), *last_message]
    whole = _encode(tokenizer, grammar.body(action, hits))
    kept = list(whole[: max_tokens * len(hits)])
    while len(kept) < len(whole) and kept and not grammar.may_end(tokenizer.decode(kept, skip_special_tokens=False)):
        kept.pop()
    return [*_encode(tokenizer, grammar.opening), *kept, *_encode(tokenizer, grammar.closing), *last_message]


@functools.lru_cache(maxsize=4096)
def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids; the frames of all observations are equal, and plays of a question find the same documents."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))
