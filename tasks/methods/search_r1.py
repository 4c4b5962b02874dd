"""Outcome reward only, with PPO or GRPO: Search-R1, and its kin with another reward, grammar or engine.

Definition: search_r1, sections 1 to 7; stepsearch section 9 for the gated F1 reward (PPO and GRPO rows); systems.md for
ReSearch, R1 and ZeroSearch.

Where the released code deviates from the papers' equations the paper is the default and the deviation a
named value: `whiten_over: response`, `value_loss_over: response`, `entropy_coefficient: 0.001`, `top_p: 0.95`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import require
from tasks.rewards import Reward
from tasks.rewards.answer import AnswerReward
from tasks.rewards.format_answer import FormatAnswerReward
from tasks.rl.advantages import Advantage
from tasks.rl.advantages.gae import TokenGae
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.experience import Tokens
from tasks.rl.filters.keep_all import KeepAll
from tasks.rl.losses import Aggregation, LossSum, LossTerm
from tasks.rl.losses.entropy import EntropyBonus
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.method import Method
from tasks.rl.samplers.independent_group import IndependentGroup
from tasks.rl.search.index import IndexSearch
from tasks.rl.value_losses.clipped_value import ClippedValueLoss


@dataclass(frozen=True)
class Conf:
    """Settings of `conf/method/search_r1_*.yaml` and of what is like them; the parts document their own.

    `gated`, `wrong_format`: StepSearch's format rule on the answer reward (`tasks.rewards.answer.AnswerReward`).
    """

    algorithm: Literal["ppo", "grpo"]
    group_size: int
    reward: Literal["em", "subem", "f1", "format"]
    kl_coefficient: float
    clip: float
    aggregation: Aggregation
    entropy_coefficient: float
    importance_cap: float | None
    temperature: float
    top_p: float
    gamma: float = 1.0
    lam: float = 1.0
    per: Literal["token", "turn"] = "token"
    value_clip: float = 0.5
    whiten_over: Tokens = "generated"
    value_loss_over: Tokens = "generated"
    gated: bool = False
    wrong_format: float = 0.0

    def __post_init__(self) -> None:
        require(not (self.gated and self.reward == "format"), "gated", self.gated, "false with reward: format")
        require(self.entropy_coefficient >= 0, "entropy_coefficient", self.entropy_coefficient, "0 or more")
        require(self.wrong_format <= 0, "wrong_format", self.wrong_format, "0 or less: a wrong format earns nothing")
        is_alone = self.algorithm == "grpo" and self.temperature == 0 and self.group_size > 1
        require(not is_alone, "temperature", self.temperature, "above 0: members that are alike teach nothing")


def answer_reward(conf: Conf) -> Reward:
    """The outcome reward these settings name."""
    if conf.reward == "format":
        return FormatAnswerReward()
    return AnswerReward(conf.reward, gated=conf.gated, wrong_format=conf.wrong_format)


def compose(conf: Conf, prompt: Prompt, grammar: SearchGrammar, rewards: tuple[Reward, ...]) -> Method:
    """PPO penalises KL in the token reward (k1), GRPO in the loss (k3)."""
    is_ppo = conf.algorithm == "ppo"
    advantage: Advantage = (
        TokenGae(conf.gamma, conf.lam, conf.kl_coefficient, conf.whiten_over, conf.per) if is_ppo else GroupAdvantage()
    )
    terms: list[LossTerm] = [PolicyClip(conf.clip, conf.clip, "token", conf.aggregation, conf.importance_cap)]
    if conf.kl_coefficient and not is_ppo:
        terms.append(ReferenceKl(conf.kl_coefficient, conf.aggregation))
    if conf.entropy_coefficient:
        terms.append(EntropyBonus(conf.entropy_coefficient, conf.aggregation))
    return Method(
        prompt=prompt,
        grammar=grammar,
        sampler=IndependentGroup(conf.group_size),
        rewards=rewards,
        filter=KeepAll(),
        advantage=advantage,
        loss=LossSum(tuple(terms)),
        value_loss=ClippedValueLoss(conf.value_clip, conf.value_loss_over) if is_ppo else None,
        temperature=conf.temperature,
        top_p=conf.top_p,
        search=IndexSearch(),
    )


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """One reward, on the answer."""
    return compose(conf, prompt, grammar, (answer_reward(conf),))
