"""TIPS: PPO with the outcome and what each turn added to the gold answer's likelihood (systems.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import require
from tasks.methods import search_r1
from tasks.rewards.potential import AnswerPotential
from tasks.rl.method import Method
from tasks.services.start_policy import StartPolicy


@dataclass(frozen=True, kw_only=True)
class Conf(search_r1.Conf):
    """Settings of `conf/method/tips.yaml`; `potential_scale`: weight of the difference of mean log-likelihoods."""

    potential_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.potential_scale >= 0, "potential_scale", self.potential_scale, "0 or more")


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """See the module."""
    outcome = search_r1.compose(conf, prompt, grammar, (search_r1.answer_reward(conf),))
    rewards = (*outcome.rewards, AnswerPotential(conf.potential_scale))
    return replace(outcome, rewards=rewards, services={"log_probs": StartPolicy()})
