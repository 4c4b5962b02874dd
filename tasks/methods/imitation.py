"""Baselines without reinforcement learning: supervised fine-tuning on gold answers, or on one's own right trajectories.

SFT (systems.md): question -> answer, no search. Rejection sampling: the start policy plays every question several
times with search, and what was right is imitated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import require
from tasks.rewards.answer import AnswerReward
from tasks.rl.advantages.constant import ConstantAdvantage
from tasks.rl.filters.keep_all import KeepAll
from tasks.rl.filters.successful import Successful
from tasks.rl.losses import Aggregation, LossSum
from tasks.rl.losses.imitation import Imitation
from tasks.rl.method import Method
from tasks.rl.samplers.gold_answers import GoldAnswers
from tasks.rl.samplers.independent_group import IndependentGroup
from tasks.rl.search.index import IndexSearch


@dataclass(frozen=True)
class Conf:
    """Settings of `conf/method/{sft,rejection_sampling}.yaml`.

    Attributes:
        source: `gold` answers directly with the gold answer; `own` plays with the start policy and keeps what is right.
        group_size: plays of a question.
        aggregation: of the loss.
        temperature, top_p: of the plays.
    """

    source: Literal["gold", "own"]
    group_size: int
    aggregation: Aggregation
    temperature: float
    top_p: float

    def __post_init__(self) -> None:
        require(self.source == "own" or self.group_size == 1, "group_size", self.group_size, "1 with source: gold")


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """See the module."""
    is_own = conf.source == "own"
    return Method(
        prompt=prompt,
        grammar=grammar,
        sampler=IndependentGroup(conf.group_size, from_start=True) if is_own else GoldAnswers(),
        rewards=(AnswerReward("em"),),
        filter=Successful("em") if is_own else KeepAll(),
        advantage=ConstantAdvantage(),
        loss=LossSum((Imitation(conf.aggregation),)),
        value_loss=None,
        temperature=conf.temperature,
        top_p=conf.top_p,
        search=IndexSearch(),
    )
