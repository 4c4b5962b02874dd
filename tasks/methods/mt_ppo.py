"""MT-PPO: PPO with rewards by rules for every turn, the last one for the answer (systems.md)."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import require
from tasks.methods import search_r1
from tasks.rewards.turn_rules import TurnRules
from tasks.rl.method import Method


@dataclass(frozen=True, kw_only=True)
class Conf(search_r1.Conf):
    """Settings of `conf/method/mt_ppo.yaml`; the last two are those of `tasks.rewards.turn_rules.TurnRules`."""

    retrieval: float
    invalid: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.retrieval >= 0, "retrieval", self.retrieval, "0 or more")
        require(self.invalid <= 0, "invalid", self.invalid, "0 or less: it is for a call that cannot be read")


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """See the module."""
    rewards = (search_r1.answer_reward(conf), TurnRules(conf.retrieval, conf.invalid))
    return search_r1.compose(conf, prompt, grammar, rewards)
