"""What is evaluated: a system plays questions and returns episodes. A kind of system is a file of this folder.

A start policy, a trained policy and a prompted model are equals here: the evaluation knows this protocol alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tasks.types import Episode, Mode, Question


class System(Protocol):
    """Plays questions.

    Attributes:
        batch_questions: how many it plays at once; so many are played again after a kill.
        tokenizer: decodes the tokens of its episodes, None where they have none.
    """

    @property
    def batch_questions(self) -> int: ...

    @property
    def tokenizer(self) -> Any: ...

    def play(self, questions: Sequence[Question], mode: Mode, seed: int) -> Iterable[Episode]:
        """One episode a question, in order; the same for the same arguments.

        Args:
            questions: at most `batch_questions`.
            mode: the most likely answer, or one drawn at temperature 1.
            seed: of the draws.
        """
        ...
