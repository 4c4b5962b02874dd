"""StepSearch (StePPO): answer F1 and search keys at the end, information gain minus redundancy at every search.

Definition: stepsearch, sections 1 to 5, 9 and 10. Its ablations switch terms off by their weights; a term of weight 0
is not computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tasks import text
from tasks.agent.grammar import SearchGrammar
from tasks.conf import require
from tasks.methods import search_r1
from tasks.rewards import EachReward, Need, Resources, Reward, on_last_token
from tasks.rewards.format import follows_search_rule
from tasks.rewards.keys import KeyReward
from tasks.rewards.steps import StepReward
from tasks.rl.method import Method
from tasks.types import Question, Scores, Trajectory

_SUB_ANSWER = re.compile(r"<sub_answer(\d{1,3})>(.*?)</sub_answer\1>", re.DOTALL)


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


@dataclass(frozen=True)
class SubAnswerReward(EachReward):
    """weight * (1/M) sum_i F1(sub-answer i, gold sub-answer i), on the last token; 0 in a wrong format.

    A missing sub-answer scores 0; of several pairs with one number the last counts. The recommended reading of
    stepsearch section 9.
    """

    weight: float

    @property
    def needs(self) -> tuple[Need, ...]:
        """Sub-answers."""
        return ("decomposition",)

    def score(self, trajectory: Trajectory, question: Question, resources: Resources) -> Scores:
        """See `EachReward`."""
        written = "".join(turn.text for turn in trajectory.turns)
        given = {int(number): answer for number, answer in _SUB_ANSWER.findall(written)}
        found = [text.f1(given.get(i), (hop.answer,)) for i, hop in enumerate(question.decomposition, 1)]
        value = sum(found) / len(found) if found else 0.0
        earned = value if follows_search_rule(trajectory) else 0.0
        return on_last_token(trajectory, self.weight * earned, sub_answer=value)


def build(conf: Conf, template: str, grammar: SearchGrammar) -> Method:
    """The terms whose weights are not 0."""
    rewards: list[Reward] = [search_r1.answer_reward(conf)]
    if conf.key_weight:
        rewards.append(KeyReward(conf.key_weight, conf.as_released))
    if conf.gain or conf.penalty:
        rewards.append(StepReward(conf.gain, conf.penalty, conf.step_scale, conf.as_released))
    if conf.sub_answer_weight:
        rewards.append(SubAnswerReward(conf.sub_answer_weight))
    return search_r1.compose(conf, template, grammar, tuple(rewards))
