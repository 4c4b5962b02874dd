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
from tasks.reward_model.model import load, probabilities
from tasks.reward_model.reading import encode
from tasks.services import Probabilities, Resources, Role
from tasks.types import Question, Trajectory


@dataclass(frozen=True)
class InProcessRewardModel:
    """See the module.

    Attributes:
        model: a file of `conf/reward_model/`, which this pipeline trains.
    """

    role: ClassVar[Role] = "reward_model"
    needs_reference: ClassVar[bool] = False

    model: str

    def __post_init__(self) -> None:
        require(bool(self.model), "model", self.model, "the name of a file of conf/reward_model/")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[FrozenRewardModel]:
        """Load the model, which does not change any more.

        Raises:
            DataError: another model lies in its folder than the one this run was planned for.
        """
        folder = resources.models[self.model].checked(resources.root)
        model, tokenizer = load(folder, is_new=False)
        yield FrozenRewardModel(model.requires_grad_(False).to(pick_device()), tokenizer, read_card(folder))


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
        """See `tasks.services.RewardModel`."""
        card = self.card
        sequences = [
            encode(self.tokenizer, card.placeholder_id, question.question, trajectory.turns, card.max_tokens)
            for trajectory, question in zip(trajectories, questions, strict=True)
        ]
        with self.usage.waiting(len(sequences), sum(map(len, sequences))):
            found = probabilities(self.model, sequences, card.max_pack_tokens)

        scored = []
        for trajectory, sequence, values in zip(trajectories, sequences, found, strict=True):
            by_turn = dict(zip(sequence.turns, values, strict=True))
            after = tuple(by_turn.get(number) for number in range(len(trajectory.turns)))
            scored.append(Probabilities(values[0], after))
        return scored


PART = InProcessRewardModel
