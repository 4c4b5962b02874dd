"""What a tiny policy can read: the tokenizer that it learns from its data, and the share of words that are one token.

A word of several tokens is read in pieces, which a tiny policy hardly learns to copy. Of a generated world every word
is one token; of other texts the vocabulary has room for the most frequent words alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.agent.prompts import PLACEHOLDER, Prompt
from tasks.base.demonstrations import topic
from tasks.base.tokenizer import LITERALS, build_tokenizer
from tasks.data.decomposition import hops_of
from tasks.records.start_policy import KnownWords
from tasks.types import Passage, Question

NUM_PASSAGES = 20_000
"""The first passages of a corpus, from which the vocabulary is learned."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Vocabulary:
    """How a tiny policy's vocabulary is learned.

    Attributes:
        max_vocab: tokens at most.
        prompt: of the policy.
        literals: strings of its grammar that are one token each.
    """

    max_vocab: int
    prompt: Prompt
    literals: tuple[str, ...] = ()

    def learned(self, training: Sequence[Question], passages: Iterable[Passage]) -> Any:
        """The tokenizer that training questions and the first passages give."""
        return build_tokenizer(self._texts(training, passages), self.max_vocab, (*LITERALS, *self.literals))

    def _texts(self, questions: Sequence[Question], passages: Iterable[Passage]) -> Iterator[str]:
        """Text as the policy will read it, so that words get a token both with and without a space before them."""
        for passage in _first(passages):
            yield f" {passage.title} {passage.text}"
            yield passage.title
        for question in questions:
            yield self.prompt.user.replace(PLACEHOLDER, question.question)
            for hop in hops_of(question):
                yield f" next {topic(hop)} {topic(hop)} found , {hop.queries[0]}"


def known(tokenizer: Any, questions: Iterable[Question], passages: Iterable[Passage]) -> KnownWords:
    """How much of these texts a tokenizer knows."""
    tokens = tokenizer.get_vocab()
    pieces = tokenizer.backend_tokenizer.pre_tokenizer

    def share(texts: Iterable[str]) -> float:
        counts = Counter(word for text in texts for word in _WORD.findall(text))
        whole = sum(count for word, count in counts.items() if _is_token(word, tokens, pieces))
        return whole / max(1, counts.total())

    return KnownWords(
        questions=share(question.question for question in questions),
        passages=share(f"{passage.title} {passage.text}" for passage in _first(passages)),
    )


def _is_token(word: str, tokens: dict[str, int], pieces: Any) -> bool:
    """Whether a word after a blank is one token; `pieces` writes its bytes as the vocabulary does."""
    found = pieces.pre_tokenize_str(f" {word}")
    return len(found) == 1 and found[0][0] in tokens


def _first(passages: Iterable[Passage]) -> Iterator[Passage]:
    return (passage for _, passage in zip(range(NUM_PASSAGES), passages, strict=False))
