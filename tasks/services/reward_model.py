"""A trained reward model in this process: it reads trajectories as it did when it was trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tasks.conf import require
from tasks.model import pick_device
from tasks.records.usage import Usage
from tasks.reward_model.card import Card, read_card
from tasks.reward_model.model import opened, probabilities
from tasks.reward_model.reading import encode
from tasks.services import Head, Probabilities, Resources, Role, ServiceError
from tasks.types import Question, Trajectory


@dataclass(frozen=True)
class InProcessRewardModel:
    """See the module.

    Attributes:
        model: a file of `conf/reward_model/`, which this pipeline trains.
        head: what its number means, as `loss.head` of that file says.
    """

    role: ClassVar[Role] = "reward_model"
    needs_reference: ClassVar[bool] = False

    model: str
    head: Head

    def __post_init__(self) -> None:
        require(bool(self.model), "model", self.model, "the name of a file of conf/reward_model/")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[FrozenRewardModel]:
        """Load the model, which does not change any more.

        Raises:
            DataError: another model lies in its folder than the one this run was planned for, or it is damaged.
            ServiceError: its number means something else.
        """
        folder = resources.models[self.model].checked(resources.root)
        if (head := read_card(folder).head) != self.head:
            raise ServiceError(
                f"services: reward_model: {folder.name}: found head {head!r}, expected {self.head!r}. Name a "
                f"model in conf/service/ whose loss has head {self.head!r}."
            )
        model, tokenizer, card = opened(folder)
        yield FrozenRewardModel(model.requires_grad_(False).to(pick_device()), tokenizer, card)


@dataclass(frozen=True)
class FrozenRewardModel:
    """See `tasks.services.RewardModel`.

    Attributes:
        model, tokenizer: as they were stored.
        card: how the model reads.
        usage: trajectories are its calls.
    """

    model: Any
    tokenizer: Any
    card: Card
    usage: Usage = field(default_factory=Usage)

    def probabilities(self, trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Probabilities]:
        """See `tasks.services.RewardModel`.

        Raises:
            ServiceError: a question alone is longer than the model reads.
        """
        card = self.card
        sequences = [
            encode(self.tokenizer, card.placeholder_id, question.question, trajectory.turns, card.max_tokens)
            for trajectory, question in zip(trajectories, questions, strict=True)
        ]
        for question, sequence in zip(questions, sequences, strict=True):
            if not sequence.places:
                raise self._too_long(question)
        with self.usage.waiting(len(sequences), sum(map(len, sequences))):
            found = probabilities(self.model, sequences, card.max_pack_tokens)

        scored = []
        for trajectory, sequence, values in zip(trajectories, sequences, found, strict=True):
            by_turn = dict(zip(sequence.turns, values, strict=True))
            after = tuple(by_turn.get(number) for number in range(len(trajectory.turns)))
            scored.append(Probabilities(values[0], after))
        return scored

    def _too_long(self, question: Question) -> ServiceError:
        """The error for a question after which no token is left to read its start at."""
        num_tokens = len(self.tokenizer.encode(f"{question.question}\n", add_special_tokens=False))
        return ServiceError(
            f"services: reward_model: question {question.id!r}: found {num_tokens} tokens, expected fewer than "
            f"max_tokens={self.card.max_tokens}. Leave the question out, or raise fit.max_tokens in conf/reward_model/."
        )


PART = InProcessRewardModel
