"""The search-key reward against the golden values of its page, a slow second implementation and its edge cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rewards import Reward, total
from tasks.rewards.answer import AnswerReward
from tasks.rewards.key import KeyReward, key_score, key_score_as_released
from tasks.types import Hop, Question
from tests.papers import golden
from tests.tiny import Library, make_grammar, placed, play_script, question

GROUPS = (("capital of France", "France capital city"), ("population of Paris",))
GOLDEN = golden("stepsearch", "Search keys")
many = settings(max_examples=150)


@pytest.mark.parametrize("row", GOLDEN)
def test_golden_keys(row: dict[str, Any]) -> None:
    queries = row["queries"]
    assert key_score(queries, GROUPS) == pytest.approx(row["key score"], abs=1e-6)
    assert key_score_as_released(queries, GROUPS) == pytest.approx(row["as released"], abs=1e-6)
    assert 0.618 * key_score(queries, GROUPS) == pytest.approx(row["times 0.618"], abs=1e-6)


# A second implementation --------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Normalised words, letter by letter."""
    kept = "".join(letter for letter in text.lower() if letter.isalnum() or letter.isspace())
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def slow_f1(query: str, reference: str) -> float:
    """Cross off each common word once."""
    mine, left, common = words_of(query), words_of(reference), 0
    for word in mine:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(mine), common / len(words_of(reference))
    return 2 * precision * recall / (precision + recall)


def slow_key_score(queries: list[str], references: list[list[str]]) -> float:
    found = 0.0
    for keys in references:
        best = 0.0
        for key in keys:
            for query in queries:
                best = max(best, slow_f1(query, key))
        found += best / len(references)
    return found


def slow_released(queries: list[str], references: list[list[str]]) -> float:
    credit: dict[int, float] = {}
    for query in queries:
        best_hop, best = -1, 0.0
        for hop, keys in enumerate(references):
            for key in keys:
                score = round(slow_f1(query, key), 4)
                if score > best:
                    best_hop, best = hop, score
        if best_hop >= 0:
            credit[best_hop] = best
    return sum(credit.values()) / len(references) if references else 0.0


some_text = st.lists(st.sampled_from("the capital of France, Paris paris! population 2020 A".split()), max_size=5).map(
    " ".join
)
some_queries = st.lists(some_text, max_size=4)
some_references = st.lists(st.lists(some_text, max_size=3), max_size=4)


@many
@given(some_queries, some_references)
def test_keys_agree_with_the_slow_ones(queries: list[str], references: list[list[str]]) -> None:
    assert key_score(queries, references) == pytest.approx(slow_key_score(queries, references), abs=1e-9)
    assert key_score_as_released(queries, references) == pytest.approx(slow_released(queries, references), abs=1e-9)


@many
@given(some_queries, some_references, st.randoms(use_true_random=False), some_text)
def test_the_papers_score_knows_no_order_and_never_falls(
    queries: list[str], references: list[list[str]], rng: Any, more: str
) -> None:
    before = key_score(queries, references)
    shuffled = list(queries)
    rng.shuffle(shuffled)
    assert key_score(shuffled, references) == before
    assert before <= key_score([*queries, more], references) <= 1


def test_the_last_query_wins_as_released_only() -> None:
    good, weak = "capital of France", "France"
    assert key_score([good, weak], GROUPS) == key_score([weak, good], GROUPS)
    assert key_score_as_released([good, weak], GROUPS) < key_score_as_released([weak, good], GROUPS)


def test_empty_hops_and_none() -> None:
    """A hop without references counts in M; no hop at all scores 0."""
    assert key_score(["capital of France"], [*GROUPS, ()]) == pytest.approx(
        2 / 3 * key_score(["capital of France"], GROUPS)
    )
    assert key_score(["x"], []) == key_score_as_released(["x"], []) == 0.0
    assert key_score(["", "the"], GROUPS) == 0.0


# Played trajectories --------------------------------------------------------------------------------------------------

QUESTION = replace(
    question(answers=("North Dakota State",)),
    decomposition=tuple(Hop(f"hop {i}?", "x", queries=keys) for i, keys in enumerate(GROUPS)),
)


def search(query: str) -> str:
    return f"<think> so </think> <search> {query} </search>"


ANSWER = "<think> so </think> <answer> University of North Dakota </answer>"


