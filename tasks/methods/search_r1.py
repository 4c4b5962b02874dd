"""Search-R1: outcome reward only, with PPO or GRPO. Definition: search_r1, sections 1 to 7.

Where the released code deviates from the papers' equations the paper is the default and the deviation a
named value: `whiten_over: response`, `value_loss_over: response`, `entropy_coefficient: 0.001`, `top_p: 0.95`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.agent.grammar import SearchGrammar
from tasks.rewards import Reward
from tasks.rewards.answer import AnswerReward, FormatAnswerReward
from tasks.rl.filters import KeepAll
from tasks.rl.losses import Aggregation
from tasks.rl.method import Advantage, ClippedValueLoss, GroupAdvantage, Method, TokenClip, TokenGae, Tokens
from tasks.rl.samplers import IndependentGroup


@dataclass(frozen=True)
class Conf:
    """Settings of `conf/method/search_r1_*.yaml`; the parts document their own."""

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
    value_clip: float = 0.5
    whiten_over: Tokens = "generated"
    value_loss_over: Tokens = "generated"


def build(conf: Conf, template: str, grammar: SearchGrammar) -> Method:
    """PPO penalises KL in the token reward (k1), GRPO in the loss (k3)."""
    is_ppo = conf.algorithm == "ppo"
    reward: Reward = FormatAnswerReward() if conf.reward == "format" else AnswerReward(conf.reward)
    advantage: Advantage = (
        TokenGae(conf.gamma, conf.lam, conf.kl_coefficient, conf.whiten_over) if is_ppo else GroupAdvantage()
    )
    return Method(
        template=template,
        grammar=grammar,
        sampler=IndependentGroup(conf.group_size),
        rewards=(reward,),
        filter=KeepAll(),
        advantage=advantage,
        loss=TokenClip(
            clip_low=conf.clip,
            clip_high=conf.clip,
            aggregation=conf.aggregation,
            kl_coefficient=0.0 if is_ppo else conf.kl_coefficient,
            entropy_coefficient=conf.entropy_coefficient,
            importance_cap=conf.importance_cap,
        ),
        value_loss=ClippedValueLoss(conf.value_clip, conf.value_loss_over) if is_ppo else None,
        temperature=conf.temperature,
        top_p=conf.top_p,
    )
