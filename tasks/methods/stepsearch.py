"""StepSearch (StePPO): answer F1 and search keys at the end, information gain minus redundancy at every search.

Definition: stepsearch, sections 1 to 5, 9 and 10. Its ablations switch terms off by their weights; a term of weight 0
is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import require
from tasks.methods import search_r1
from tasks.rewards import Reward
from tasks.rewards.key import KeyReward
from tasks.rewards.steps import StepReward
from tasks.rewards.sub_answer import SubAnswerReward
from tasks.rl.method import Method


@dataclass(frozen=True, kw_only=True)
class Conf(search_r1.Conf):
    """Settings of `conf/method/stepsearch*.yaml`.

    Attributes:
        key_weight: gamma_key of the search-key reward.
        gain, penalty: of the step reward's two terms, 1 or 0.
        step_scale: of the step reward; 1 in the paper, 0.6 nominal and 1.6 effective as released.
        sub_answer_weight: of the reward on intermediate answers ("ow sub-answer"; its formula is not printed).
        as_released: keys and redundancy as the released code computes them. Its other deviations are values
            (`wrong_format`, `step_scale`) but one: there a wrong format, which is any end but an answer, takes the step
            rewards, too.
    """

    key_weight: float
    gain: float
    penalty: float
    step_scale: float
    sub_answer_weight: float = 0.0
    as_released: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("key_weight", "gain", "penalty", "step_scale", "sub_answer_weight"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 (off) or more")


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """The terms whose weights are not 0."""
    rewards: list[Reward] = [search_r1.answer_reward(conf)]
    if conf.key_weight:
        rewards.append(KeyReward(conf.key_weight, conf.as_released))
    if conf.gain or conf.penalty:
        rewards.append(StepReward(conf.gain, conf.penalty, conf.step_scale, conf.as_released))
    if conf.sub_answer_weight:
        rewards.append(SubAnswerReward(conf.sub_answer_weight))
    return search_r1.compose(conf, prompt, grammar, tuple(rewards))
