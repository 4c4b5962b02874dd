"""The writer without a model: sub-questions and answers are those of the decomposition, queries follow from rules.

It is deterministic and as fast as reading. A hop `subject >> relation` is reworded as a question. A query is the hop's
reference query, its subject and relation, its key words, or the sub-question.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from dataclasses import replace

from tasks.augment import Written
from tasks.data.decomposition import RELATION, hops_of
from tasks.types import Hop, Question

_WORD = re.compile(r"[^\W_]+(?:['\u2019.&/-][^\W_]+)*")
_POSSESSIVE = re.compile(r"['\u2019]s$", re.IGNORECASE)
_PREPOSITIONS = ("at", "by", "for", "from", "in", "of", "on", "to", "with")
_STOP_WORDS = frozenset(
    "a about an and are as at be been being by can could did do does for from had has have he her his how in into "
    "is it its many much of on or she that the their them there these they this those to was were what when where "
    "which who whom whose why will with would".split()
)


class RulesWriter:
    """See the module; `write` never fails."""

    def write(self, questions: Iterable[Question]) -> Generator[Written, None, None]:
        """The hops of each question with every query the rules give, the best first."""
        for question in questions:
            resolved = zip(question.decomposition, hops_of(question), strict=True)
            yield Written(question, tuple(_with_queries(hop, given.queries != ()) for given, hop in resolved))


def _with_queries(hop: Hop, has_own: bool) -> Hop:
    subject, arrow, relation = (part.strip() for part in hop.question.partition(RELATION))
    asked = _ask(subject, relation) if arrow else hop.question
    searched = f"{subject} {relation}" if arrow else hop.question
    own = hop.queries if has_own else ()  # Else `hops_of` has filled in the hop itself.
    pair = (searched,) if arrow else ()
    queries = (*own, *pair, key_words(searched), asked.rstrip(" ?"))
    return replace(hop, question=asked, queries=queries)


def _ask(subject: str, relation: str) -> str:
    """The question of a hop. With a relation that ends in a preposition the subject comes first.

    >>> _ask("Bern", "mayor"), _ask("Bern", "capital of")
    ('What is the mayor of Bern?', 'What is Bern capital of?')
    """
    leads_away = relation.rpartition(" ")[2] in _PREPOSITIONS
    return f"What is {subject} {relation}?" if leads_away else f"What is the {relation} of {subject}?"


def key_words(text: str) -> str:
    """The words of a question that a search engine needs, in their order.

    >>> key_words("When was the mayor of St. Gallen's twin town born?")
    'mayor St Gallen twin town born'
    """
    words = (_POSSESSIVE.sub("", word) for word in _WORD.findall(text))
    return " ".join(word for word in words if word.lower() not in _STOP_WORDS)
