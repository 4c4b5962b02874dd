"""ReSearch: GRPO with answer F1, a little for the format alone, result tags and a boxed answer (systems.md)."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import require
from tasks.methods import search_r1
from tasks.rewards.f1_or_format import F1OrFormat
from tasks.rl.method import Method


@dataclass(frozen=True, kw_only=True)
class Conf(search_r1.Conf):
    """Settings of `conf/method/research.yaml`; `format_reward`: of a right format whose answer has F1 0."""

    format_reward: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.format_reward < 1, "format_reward", self.format_reward, "from 0, below a right answer's 1")


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """See the module."""
    return search_r1.compose(conf, prompt, grammar, (F1OrFormat(conf.format_reward),))
