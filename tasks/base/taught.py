"""Teach a pretrained model the format of a search agent: think, search, read, answer in the tags of a grammar.

Demonstrations are made from training questions by a plan, through the real retriever, and kept where what the plan
looked for came back. The plan is the question's decomposition where the data has one, else the question as the query.
No plan uses gold passages as text: it sees what a policy would see, and what it writes as found stands in what it sees.

Two flaws leave reinforcement learning something to do: a share of the questions with a decomposition is searched as it
stands, in one search, and a share of all plans repeats its last search.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.base.demonstrations import Example, Renderer, ScriptedTurn
from tasks.base.fit import Fit
from tasks.base.settings import FormatConf
from tasks.data.decomposition import hops_of
from tasks.records.start_policy import FormatRecord
from tasks.retrieval.recall import holds
from tasks.text import contains_any, findable
from tasks.types import Action, Hit, Question

BATCH = 256


@dataclass(frozen=True)
class Search:
    """One search of a plan: its query, and the answers that its passages should hold."""

    query: str
    wanted: tuple[str, ...]


@dataclass(frozen=True)
class Demonstrations:
    """What the demonstrations were made of.

    Attributes:
        examples: the ones that were kept.
        alone: each of them with one passage a search, the one that holds what it looked for; empty without `read`.
        tried: plans that were searched.
    """

    examples: list[Example]
    alone: list[Example]
    tried: int


def searches_of(question: Question, conf: FormatConf, max_turns: int, rng: random.Random) -> list[Search]:
    """The searches of a plan; at most `max_turns`, without the repetition."""
    hops = hops_of(question) if question.decomposition else []
    is_shortcut = rng.random() < conf.shortcut
    if len(hops) < 2 or len(hops) > max_turns or is_shortcut:
        return [Search(question.question, question.answers)]
    return [Search(hop.queries[0], (hop.answer,)) for hop in hops]


def has_come_back(search: Search, hits: Sequence[Hit], question: Question) -> bool:
    """Whether the passages hold what was looked for.

    Yes, no and the shortest answers stand in most texts, so a search for them must bring all gold passages.
    """
    if not findable(search.wanted):
        gold = set(question.gold_passage_ids)
        return question.gold_complete and bool(gold) and gold <= {hit.passage_id for hit in hits}
    return _first_holding(search, hits) is not None


def _first_holding(search: Search, hits: Sequence[Hit]) -> tuple[Hit, str] | None:
    """The first passage that holds what was looked for, and the first of the wanted answers that it holds."""
    wanted = search.wanted if findable(search.wanted) else ()
    found = ((hit, answer) for hit in hits for answer in wanted if holds(hit, findable([answer])))
    return next(found, None)


def script(
    question: Question, searches: Sequence[Search], hits: Sequence[Sequence[Hit]], repeats: bool
) -> tuple[list[ScriptedTurn], list[Sequence[Hit] | None]]:
    """The turns of a plan and what each of them found.

    A thought says what the last search found: the title of the first passage that holds it, and the first accepted
    answer that stands there. The plan answers with the same words.
    """
    turns: list[ScriptedTurn] = []
    found: list[Sequence[Hit] | None] = []
    thought, answer = "I need to search.", question.answers[0]
    for search, passages in zip(searches, hits, strict=True):
        turns.append(ScriptedTurn(thought, Action("search", search.query)))
        found.append(passages)
        thought, last = _finding(search, passages)
        answer = last if last in question.answers else question.answers[0]
    if repeats:
        turns.append(ScriptedTurn("I search again.", turns[-1].action))
        found.append(found[-1])
    turns.append(ScriptedTurn(thought, Action("answer", answer)))
    return turns, [*found, None]


def _finding(search: Search, hits: Sequence[Hit]) -> tuple[str, str]:
    """The thought after a search, and what it found."""
    found = _first_holding(search, hits)
    if found is None:  # Yes or no, which no passage says.
        title, answer = hits[0].title if hits else "", search.wanted[0]
    else:
        title, answer = found[0].title, found[1]
    return (f"{title}: {answer}." if title else f"{answer}."), answer


def shows_all(example: Example, searches: Sequence[Search], tokenizer: Any) -> bool:
    """Whether each observation, cut to its budget, still holds what its search looked for."""
    shown = itertools.groupby(zip(example.loss_mask, example.response_ids, strict=True), key=operator.itemgetter(0))
    observations = [tokenizer.decode([token for _, token in run]) for is_written, run in shown if not is_written]
    wanted = [findable(search.wanted) for search in searches]
    return all(not answers or contains_any(text, answers) for text, answers in zip(observations, wanted, strict=False))


def demonstrations(questions: Sequence[Question], renderer: Renderer, conf: FormatConf, seed: str) -> Demonstrations:
    """Play the plans of these questions and keep those that found what they looked for and fit the budgets."""
    rng = random.Random(f"{seed}/plans")
    examples: list[Example] = []
    alone: list[Example] = []
    for first in range(0, len(questions), BATCH):
        batch = questions[first : first + BATCH]
        plans = [searches_of(question, conf, renderer.conf.max_turns, rng) for question in batch]
        queries = [search.query for plan in plans for search in plan]
        results = iter(renderer.searched(queries))
        for question, plan in zip(batch, plans, strict=True):
            hits = [next(results) for _ in plan]
            repeats = rng.random() < conf.repeat and len(plan) < renderer.conf.max_turns
            if all(has_come_back(search, found, question) for search, found in zip(plan, hits, strict=True)):
                example = renderer.example(question, *script(question, plan, hits, repeats))
                is_whole = bool(example.loss_mask) and example.loss_mask[-1]  # Not cut before its answer.
                if is_whole and shows_all(example, plan, renderer.tokenizer):
                    examples.append(example)
                    if conf.read is not None:
                        single = [_alone(search, found) for search, found in zip(plan, hits, strict=True)]
                        alone.append(renderer.example(question, *script(question, plan, single, repeats)))
    return Demonstrations(examples, alone, len(questions))


def _alone(search: Search, hits: Sequence[Hit]) -> list[Hit]:
    """The passage that holds what was looked for; the best one where no passage says it."""
    found = _first_holding(search, hits)
    return [hits[0] if found is None else found[0]]


def teach_format(
    model: Any, fit: Fit, renderer: Renderer, chosen: Sequence[Question], conf: FormatConf, seed: str
) -> FormatRecord:
    """Train the model on demonstrations from the chosen questions, no demonstration twice before all have had a turn.

    Raises:
        ValueError: no plan found what it looked for.
    """
    made = demonstrations(chosen, renderer, conf, seed)
    if not made.examples:
        raise ValueError(
            f"no demonstration: of {made.tried} plans none brought back what it looked for within the budgets. Look at "
            "artifacts/recall.json, raise top_k or the token budgets in conf/scale, or set `format: null` there, which "
            "takes the model as it comes."
        )
    read_steps = 0 if conf.read is None else conf.read.max_steps
    count, draw = len(made.examples), random.Random(f"{seed}/order")
    wanted = conf.fit.max_steps * conf.fit.batch + (read_steps * conf.read.batch if conf.read else 0)
    order = [number for _ in range(-(-wanted // count)) for number in draw.sample(range(count), count)]
    first = 0
    if conf.read is not None:
        size = conf.read.batch
        first = read_steps * size
        fit.run("read", conf.read, lambda step: [made.alone[i] for i in order[step * size : (step + 1) * size]])
    batch, later = conf.fit.batch, order[first:]
    fit.run("format", conf.fit, lambda step: [made.examples[i] for i in later[step * batch : (step + 1) * batch]])
    model.eval()

    trained = [made.alone[i] for i in order[:first]]
    trained += [made.examples[i] for i in later[: (fit.step - read_steps) * batch]]
    return FormatRecord(
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        plans=made.tried,
        demonstrations=len(made.examples),
        trained=len(trained),
        tokens=sum(len(one.prompt_ids) + len(one.response_ids) for one in trained),
        written_tokens=sum(sum(one.loss_mask) for one in trained),
    )
