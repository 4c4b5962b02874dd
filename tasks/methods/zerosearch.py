"""ZeroSearch: answer F1, with a simulator as the search engine of training; a real engine evaluates (systems.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.methods import search_r1
from tasks.rl.method import Method
from tasks.rl.simulators import Simulator


@dataclass(frozen=True, kw_only=True)
class Conf(search_r1.Conf):
    """Settings of `conf/method/zerosearch.yaml`; `simulator` is a section."""

    simulator: Simulator


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """See the module."""
    return replace(search_r1.build(conf, prompt, grammar), simulator=conf.simulator)
