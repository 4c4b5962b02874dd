"""Scripted demonstrations: what an expert, a lazy and a sloppy searcher write, with real observations.

A script plays a question's decomposition with the real retriever and renders the same token sequence that a rollout
would record, so that supervised and reinforcement learning see one format. A plan says what is searched and answered;
no plan uses gold passages. Imperfect plans never contain a clean multi-hop solution: lazy ones stop early, sloppy ones
have a wrong or repeated search on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.agent.grammar import SearchGrammar
from tasks.agent.observation import observation_ids
from tasks.agent.prompts import Prompt, prompt_ids
from tasks.agent.rollout import RolloutConf
from tasks.conf import Share
from tasks.data.decomposition import hops_of
from tasks.retrieval import Retriever, search_again
from tasks.types import Action, Hit, Hop, Question


@dataclass(frozen=True)
class ScriptedTurn:
    """One turn of a plan: a thought and an action.

    `cites`: number of the earlier turn whose best passage is copied as evidence, None without evidence.
    """

    think: str
    action: Action
    cites: int | None = None


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
    """The relation that a hop looks up: the text after `>>` if the data has it, else the last word of its query."""
    relation = hop.question.partition(">>")[2].strip()
    return relation or (hop.queries[0].rstrip(" ?").split() or [hop.queries[0]])[-1]


def expert_plan(question: Question) -> list[ScriptedTurn]:
    """Search each hop once, then answer."""
    hops = hops_of(question)
    searches = [_search(hop, hops[i - 1] if i else None) for i, hop in enumerate(hops)]
    return [*searches, _answer(hops[-1])]


def single_hops(question: Question) -> list[Question]:
    """Every hop of a question as a question of its own (reading practice without any chain)."""
    return [
        Question(
            f"{question.id}/{i}", question.dataset, question.split, hop.question, (hop.answer,), 1, decomposition=(hop,)
        )
        for i, hop in enumerate(hops_of(question))
    ]


def imperfect_plan(
    question: Question, topics: Sequence[str], conf: ImperfectConf, rng: random.Random
) -> list[ScriptedTurn]:
    """A lazy or sloppy plan; a one-hop question gets the expert's plan, because it has no chain to spoil."""
    hops = hops_of(question)
    if len(hops) == 1:
        return expert_plan(question)
    if rng.random() < conf.lazy:
        stop = next((i for i in range(1, len(hops) - 1) if rng.random() < conf.stop), len(hops) - 1)
        searches = [_search(hop, hops[i - 1] if i else None) for i, hop in enumerate(hops[:stop])]
        return [*searches, _answer(hops[stop - 1])]
    return _sloppy_plan(hops, topics, conf, rng)


def _sloppy_plan(hops: list[Hop], topics: Sequence[str], conf: ImperfectConf, rng: random.Random) -> list[ScriptedTurn]:
    flaws = [[rng.random() < p for p in (conf.wrong_relation, conf.repeat)] for _ in hops]
    over = rng.random() < conf.over_search
    if not over and not any(map(any, flaws)):
        # Every sloppy plan has a flaw. A repeated search is one that does not teach a wrong chain.
        rng.choice(flaws)[1] = True

    turns: list[ScriptedTurn] = []
    for i, (hop, (wrong, repeat)) in enumerate(zip(hops, flaws, strict=True)):
        before = hops[i - 1] if i else None
        search = _search(hop, before)
        if wrong:
            turns.append(_wrong_search(hop, before, rng.choice(topics)))
        turns.extend([search] * (2 if repeat else 1))
    if over:
        turns.append(turns[-1])
    return [*turns, _answer(hops[-1])]


def _wrong_search(hop: Hop, before: Hop | None, other: str) -> ScriptedTurn:
    """A search for another relation of the right entity; the last mention of the relation is replaced."""
    head, named, tail = hop.queries[0].rpartition(topic(hop))
    return ScriptedTurn(_next(before, other), Action("search", head + (other if named else "") + tail))