def parts(tokenizer: Any, *lines: str, asked: Question = QUESTION, released: bool = False, **more: Any) -> list[float]:
    """What the answer and the keys earn."""
    rewards: list[Reward] = [
        AnswerReward("f1", gated=True, wrong_format=-1.0 if released else 0.0), KeyReward(0.618, released)
    ]  # fmt: skip
    t = play_script(tokenizer, lines, make_grammar("stepsearch", tokenizer), Library(), asked, **more)
    return [placed(reward([t], [asked])) for reward in rewards]


def test_golden_global_reward(tokenizer: Any) -> None:
    """A wrong format earns nothing (paper) or -1 (released code), and no keys."""
    alone, both, spoiled = golden("stepsearch", "Global reward")
    exact = replace(QUESTION, answers=("University of North Dakota",))
    full = ANSWER.replace("University of North Dakota", "North Dakota State University")
    assert parts(tokenizer, search("x"), full, asked=exact)[0] == pytest.approx(alone["reward"])
    first = [search(query) for query in GOLDEN[0]["queries"]]
    two_thirds = ANSWER.replace("University of North Dakota", "North Dakota university")  # 2 common of 3 and 3
    answer, keys = parts(tokenizer, *first, two_thirds)
    assert (answer, keys) == (pytest.approx(2 / 3), pytest.approx(GOLDEN[0]["times 0.618"]))
    assert answer + keys == pytest.approx(both["reward"], abs=1e-6)
    released = sum(parts(tokenizer, *first, two_thirds, released=True))
    assert released == pytest.approx(both["as released"], abs=1e-6)
    wrong = [*first, two_thirds.replace("</think>", "")]
    assert parts(tokenizer, *wrong)[0] == pytest.approx(2 / 3)  # thought once before: that is enough
    wrong = [*first, two_thirds + " so"]
    assert parts(tokenizer, *wrong) == [spoiled["reward"], 0.0]
    assert parts(tokenizer, *wrong, released=True) == [spoiled["as released"], 0.0]


@pytest.mark.parametrize(
    "lines",
    [
        [ANSWER],  # not searched
        [search("capital of France").replace("</search>", "</search)"), search("capital of France"), ANSWER],
        [search("capital of France"), search("x"), "so"],  # no answer
        ["<search> capital of France </search>", ANSWER.replace("<think> so </think>", "")],  # not thought
        [search("capital of France"), ANSWER.replace("<answer>", "<answer> <answer>")],
        [search("<search> capital of France"), ANSWER],
        [search("capital of France"), ANSWER + " </answer>"],
    ],
)
def test_a_wrong_format_earns_nothing(tokenizer: Any, lines: list[str]) -> None:
    assert parts(tokenizer, *lines, max_turns=2) == [0.0, 0.0]
    assert sum(parts(tokenizer, *lines, max_turns=2, released=True)) == -1.0


def test_an_invalid_turn_without_tags_breaks_nothing(tokenizer: Any) -> None:
    found = parts(tokenizer, search("capital of France"), "<think> hm </think>", ANSWER)
    assert found == [pytest.approx(2 * 2 / 7), pytest.approx(0.618 * 2 / 3)]


def test_only_executed_queries_count(tokenizer: Any) -> None:
    """Neither a query in the forced last call nor one in a malformed pair."""
    grammar = make_grammar("stepsearch", tokenizer)
    both = [search(query) for query in GOLDEN[0]["queries"]]
    t = play_script(tokenizer, both, grammar, Library(), QUESTION, max_turns=1)
    (score,) = KeyReward()([t], [QUESTION])
    assert [turn.executed for turn in t.turns] == [True, False]
    assert score.components["key"] == pytest.approx(2 / 3)  # the first query alone: 1 and, for "of", 1/3
    t = play_script(
        tokenizer, [both[0].replace("</search>", '</search"'), both[1], ANSWER], grammar, Library(), QUESTION
    )
    assert KeyReward()([t], [QUESTION])[0].components["key"] == pytest.approx(1 / 3)


def test_the_key_reward_adds_to_the_answer_on_the_last_token(tokenizer: Any) -> None:
    t = play_script(
        tokenizer, [search("capital of France"), ANSWER], make_grammar("stepsearch", tokenizer), Library(), QUESTION
    )
    scores = [reward([t], [QUESTION])[0] for reward in (AnswerReward("f1"), KeyReward())]
    assert [place for score in scores for place, _ in score.placed] == [t.last_generated] * 2
    assert total(scores).placed == ((t.last_generated, pytest.approx(4 / 7 + 0.618 * 2 / 3)),)
