"""The system of a policy, trained or not: a language model that plays with a prompt and a grammar."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from tasks.agent import grammars, prompts
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.agent.rollout import Player, RolloutConf
from tasks.generate import Sampling
from tasks.model import load_tokenizer
from tasks.services import Role
from tasks.store import DataError
from tasks.systems import Resources
from tasks.types import Mode, Question, Trajectory

TEMPERATURES: dict[Mode, float] = {"greedy": 0.0, "sampled": 1.0}


@dataclass(frozen=True)
class PolicySystem:
    """One policy with its retriever and budgets; its episodes are trajectories."""

    player: Player

    @property
    def batch_questions(self) -> int:
        """The number of rows that its settings allow."""
        return self.player.conf.batch_rows

    @property
    def tokenizer(self) -> Any:
        """The policy's."""
        return self.player.tokenizer

    def play(self, questions: Sequence[Question], mode: Mode, seed: int) -> list[Trajectory]:
        """See `System`."""
        return self.player.play(questions, 1, Sampling(TEMPERATURES[mode], 1.0, (), seed=seed))


@dataclass(frozen=True)
class PolicySettings:
    """The settings with which a policy plays.

    Attributes:
        prompt: instructions around the question.
        grammar: kind and settings of the grammar that reads its text.
        rollout: budgets.
        weights: `start` is the run's start policy, or what a method trains of it; `given` is the pretrained model
            before anything is taught to it.
    """

    prompt: Prompt
    grammar: dict[str, Any]
    rollout: RolloutConf
    weights: Literal["start", "given"] = "start"
    plays_policy: ClassVar[bool] = True
    services: ClassVar[tuple[Role, ...]] = ()

    def loads(self) -> SearchGrammar:
        """The grammar without a tokenizer, so that the plan finds its source file (`tasks.identity.modules_of`)."""
        return grammars.make(self.grammar, None, "grammar")

    def check_prompts(self, policy: Path, questions: Iterable[Question], where: str) -> None:
        """See `Prompted`."""
        tokenizer = load_tokenizer(policy)
        grammar = grammars.make(self.grammar, tokenizer, "grammar")
        try:
            prompts.check_prompts(tokenizer, self.prompt, questions, grammar, self.rollout.max_prompt_tokens)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[PolicySystem]:
        """See `Kind.opened`; plays the weights in the folder `resources.policy`."""
        assert resources.policy is not None
        tokenizer = load_tokenizer(resources.policy)
        rollout = replace(self.rollout, top_k=resources.top_k or self.rollout.top_k)
        grammar = grammars.make(self.grammar, tokenizer, "grammar")
        generator = resources.start_generator(resources.policy)
        try:
            yield PolicySystem(Player(rollout, generator, tokenizer, resources.retriever, grammar, self.prompt))
        finally:
            generator.shutdown()


PART = PolicySettings
