"""The text that a reward model reads, and the places in it at which f(t) is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tasks.conf import require

_TAG = re.compile(r"(</?\w+>)")


class ReadTurn(Protocol):
    """A turn as a reward model sees it."""

    @property
    def text(self) -> str: ...

    @property
    def observation(self) -> str: ...

    @property
    def executed(self) -> bool: ...


@dataclass(frozen=True)
class Encoded:
    """One trajectory as tokens.

    Attributes:
        ids: question and turns, with a placeholder token at every place.
        places: indices into `ids` of the placeholders: after the question, after each executed search, and at the end.
        turns: for each place, the number of the turn that it scores; None for the question, and for the end of a
            trajectory whose last turn was a search.
        is_cut: whether tokens over the limit were left out, and the places in them.
    """

    ids: tuple[int, ...]
    places: tuple[int, ...]
    turns: tuple[int | None, ...]
    is_cut: bool = False

    def __len__(self) -> int:
        return len(self.ids)


def placeholder_id(tokenizer: Any, placeholder: str, where: str) -> int:
    """The id of the placeholder token.

    Raises:
        ValueError: it is not one token; starts with `where`.
    """
    ids = tokenizer.encode(placeholder, add_special_tokens=False)
    expected = "one token of the model's tokenizer, such as <|vision_start|> of Qwen or <|endoftext|>"
    require(len(ids) == 1, f"{where}: placeholder", placeholder, expected)
    return int(ids[0])


class Blanked:
    """A tokenizer that makes one and the same token of every token of a word; tags such as `<search>` stay.

    What is left of a trajectory is its form: how many turns and searches, how long each text is, and which tags.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.filler = int(tokenizer.encode(".", add_special_tokens=False)[0])

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids, as many as the tokenizer makes of the words and the tags by themselves."""
        return list(self._ids(text))

    def _ids(self, text: str) -> Iterator[int]:
        for piece in _TAG.split(text):
            ids = self.tokenizer.encode(piece, add_special_tokens=False)
            yield from ids if _TAG.fullmatch(piece) else [self.filler] * len(ids)


def encode(tokenizer: Any, placeholder: int, question: str, turns: Sequence[ReadTurn], max_tokens: int) -> Encoded:
    """Tokens of a question and its turns.

    f(t) is read after action t and before its observation (PiCA Eq. 2). A placeholder that the policy wrote itself, or
    that stands in a document, is left out: it would be another place.

    PiCA Eq. 2 (arXiv 2605.09287; docs/methods/pica.md)

    Args:
        tokenizer: of the reward model.
        placeholder: id of the placeholder token.
        question: its text.
        turns: in order; the last one may be unfinished.
        max_tokens: what comes after is cut off.
    """
    ids: list[int] = []
    marks: list[tuple[int, int | None]] = []

    def read(text: str) -> None:
        ids.extend(i for i in tokenizer.encode(text, add_special_tokens=False) if i != placeholder)

    def mark(turn: int | None) -> None:
        marks.append((len(ids), turn))
        ids.append(placeholder)

    read(f"{question}\n")
    mark(None)
    for number, turn in enumerate(turns):
        read(turn.text)
        if turn.executed:
            mark(number)
        read(turn.observation)  # Also the complaint about an invalid call.
    mark(None if not turns or turns[-1].executed else len(turns) - 1)

    kept = [(place, turn) for place, turn in marks if place < max_tokens]
    places, numbers = zip(*kept, strict=True) if kept else ((), ())
    return Encoded(tuple(ids[:max_tokens]), places, numbers, len(ids) > max_tokens)
