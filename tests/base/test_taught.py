"""Demonstrations for a pretrained model: what is searched, what is kept, and that a rollout would record the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.agent.prompts import prompt_ids
from tasks.base.demonstrations import Example, Renderer
from tasks.base.fit import Fit, PhaseConf
from tasks.base.settings import FormatConf
from tasks.base.taught import Search, demonstrations, has_come_back, script, searches_of, teach_format
from tasks.data.decomposition import hops_of
from tasks.text import contains_any, findable
from tasks.types import Hit, Hop, Question
from tests.base.conftest import SmallWorld
from tests.base.test_demonstrations import CONF, _play, _renderer
from tests.tiny import make_learner, make_model

FORMAT = FormatConf(
    num_threads=1,
    dtype="float32",
    checkpoint_every=2,
    max_batch_tokens=2048,
    max_questions=50,
    shortcut=0.0,
    repeat=0.0,
    fit=PhaseConf(max_steps=5, batch=2, lr=1e-3, decay=True, stop_loss=0.0),
)
PHASES = [
    replace(FORMAT, share_reading=True),
    replace(FORMAT, read=PhaseConf(max_steps=5, batch=3, lr=1e-3, decay=False, stop_loss=0.0)),
]
CHAIN = Question(
    "q", "d", "train", "Where was the writer of Emma born?", ("Steventon",), 2, gold_passage_ids=("p1", "p2"),
    gold_complete=True, decomposition=(Hop("Emma >> writer", "Jane Austen"), Hop("Where was #1 born?", "Steventon")),
)  # fmt: skip


def _hit(passage: str, text: str, title: str = "") -> Hit:
    return Hit(passage, 1.0, title, text)


def test_a_decomposition_is_searched_hop_by_hop_with_its_answers_filled_in() -> None:
    assert searches_of(CHAIN, FORMAT, 4, random.Random(0)) == [
        Search("Emma writer", ("Jane Austen",)),
        Search("Where was Jane Austen born?", ("Steventon",)),
    ]
    whole = [Search(CHAIN.question, CHAIN.answers)]
    assert searches_of(CHAIN, replace(FORMAT, shortcut=1.0), 4, random.Random(0)) == whole
    assert searches_of(CHAIN, FORMAT, 1, random.Random(0)) == whole  # The chain is longer than a play.
    assert searches_of(replace(CHAIN, decomposition=()), FORMAT, 4, random.Random(0)) == whole


def test_a_plan_is_kept_if_what_it_looked_for_came_back() -> None:
    search = Search("Emma writer", ("Jane Austen",))
    assert has_come_back(search, [_hit("x", "by JANE  Austen, 1815")], CHAIN)
    assert has_come_back(search, [_hit("x", "a novel", title="Jane Austen")], CHAIN)
    assert not has_come_back(search, [_hit("x", "a novel")], CHAIN)
    assert not has_come_back(search, [_hit("x", "by Jane Austenson")], CHAIN), "a part of a word is no answer"
    assert not has_come_back(search, [], CHAIN)


@pytest.mark.parametrize("answer", ["yes", "No", "7"])
def test_answers_that_stand_in_most_texts_need_every_gold_passage(answer: str) -> None:
    asked, search = replace(CHAIN, answers=(answer,)), Search("q", (answer,))
    assert not has_come_back(search, [_hit("p1", answer)], asked)
    assert has_come_back(search, [_hit("p1", "-"), _hit("p2", "-")], asked)
    assert not has_come_back(search, [_hit("p1", "-"), _hit("p2", "-")], replace(asked, gold_complete=False))
    assert not has_come_back(search, [_hit("p1", "-")], replace(asked, gold_passage_ids=()))


def test_a_thought_says_what_the_last_search_found() -> None:
    searches = searches_of(CHAIN, FORMAT, 4, random.Random(0))
    hits = [
        [_hit("p0", "nothing", "Noise"), _hit("p1", "by Jane Austen", "Emma")],
        [_hit("p2", "Steventon", "Jane Austen")],
    ]
    turns, found = script(CHAIN, searches, hits, repeats=True)
    assert [(turn.think, turn.action.kind, turn.action.content) for turn in turns] == [
        ("I need to search.", "search", "Emma writer"),
        ("Emma: Jane Austen.", "search", "Where was Jane Austen born?"),
        ("I search again.", "search", "Where was Jane Austen born?"),
        ("Jane Austen: Steventon.", "answer", "Steventon"),
    ]
    assert found == [hits[0], hits[1], hits[1], None]


def test_a_plan_answers_with_the_accepted_answer_that_it_has_read() -> None:
    asked = replace(CHAIN, answers=("United States of America", "USA"), decomposition=())
    searches = searches_of(asked, FORMAT, 4, random.Random(0))
    turns, _ = script(asked, searches, [[_hit("p1", "born in the USA", "Emma")]], repeats=False)
    assert (turns[-1].think, turns[-1].action.content) == ("Emma: USA.", "USA")

    unspoken = replace(asked, answers=("yes",))
    searches = searches_of(unspoken, FORMAT, 4, random.Random(0))
    turns, _ = script(unspoken, searches, [[_hit("p1", "born in the USA", "Emma")]], repeats=False)
    assert (turns[-1].think, turns[-1].action.content) == ("Emma: yes.", "yes")


def test_a_demonstration_whose_answer_is_cut_off_is_left_out(small_world: SmallWorld) -> None:
    questions = _train(small_world)
    whole = demonstrations(questions, _renderer(small_world), FORMAT, "seed").examples
    renderer = _renderer(small_world)
    cut = replace(renderer, conf=replace(renderer.conf, max_observation_tokens=20))
    made = demonstrations(questions, cut, FORMAT, "seed").examples
    by_prompt = {tuple(prompt_ids(cut.tokenizer, cut.prompt, one, cut.grammar, 512)): one for one in questions}
    assert 0 < len(made) < len(whole)
    for example in made:
        read = [token for token, own in zip(example.response_ids, example.loss_mask, strict=True) if not own]
        question = by_prompt[example.prompt_ids]
        assert contains_any(cut.tokenizer.decode(read), findable(question.answers))


def _train(small: SmallWorld) -> list[Question]:
    return [question for question in small.questions if question.split == "train"]


@pytest.mark.parametrize("repeat", [0.0, 1.0])
def test_a_demonstration_is_what_a_rollout_records(small_world: SmallWorld, repeat: float) -> None:
    conf, questions = replace(FORMAT, repeat=repeat), _train(small_world)
    renderer = _renderer(small_world)
    made = demonstrations(questions, renderer, conf, "seed")
    assert made.tried == len(questions)
    assert len(made.examples) > 20
    by_prompt = {example.prompt_ids: example for example in made.examples}
    assert len(by_prompt) == len(made.examples)

    plans, kept = [], []
    for question in questions:
        searches = searches_of(question, conf, CONF.max_turns, random.Random(0))
        hits = small_world.retriever.search([search.query for search in searches], CONF.top_k)
        plan, _ = script(question, searches, hits, repeats=bool(repeat) and len(searches) < CONF.max_turns)
        plans.append(plan)
    for question, trajectory in zip(questions, _play(small_world, questions, plans), strict=True):
        example = by_prompt.get(trajectory.prompt_ids)
        if example is not None:
            kept.append(question)
            assert (example.response_ids, example.loss_mask) == (trajectory.response_ids, trajectory.loss_mask)
            assert trajectory.answer in question.answers
            assert example.loss_mask[-1]
    assert len(kept) == len(made.examples)
    assert {len(hops_of(question)) for question in kept} >= {1, 2}


def test_the_same_seed_gives_the_same_demonstrations(small_world: SmallWorld) -> None:
    conf = replace(FORMAT, shortcut=0.5, repeat=0.5)
    first, again, other = (
        demonstrations(_train(small_world), _renderer(small_world), conf, seed) for seed in ("a", "a", "b")
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("repeat", [0.0, 1.0])
def test_a_demonstration_alone_shows_the_passage_that_holds_what_was_looked_for(
    small_world: SmallWorld, repeat: float
) -> None:
    renderer = _renderer(small_world)
    made = demonstrations(_train(small_world), renderer, replace(PHASES[1], repeat=repeat), "seed")
    without = demonstrations(_train(small_world), renderer, replace(FORMAT, repeat=repeat), "seed")
    assert (without.examples, without.alone) == (made.examples, [])
    assert len(made.alone) == len(made.examples)
    for example, alone in zip(made.examples, made.alone, strict=True):
        assert alone.prompt_ids == example.prompt_ids
        written = [[token for token, own in _shown(one) if own] for one in (example, alone)]
        assert written[0] == written[1], "a policy writes the same with one passage as with all"
        read = [renderer.tokenizer.decode([token for token, own in _shown(one) if not own]) for one in (example, alone)]
        searches = read[0].count("Doc 1")
        assert read[0].count("Doc 2") == searches > 0, "several passages a search"
        assert (read[1].count("Doc 1"), read[1].count("Doc 2")) == (searches, 0)


def _shown(example: Example) -> list[tuple[int, bool]]:
    return list(zip(example.response_ids, example.loss_mask, strict=True))


def _fit(model: Any, scratch: Path, conf: FormatConf, log: Callable[[int, dict[str, float]], None]) -> Fit:
    learner = make_learner(model, share_reading=conf.share_reading)
    return Fit(learner, scratch, conf.checkpoint_every, conf.max_batch_tokens, log, conf.share_reading)


def _teach(small: SmallWorld, renderer: Renderer, scratch: Path, conf: FormatConf = FORMAT) -> tuple[Any, Any]:
    model = make_model(small.tokenizer)
    fit = _fit(model, scratch, conf, lambda step, metrics: None)
    return model, teach_format(model, fit, renderer, _train(small), conf, "0")


class _KilledError(Exception):
    pass


@pytest.mark.parametrize(("conf", "trained", "killed_at"), [(PHASES[0], 10, 3), (PHASES[1], 25, 3), (PHASES[1], 25, 8)])
def test_a_killed_training_ends_as_an_undisturbed_one(
    small_world: SmallWorld, tmp_path: Path, conf: FormatConf, trained: int, killed_at: int
) -> None:
    renderer = _renderer(small_world)
    whole, record = _teach(small_world, renderer, tmp_path / "whole", conf)
    assert record.trained == trained
    assert 0 < record.written_tokens < record.tokens
    assert record.demonstrations <= record.plans == len(_train(small_world))

    def kill(step: int, metrics: dict[str, float]) -> None:
        if step == killed_at:
            raise _KilledError

    model = make_model(small_world.tokenizer)
    fit = _fit(model, tmp_path / "killed", conf, kill)
    with pytest.raises(_KilledError):
        teach_format(model, fit, renderer, _train(small_world), conf, "0")
    resumed, again = _teach(small_world, renderer, tmp_path / "killed", conf)
    assert again == record
    for (name, own), (_, other) in zip(resumed.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(own, other), name


class _Batches:
    """A training that only keeps what each step was given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, list[Example]]] = []
        self.step = 0

    def run(self, name: str, conf: PhaseConf, sample: Callable[[int], list[Example]]) -> None:
        self.given += [(name, sample(step)) for step in range(conf.max_steps)]
        self.step += conf.max_steps


