"""Scripted demonstrations: what an expert, a lazy and a sloppy searcher write, with real observations.

A script plays a question's decomposition through the real retriever and renders the very token sequence
a rollout would record, so supervised and reinforcement learning see one format. `plan` decides what is
searched and answered; nobody here looks at gold passages. Imperfect plans never contain a clean
multi-hop solution: lazy ones stop early, sloppy ones take a wrong or repeated step on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.agent.grammar import SearchGrammar
from tasks.agent.observation import observation_ids
from tasks.agent.prompts import Prompt, prompt_ids
from tasks.agent.rollout import RolloutConf
from tasks.conf import Share
from tasks.data.decomposition import hops_of
from tasks.retrieval import Retriever
from tasks.types import Action, Hop, Question


@dataclass(frozen=True)
class Step:
    """One scripted call: a thought and an action."""

    think: str
    action: Action


@dataclass(frozen=True)
class Example:
    """A rendered demonstration; `loss_mask` is True on tokens a policy would have written."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


@dataclass(frozen=True)
class ImperfectConf:
    """The mixture of imperfect plans for questions of two or more hops.

    Attributes:
        lazy: share that answers before the chain is complete; the rest is sloppy.
        stop: a lazy searcher's probability of answering after each hop.
        wrong_relation, repeat, over_search: probability of each flaw per hop of a sloppy plan; a plan in
            which none happened gets one.
    """

    lazy: Share
    stop: Share
    wrong_relation: Share
    repeat: Share
    over_search: Share


def topic(hop: Hop) -> str:
    """The word for what a hop looks up: after `>>` where the data has it, else the last word of its query."""
    relation = hop.question.partition(">>")[2].strip()
    return relation or (hop.queries[0].rstrip(" ?").split() or [hop.queries[0]])[-1]


def expert_plan(question: Question) -> list[Step]:
    """Search each hop once, then answer."""
    hops = hops_of(question)
    steps = [_search(hop, hops[i - 1] if i else None) for i, hop in enumerate(hops)]
    return [*steps, _answer(hops[-1])]


def single_hops(question: Question) -> list[Question]:
    """Every hop of a question as a question of its own (reading practice without any chain)."""
    return [
        Question(
            f"{question.id}/{i}", question.dataset, question.split, hop.question, (hop.answer,), 1, decomposition=(hop,)
        )
        for i, hop in enumerate(hops_of(question))
    ]


def imperfect_plan(question: Question, topics: Sequence[str], conf: ImperfectConf, rng: random.Random) -> list[Step]:
    """A lazy or sloppy plan; a one-hop question gets the expert's (there is no chain to spoil)."""
    hops = hops_of(question)
    if len(hops) == 1:
        return expert_plan(question)
    if rng.random() < conf.lazy:
        stop = next((i for i in range(1, len(hops) - 1) if rng.random() < conf.stop), len(hops) - 1)
        steps = [_search(hop, hops[i - 1] if i else None) for i, hop in enumerate(hops[:stop])]
        return [*steps, _answer(hops[stop - 1])]
    return _sloppy_plan(hops, topics, conf, rng)


def _sloppy_plan(hops: list[Hop], topics: Sequence[str], conf: ImperfectConf, rng: random.Random) -> list[Step]:
    flaws = [[rng.random() < p for p in (conf.wrong_relation, conf.repeat)] for _ in hops]
    over = rng.random() < conf.over_search
    if not over and not any(map(any, flaws)):
        rng.choice(flaws)[1] = True  # At least a repeated search, which misleads nobody about the chain.
    steps: list[Step] = []
    for i, (hop, (wrong, repeat)) in enumerate(zip(hops, flaws, strict=True)):
        before = hops[i - 1] if i else None
        step = _search(hop, before)
        if wrong:
            steps.append(_astray(hop, before, rng.choice(topics)))
        steps.extend([step] * (2 if repeat else 1))
    if over:
        steps.append(steps[-1])
    return [*steps, _answer(hops[-1])]


def _astray(hop: Hop, before: Hop | None, other: str) -> Step:
    """The right entity, another relation: the last place where the query names the wanted one."""
    head, named, tail = hop.queries[0].rpartition(topic(hop))
    return Step(_next(before, other), Action("search", head + (other if named else "") + tail))


def _search(hop: Hop, before: Hop | None) -> Step:
    return Step(_next(before, topic(hop)), Action("search", hop.queries[0]))


def _next(before: Hop | None, wanted: str) -> str:
    return f"{topic(before)} found , next {wanted}" if before else f"next {wanted}"


def _answer(hop: Hop) -> Step:
    return Step(f"{topic(hop)} found", Action("answer", hop.answer))


@dataclass
class Renderer:
    """Turns plans into token sequences, with observations from the real retriever."""

    conf: RolloutConf
    tokenizer: Any
    retriever: Retriever
    grammar: SearchGrammar
    prompt: Prompt

    def render(
        self,
        questions: Sequence[Question],
        plans: Sequence[Sequence[Step]],
        progress: Callable[[int], object] = lambda done: None,
    ) -> list[Example]:
        """One example per plan, in order; plans over the rollout's budgets are cut after their last whole turn."""
        examples: list[Example] = []
        for first in range(0, len(plans), 512):
            some = range(first, min(first + 512, len(plans)))
            queries = [s.action.content for i in some for s in plans[i] if s.action.kind == "search"]
            found = iter(self.retriever.search(queries, self.conf.top_k)) if queries else iter([])
            for i in some:
                observations = [next(found) if s.action.kind == "search" else None for s in plans[i]]
                examples.append(self._example(questions[i], plans[i], observations))
            progress(len(examples))
        return examples

    def _example(self, question: Question, plan: Sequence[Step], hits: Sequence[Any]) -> Example:
        prompt = prompt_ids(self.tokenizer, self.prompt, question, self.grammar, self.conf.max_prompt_tokens)
        ids: list[int] = []
        mask: list[bool] = []
        searches = 0
        for step, found in zip(plan, hits, strict=True):
            own = self._encode(f"<think> {step.think} </think> {self.grammar.render(step.action)}")
            seen: list[int] = []
            if found is not None:
                searches += 1
                is_last, budget = searches == self.conf.max_turns, self.conf.max_observation_tokens
                seen = observation_ids(self.tokenizer, self.grammar, step.action, [found], budget, is_last)
            room = self.conf.max_total_tokens - len(prompt) - len(ids) - (found is not None)  # A turn follows a search.
            if len(own) > self.conf.max_call_tokens or len(own) + len(seen) > room or searches > self.conf.max_turns:
                break
            ids += own + seen
            mask += [True] * len(own) + [False] * len(seen)
        return Example(tuple(prompt), tuple(ids), tuple(mask))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