def _search(hop: Hop, before: Hop | None) -> ScriptedTurn:
    return ScriptedTurn(_next(before, topic(hop)), Action("search", hop.queries[0]))


def _next(before: Hop | None, relation: str) -> str:
    return f"{topic(before)} found , next {relation}" if before else f"next {relation}"


def _answer(hop: Hop) -> ScriptedTurn:
    return ScriptedTurn(f"{topic(hop)} found", Action("answer", hop.answer))


def cited(plan: Sequence[ScriptedTurn], choose: Callable[[Sequence[int]], int]) -> list[ScriptedTurn]:
    """The plan with evidence before its answer: `choose` picks one of the numbers of its searches."""
    searches = [number for number, turn in enumerate(plan) if turn.action.kind == "search"]
    return [*plan[:-1], replace(plan[-1], cites=choose(searches))] if searches else list(plan)


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
        plans: Sequence[Sequence[ScriptedTurn]],
        progress: Callable[[int], object] = lambda done: None,
    ) -> list[Example]:
        """One example per plan, in order; a plan over the rollout's budgets is cut after its last complete turn."""
        examples: list[Example] = []
        for first in range(0, len(plans), 512):
            batch = range(first, min(first + 512, len(plans)))
            queries = [turn.action.content for i in batch for turn in plans[i] if turn.action.kind == "search"]
            results = iter(self.searched(queries))
            for i in batch:
                hits = [next(results) if turn.action.kind == "search" else None for turn in plans[i]]
                examples.append(self.example(questions[i], plans[i], hits))
            progress(len(examples))
        return examples

    def searched(self, queries: list[str]) -> list[list[Hit]]:
        """The passages of each query; a search that fails is repeated as in a rollout."""
        return search_again(self.retriever, queries, self.conf.top_k, self.conf.search_retries) if queries else []

    def example(self, question: Question, plan: Sequence[ScriptedTurn], hits: Sequence[Any]) -> Example:
        """A plan as tokens, with what each of its turns found; None for a turn that does not search."""
        prompt = prompt_ids(self.tokenizer, self.prompt, question, self.grammar, self.conf.max_prompt_tokens)
        ids: list[int] = []
        mask: list[bool] = []
        searches = 0
        for turn, found in zip(plan, hits, strict=True):
            written = self._encode(self.grammar.call(turn.think, turn.action, self._evidence(turn, hits)))
            observed: list[int] = []
            if found is not None:
                searches += 1
                is_last, budget = searches == self.conf.max_turns, self.conf.max_observation_tokens
                observed = observation_ids(self.tokenizer, self.grammar, turn.action, [found], budget, is_last)

            # After a search there must be room for at least one token of the next turn.
            room = self.conf.max_total_tokens - len(prompt) - len(ids) - (found is not None)
            is_over = len(written) > self.conf.max_call_tokens or len(written) + len(observed) > room
            if is_over or searches > self.conf.max_turns:
                break
            ids += written + observed
            mask += [True] * len(written) + [False] * len(observed)
        return Example(tuple(prompt), tuple(ids), tuple(mask))

    def first_turn(self, question: Question, plan: Sequence[ScriptedTurn]) -> tuple[int, int]:
        """Tokens of a plan's first call, and the most that prompt, call and observation may take, whatever is found."""
        call = len(self._encode(self.grammar.call(plan[0].think, plan[0].action, "")))
        prompt = prompt_ids(self.tokenizer, self.prompt, question, self.grammar, self.conf.max_prompt_tokens)
        frame = len(self._encode(self.grammar.opening)) + len(self._encode(self.grammar.closing))
        return call, len(prompt) + call + self.conf.max_observation_tokens + frame + 1

    def _evidence(self, turn: ScriptedTurn, hits: Sequence[Any]) -> str:
        passages = hits[turn.cites] if turn.cites is not None else None
        return self.grammar.neutralize(passages[0].text) if passages else ""

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
