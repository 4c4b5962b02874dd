"""ZeroSearch: answer F1, with a simulator as the search engine of training; a real engine evaluates (systems.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tasks import services
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.methods import search_r1
from tasks.rl.method import Method
from tasks.rl.search.simulated import SimulatedSearch

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Conf(search_r1.Conf):
    """Settings of `conf/method/zerosearch.yaml`; `search` is a section, `documents` a file of `conf/service/`."""

    search: SimulatedSearch
    documents: str


def build(conf: Conf, prompt: Prompt, grammar: SearchGrammar) -> Method:
    """See the module."""
    documents = services.load("documents", conf.documents, ROOT)
    return replace(search_r1.build(conf, prompt, grammar), search=conf.search, services={"documents": documents})
