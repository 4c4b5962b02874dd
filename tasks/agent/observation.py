"""The tokens of an observation: what the environment appends to a call. Rollouts and demonstrations share it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tasks.agent.grammar import SearchGrammar
from tasks.types import Action, Hit

_CHARS_A_TOKEN, _SPARE = 32, 64
_LONGEST_KEPT = 8192  # Characters.


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
    budget = max_tokens * len(hits)
    whole = _beginning(tokenizer, grammar, action, hits, budget)
    kept = list(whole[:budget])
    while len(kept) < len(whole) and kept and not grammar.may_end(tokenizer.decode(kept, skip_special_tokens=False)):
        kept.pop()
    return [*_encode(tokenizer, grammar.opening), *kept, *_encode(tokenizer, grammar.closing), *last_message]


def _beginning(
    tokenizer: Any, grammar: SearchGrammar, action: Action, hits: Sequence[Sequence[Hit]], budget: int
) -> Sequence[int]:
    """Token ids of the documents: all, or where a passage is as long as a book, more than will be kept.

    Tokens near the cut may differ from those of the whole text, which is why more of them must be there.
    """
    most = _CHARS_A_TOKEN * (budget + _SPARE)
    if any(len(hit.text) > most for of_query in hits for hit in of_query):
        first = _encode(tokenizer, grammar.body(action, _up_to_the_first_book(hits, most)))
        if len(first) > budget + _SPARE:
            return first
    return _encode(tokenizer, grammar.body(action, hits))


def _up_to_the_first_book(hits: Sequence[Sequence[Hit]], most: int) -> list[list[Hit]]:
    """The hits up to the first whose text is longer than `most` characters, of which as many are left."""
    kept: list[list[Hit]] = [[] for _ in hits]
    for of_query, kept_of_query in zip(hits, kept, strict=True):
        for hit in of_query:
            if len(hit.text) > most:
                kept_of_query.append(replace(hit, text=hit.text[: hit.text.rfind(" ", 0, most)]))
                return kept
            kept_of_query.append(hit)
    return kept


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids; the frames of all observations are equal, and plays of a question find the same documents."""
    if len(text) > _LONGEST_KEPT:  # So many long texts would be gigabytes.
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    return _kept(tokenizer, text)


@functools.lru_cache(maxsize=4096)
def _kept(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
