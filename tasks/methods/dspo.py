"""DSPO: substring match, groups with mixed outcomes only, one ratio a trajectory; GSPO and DAPO are its ablations.

Definition: dspo, sections 1 to 9, most of it rebuilt there, because the paper's formulas are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import require
from tasks.rewards import Reward
from tasks.rewards.answer import AnswerReward
from tasks.rewards.overlong import OverlongPenalty
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.filters.keep_all import KeepAll
from tasks.rl.filters.mixed_outcomes import MixedOutcomes
from tasks.rl.losses import Aggregation, LossSum, LossTerm
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.method import Method
from tasks.rl.samplers.independent_group import IndependentGroup
from tasks.rl.search.index import IndexSearch


@dataclass(frozen=True)
class Conf:
    """Settings of `conf/method/{dspo,gspo,dapo}*.yaml`; the parts document their own.

    Attributes:
        ratio: one a trajectory (DSPO, GSPO), or one a token with a mean over tokens (DAPO).
        filter_rounds: rounds of sampling until a step has its mixed groups; 0 keeps all groups (GSPO).
        overlong_limit, overlong_buffer: DAPO's soft length penalty, in generated tokens; null is none.
    """

    group_size: int
    reward: Literal["em", "subem", "f1"]
    ratio: Literal["sequence", "token"]
    clip_low: float
    clip_high: float
    kl_coefficient: float
    filter_rounds: int
    overlong_limit: int | None
    overlong_buffer: int
    spread: Literal["sample", "population"]
    importance_cap: float | None
    temperature: float
    top_p: float

    def __post_init__(self) -> None:
        require(self.filter_rounds >= 0, "filter_rounds", self.filter_rounds, "0 (no filter) or more")
        require(self.group_size >= 2, "group_size", self.group_size, "at least 2, which are compared")
        require(self.temperature > 0, "temperature", self.temperature, "above 0: members that are alike teach nothing")


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """See the module."""
    rewards: list[Reward] = [AnswerReward(conf.reward)]
    if conf.overlong_limit is not None:
        rewards.append(OverlongPenalty(conf.overlong_limit, conf.overlong_buffer))
    how: Aggregation = "seq_mean" if conf.ratio == "sequence" else "token_mean"
    terms: list[LossTerm] = [PolicyClip(conf.clip_low, conf.clip_high, conf.ratio, how, conf.importance_cap)]
    if conf.kl_coefficient:
        terms.append(ReferenceKl(conf.kl_coefficient, how))
    return Method(
        prompt=prompt,
        grammar=grammar,
        sampler=IndependentGroup(conf.group_size),
        rewards=tuple(rewards),
        filter=MixedOutcomes(conf.reward, conf.filter_rounds) if conf.filter_rounds else KeepAll(),
        advantage=GroupAdvantage(deviation=conf.spread),
        loss=LossSum(tuple(terms)),
        value_loss=None,
        temperature=conf.temperature,
        top_p=conf.top_p,
        search=IndexSearch(),
    )