def test_all_demonstrations_have_a_turn_before_one_comes_again(small_world: SmallWorld) -> None:
    renderer, questions = _renderer(small_world), _train(small_world)
    made = demonstrations(questions, renderer, PHASES[1], "0")
    count = len(made.examples)
    read = PhaseConf(max_steps=count // 4, batch=2, lr=1e-3, decay=False, stop_loss=0.0)
    conf = replace(FORMAT, read=read, fit=replace(FORMAT.fit, max_steps=count // 2))
    batches = _Batches()
    record = teach_format(make_model(small_world.tokenizer), batches, renderer, questions, conf, "0")  # type: ignore[arg-type]

    by_phase = {
        name: [one for phase, batch in batches.given if phase == name for one in batch] for name in ("read", "format")
    }
    order = [made.alone.index(one) for one in by_phase["read"]] + [
        made.examples.index(one) for one in by_phase["format"]
    ]
    assert [len(batch) for _, batch in batches.given] == [2] * len(batches.given)
    assert len(set(order[:count])) == count, "one pass over all"
    assert len(set(order[count:])) == len(order) - count, "and a part of the next"
    assert record.trained == len(order)
    trained = [made.alone[one] for one in order[: 2 * read.max_steps]]
    trained += [made.examples[one] for one in order[2 * read.max_steps :]]
    assert record.tokens == sum(len(one.prompt_ids) + len(one.response_ids) for one in trained)


def test_reading_has_a_fixed_length() -> None:
    with pytest.raises(ValueError, match=r"read: stop_loss.*fixed length"):
        replace(FORMAT, read=replace(FORMAT.fit, stop_loss=0.1))


def test_plans_that_find_nothing_end_with_what_helps(small_world: SmallWorld, tmp_path: Path) -> None:
    renderer = replace(_renderer(small_world), conf=replace(CONF, max_call_tokens=2))
    with pytest.raises(ValueError, match=r"of \d+ plans none brought back what it looked for.*format: null"):
        _teach(small_world, renderer, tmp_path)
