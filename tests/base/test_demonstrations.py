"""Scripts: the expert solves every question, nobody else does, and a rendered script is what a rollout records."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.agent.grammar import SearchGrammar
from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.agent.prompts import check_prompts
from tasks.agent.rollout import Player, RolloutConf
from tasks.base.demonstrations import (
    ImperfectConf,
    Renderer,
    ScriptedTurn,
    expert_plan,
    imperfect_plan,
    single_hops,
    topic,
)
from tasks.data import world
from tasks.data.decomposition import hops_of
from tasks.data.records import to_question
from tasks.generate import Sampling
from tasks.retrieval import QueryError, RetrievalError, search_again
from tasks.store import DataError
from tasks.text import exact_match
from tasks.types import Action, Hit, Hop, Question, Trajectory
from tests.base.conftest import SmallWorld
from tests.base.small import PROMPT, SMALL
from tests.tiny import Script, make_grammar

CONF = RolloutConf(
    max_turns=5,
    max_prompt_tokens=256,
    max_call_tokens=32,
    max_observation_tokens=160,
    max_total_tokens=1024,
    top_k=3,
    batch_rows=64,
)
MIXTURE = ImperfectConf(lazy=0.5, stop=0.5, wrong_relation=0.3, repeat=0.2, over_search=0.3)
TOPICS = sorted(world.RELATIONS)
MULTI = [question for question in world.questions(SMALL) if question.hops > 1]


def _grammar(tokenizer: Any) -> SearchGrammar:
    return SearchR1Grammar(reserved=tuple(tokenizer.all_special_tokens))


def _renderer(small: SmallWorld, conf: RolloutConf = CONF) -> Renderer:
    return Renderer(conf, small.tokenizer, small.retriever, _grammar(small.tokenizer), PROMPT)


def _play(
    small: SmallWorld, questions: Sequence[Question], plans: Sequence[Sequence[ScriptedTurn]], conf: RolloutConf = CONF
) -> list[Trajectory]:
    grammar, tokenizer = _grammar(small.tokenizer), small.tokenizer
    lines = [[f"<think> {step.think} </think> {grammar.render(step.action)}" for step in plan] for plan in plans]
    silence = [""] * (conf.max_turns + 1)  # Where a budget cuts the script short, nothing follows it.
    generator = Script(tokenizer, [[*line, *silence] for line in lines])
    player = Player(conf, generator, tokenizer, small.retriever, grammar, PROMPT)
    return player.play(questions, 1, Sampling(0.0, 1.0, (), seed=0))


def test_the_expert_solves_every_question_of_the_world(small_world: SmallWorld) -> None:
    plans = [expert_plan(question) for question in small_world.questions]
    played = _play(small_world, small_world.questions, plans)
    assert len(played) == 60
    for trajectory, question in zip(played, small_world.questions, strict=True):
        assert trajectory.status == "answered"
        assert exact_match(trajectory.answer, question.answers) == 1.0, question
        assert trajectory.num_searches == question.hops
        found = {hit.passage_id for turn in trajectory.turns for hit in turn.hits}
        assert found >= set(question.gold_passage_ids), question
        seen = "".join(turn.observation for turn in trajectory.turns)
        assert all(hop.answer in seen for hop in hops_of(question)), question


def test_a_rendered_demonstration_is_what_the_rollout_records(small_world: SmallWorld) -> None:
    rng = random.Random(0)
    questions = small_world.questions
    plans = [imperfect_plan(question, TOPICS, MIXTURE, rng) for question in questions]
    plans[:20] = [expert_plan(question) for question in questions[:20]]
    whole = [i for i, plan in enumerate(plans) if len(plan) <= CONF.max_turns + 1]
    assert len(whole) > 40
    questions, plans = [questions[i] for i in whole], [plans[i] for i in whole]
    rendered = _renderer(small_world).render(questions, plans)
    for example, trajectory in zip(rendered, _play(small_world, questions, plans), strict=True):
        assert example.prompt_ids == trajectory.prompt_ids
        assert example.response_ids == trajectory.response_ids
        assert example.loss_mask == trajectory.loss_mask
        assert trajectory.status == "answered"


@pytest.mark.parametrize(
    "conf",
    [
        replace(CONF, max_turns=1),
        replace(CONF, max_observation_tokens=7),
        replace(CONF, max_total_tokens=300),
        replace(CONF, max_total_tokens=257, max_prompt_tokens=20),
        replace(CONF, max_call_tokens=9),
        replace(CONF, top_k=1),
    ],
    ids=["turns", "observation", "total", "one turn", "call", "top k"],
)
def test_a_cut_demonstration_is_a_beginning_of_what_the_rollout_records(
    small_world: SmallWorld, conf: RolloutConf
) -> None:
    """The whole turns of the recorded trajectory, up to the first that a budget changed."""
    questions = small_world.questions
    plans = [expert_plan(question) for question in questions]
    rendered = _renderer(small_world, conf).render(questions, plans)
    played = _play(small_world, questions, plans, conf)
    for example, trajectory, plan in zip(rendered, played, plans, strict=True):
        length = len(example.response_ids)
        assert example.response_ids == trajectory.response_ids[:length]
        assert example.loss_mask == trajectory.loss_mask[:length]
        assert length in {0, *(turn.observation_end for turn in trajectory.turns)}
        if length == len(trajectory.response_ids) and trajectory.status == "answered":
            assert len(trajectory.turns) == len(plan)
        else:  # What follows in the recording is not what the script meant.
            rest = [turn for turn in trajectory.turns if turn.start >= length]
            assert trajectory.status in ("overflow", "open") or rest[0].action.kind == "invalid"


@pytest.mark.parametrize("kind", ["search_r1", "stepsearch", "tool_call"])
@pytest.mark.parametrize("budget", [7, 12, 160])
def test_an_observation_is_that_of_the_rollout_whatever_the_grammar(
    small_world: SmallWorld, kind: str, budget: int
) -> None:
    """Cut inside an escape sequence, or followed by the message that no search is left."""
    grammar = make_grammar(kind, small_world.tokenizer)
    conf = replace(CONF, max_turns=2, max_observation_tokens=budget, max_call_tokens=200)
    questions = [question for question in small_world.questions if question.hops == 2][:8]
    plans = [expert_plan(question) for question in questions]
    rendered = replace(_renderer(small_world, conf), grammar=grammar).render(questions, plans)
    for question, plan, example in zip(questions, plans, rendered, strict=True):
        lines = [f"<think> {step.think} </think> {grammar.render(step.action)}" for step in plan]
        player = Player(
            conf, Script(small_world.tokenizer, [lines]), small_world.tokenizer, small_world.retriever, grammar, PROMPT
        )
        (trajectory,) = player.play([question], 1, Sampling(1.0, 1.0, (), 0))
        assert trajectory.status == "answered"
        assert example.response_ids == trajectory.response_ids
        assert example.loss_mask == trajectory.loss_mask


def test_a_question_over_its_budget_is_found_before_training(small_world: SmallWorld) -> None:
    made = _renderer(small_world)
    parts = (made.tokenizer, made.prompt, small_world.questions, made.grammar)
    check_prompts(*parts, CONF.max_prompt_tokens)
    with pytest.raises(DataError, match="the budget max_prompt_tokens is 5"):
        check_prompts(*parts, 5)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_the_total_budget_is_met_to_the_token(small_world: SmallWorld, room: int) -> None:
    question = next(q for q in small_world.questions if q.hops == 1)
    plan = expert_plan(question)
    whole = _renderer(small_world).render([question], [plan])[0]
    used = len(whole.prompt_ids) + len(whole.response_ids)
    conf = replace(CONF, max_prompt_tokens=len(whole.prompt_ids), max_total_tokens=used - 1 + room)
    cut = _renderer(small_world, conf).render([question], [plan])[0]
    (played,) = _play(small_world, [question], [plan], conf)
    assert (cut == whole) == (room > 0)
    assert (played.status == "answered") == (room > 0)


@given(st.integers(), st.sampled_from(MULTI))
def test_no_imperfect_plan_is_a_clean_solution(seed: int, question: Question) -> None:
    plan = imperfect_plan(question, TOPICS, MIXTURE, random.Random(seed))
    clean = [step.action for step in expert_plan(question)]
    assert [step.action for step in plan] != clean
    assert plan[-1].action.kind == "answer"
    searched = [step.action.content for step in plan[:-1]]
    wanted = [action.content for action in clean[:-1]]
    if len(searched) < len(wanted):  # Lazy: it stops on the way and answers what it last found.
        assert searched == wanted[: len(searched)]
        assert plan[-1].action.content == hops_of(question)[len(searched) - 1].answer
    else:  # Sloppy: the chain is whole, with a step too many.
        assert len(searched) > len(wanted)
        rest = iter(searched)
        assert all(query in rest for query in wanted)


@pytest.mark.parametrize("mixture", [replace(MIXTURE, lazy=0.0), replace(MIXTURE, lazy=1.0)], ids=["sloppy", "lazy"])
@given(seed=st.integers())
def test_a_kind_of_plan_that_never_happens_by_chance_still_has_its_flaw(mixture: ImperfectConf, seed: int) -> None:
    flawless = replace(mixture, wrong_relation=0.0, repeat=0.0, over_search=0.0, stop=0.0)
    for question in MULTI[:8]:
        plan = imperfect_plan(question, TOPICS, flawless, random.Random(seed))
        assert (len(plan) > question.hops + 1) == (mixture.lazy == 0.0)
        assert len(plan) != question.hops + 1


def test_cutting_never_makes_an_imperfect_plan_clean(small_world: SmallWorld) -> None:
    questions = [question for question in small_world.questions if question.hops > 1]
    plans = [imperfect_plan(q, TOPICS, MIXTURE, random.Random(i)) for i, q in enumerate(questions)]
    clean = _renderer(small_world).render(questions, [expert_plan(q) for q in questions])
    for conf in (CONF, replace(CONF, max_turns=2), replace(CONF, max_total_tokens=400)):
        for dirty, right in zip(_renderer(small_world, conf).render(questions, plans), clean, strict=True):
            assert dirty.response_ids != right.response_ids


def test_a_step_astray_asks_the_right_entity_for_something_else() -> None:
    hops = (Hop("Who is the mayor of Kostar ?", "Star Two", queries=("Kostar mayor",)),
            Hop("Who is the star of #1 ?", "Vel Nim", queries=("#1 star",)))  # fmt: skip
    question = Question("q", "d", "train", "?", ("Vel Nim",), 2, decomposition=hops)
    only_wrong = ImperfectConf(lazy=0.0, stop=0.0, wrong_relation=1.0, repeat=0.0, over_search=0.0)
    plan = imperfect_plan(question, ["school"], only_wrong, random.Random(0))
    assert [(step.think, step.action.content) for step in plan] == [
        ("next school", "Kostar school"),
        ("next mayor", "Kostar mayor"),
        ("mayor found , next school", "Star Two school"),
        ("mayor found , next star", "Star Two star"),
        ("star found", "Vel Nim"),
    ]


def test_references_are_resolved_and_unknown_ones_stay() -> None:
    hops = tuple(Hop(f"#{i} and #9 >> x", f"answer {i}", queries=(f"#{i} x #1 #0",)) for i in range(1, 13))
    found = hops_of(Question("q", "d", "train", "?", ("a",), 4, decomposition=hops))
    assert found[1].queries == ("answer 2 x answer 1 #0",)
    assert found[1].question == "answer 2 and answer 9 >> x"
    assert found[11].question == "answer 12 and answer 9 >> x"  # Not answer 1 followed by a 2.
    assert hops_of(Question("q", "d", "train", "#3 ?", ("a",), 1))[0].question == "#3 ?"


def _real(decomposition: list[dict[str, Any]], question: str = "Who is it?") -> Question:
    row = {"id": "m/1", "dataset": "m", "split": "train", "question": question, "answers": ["It"], "hops": 2}
    return to_question(json.loads(json.dumps({**row, "decomposition": decomposition})), "row 1")


def test_subject_relation_questions_of_real_data() -> None:
    question = _real([
        {"question": "Green >> performer", "answer": "Steve Hillage", "support_passage_id": None},
        {"question": "#1 >> spouse", "answer": "Miquette Giraudy", "support_passage_id": None},
    ])  # fmt: skip
    assert [(step.think, step.action) for step in expert_plan(question)] == [
        ("next performer", Action("search", "Green performer")),
        ("performer found , next spouse", Action("search", "Steve Hillage spouse")),
        ("spouse found", Action("answer", "Miquette Giraudy")),
    ]
    first, second = single_hops(question)
    assert (first.question, first.answers, first.hops) == ("Green >> performer", ("Steve Hillage",), 1)
    assert expert_plan(second)[0].action.content == "Steve Hillage spouse"


def test_a_question_without_decomposition_is_searched_as_it_stands() -> None:
    question = _real([], "When was Ada Lovelace born ?")
    assert [step.action for step in expert_plan(question)] == [
        Action("search", "When was Ada Lovelace born ?"),
        Action("answer", "It"),
    ]
    assert imperfect_plan(question, ["x"], MIXTURE, random.Random(0)) == expert_plan(question)
    assert [hop.question for hop in single_hops(question)] == ["When was Ada Lovelace born ?"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A >> date of birth", "date of birth"),
        ("A >> ", "A"),
        ("Who was she ?", "she"),
        ("? ?", "? ?"),
        ("Why?", "Why"),
    ],
)
def test_every_hop_has_a_topic(text: str, expected: str) -> None:
    hop = hops_of(_real([{"question": text, "answer": "b"}]))[0]
    assert topic(hop) == expected


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=1, max_size=4)
)
def test_any_decomposition_gives_plans(texts: list[str]) -> None:
    question = _real([{"question": text, "answer": text} for text in texts])
    topics = [topic(hop) for hop in hops_of(question)]
    assert all(topics)
    assert len(expert_plan(question)) == len(texts) + 1
    for seed in range(5):
        plan = imperfect_plan(question, topics, MIXTURE, random.Random(seed))
        assert len(texts) == 1 or len(plan) != len(texts) + 1


def test_many_plans_are_rendered_in_order(small_world: SmallWorld) -> None:
    """More than one block of searches."""
    questions = (small_world.questions * 9)[:530]
    plans = [expert_plan(question) for question in questions]
    done: list[int] = []
    rendered = _renderer(small_world).render(questions, plans, done.append)
    assert done == [512, 530]
    assert rendered[60:120] == rendered[:60]
    assert rendered[529] == _renderer(small_world).render(questions[529:], plans[529:])[0]


def test_answers_alone_and_nothing_at_all_can_be_rendered(small_world: SmallWorld) -> None:
    question = small_world.questions[0]
    example = _renderer(small_world).render([question], [[ScriptedTurn("known", Action("answer", "x"))]])[0]
    assert all(example.loss_mask)
    assert _renderer(small_world).render([], []) == []


def test_a_question_over_the_budget_is_an_error(small_world: SmallWorld) -> None:
    question = replace(small_world.questions[0], question="word " * 300)
    with pytest.raises(DataError, match=rf"question '{question.id}': its prompt has \d+ tokens, the budget"):
        _renderer(small_world).render([question], [expert_plan(question)])


def test_one_search_without_an_answer_ends_no_demonstrations(
    small_world: SmallWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again, as in a rollout; a query that is refused is not."""
    pauses: list[float] = []
    monkeypatch.setattr(search_again, "__defaults__", (2, pauses.append))
    questions = MULTI[:2]
    plans = [expert_plan(question) for question in questions]
    steady = _renderer(small_world).render(questions, plans)
    flaky = Flaky(small_world.retriever, [RetrievalError("half of the JSON"), RetrievalError("cut")])
    assert replace(_renderer(small_world), retriever=flaky).render(questions, plans) == steady
    assert pauses == [1.0, 2.0]
    for errors in ([RetrievalError("down")] * 3, [QueryError("too long")]):
        with pytest.raises(type(errors[0])):
            replace(_renderer(small_world), retriever=Flaky(small_world.retriever, list(errors))).render(
                questions, plans
            )
    assert pauses == [1.0, 2.0] * 2


@dataclass
class Flaky:
    """Its first searches raise these errors."""

    retriever: Any
    errors: list[RetrievalError]

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        if self.errors:
            raise self.errors.pop(0)
        return list(self.retriever.search(queries, top_k))
