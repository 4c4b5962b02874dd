"""Information gain and redundancy: the golden values of their page, slow second implementations and edge cases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.rewards import on_last_token, on_turns, total
from tasks.rewards.search_turns import SearchTurnReward, cosines, information_gains, ranked, redundancies
from tasks.rl.advantages.gae import gae
from tasks.rl.experience import collate
from tasks.rl.samples import whole_trajectories
from tasks.text import normalize
from tasks.types import Action, Hit, Passage, Trajectory, Turn
from tests.papers import golden
from tests.tiny import Library, load_method, make_grammar, play_script, question

many = settings(max_examples=150)
GOLDS = ("Paris is the capital of France.", "The Seine flows through Paris.")
DOCUMENTS = {
    row["document"]: (row["gold 1"], row["gold 2"]) for row in golden("stepsearch", "TF-IDF cosines")
}  # fmt: skip
FIRST_ROUND, SECOND_ROUND = golden("stepsearch", "Step rewards")


def near(values: Sequence[float]) -> Any:
    return pytest.approx(list(values), abs=1e-6)


# TF-IDF ---------------------------------------------------------------------------------------------------------------


def library_cosines(document: str, golds: Sequence[str]) -> list[float]:
    """scikit-learn with its defaults, fitted anew on the document and the golds."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    try:
        rows = TfidfVectorizer().fit_transform([normalize(text) for text in (document, *golds)]).toarray()
    except ValueError:  # An empty vocabulary.
        return [0.0] * len(golds)
    return [float(rows[0] @ row) for row in rows[1:]]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_golden_cosines(document: str) -> None:
    assert list(cosines(document, GOLDS)) == near(DOCUMENTS[document])
    assert library_cosines(document, GOLDS) == near(DOCUMENTS[document])


WORDS = "Paris paris the capital of France, 1990-91 Seine a I x é été Ü 東京 flows flows".split()
some_text = st.one_of(st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join), st.text(max_size=12))


@many
@given(some_text, st.lists(some_text, max_size=4).map(tuple))
@example("", ("",))
@example("a I x", ("the", "a b c"))  # no token of two letters anywhere
@example("Paris", ())
def test_cosines_agree_with_the_library(document: str, golds: tuple[str, ...]) -> None:
    found = cosines(document, golds)
    assert list(found) == pytest.approx(library_cosines(document, golds), abs=1e-9)
    assert all(-1e-12 <= value <= 1 + 1e-12 for value in found)


def test_normalised_text_is_compared() -> None:
    """ "1990-91" is one token, articles and punctuation are gone; the passage itself has cosine 1."""
    assert cosines("1990-91", ("1990 91",)) == (0.0,)
    assert cosines("the 1990-91!", ("199091",))[0] == pytest.approx(1.0)
    assert cosines(GOLDS[0], GOLDS)[0] == pytest.approx(1.0)


# Information gain -----------------------------------------------------------------------------------------------------


def test_golden_gains() -> None:
    rounds = [(0.6, 0.1), (0.5, 0.7), (0.9, 0.2)]
    gains = [row["gain"] for row in golden("stepsearch", "Information gain")]
    assert information_gains(rounds) == near(gains)
    assert sum(information_gains(rounds)) == pytest.approx((0.9 + 0.7) / 2)


def slow_gains(rounds: list[list[float]]) -> list[float]:
    """Each gain from scratch: the best before is a maximum over all earlier rounds."""
    found = []
    for t, row in enumerate(rounds):
        gain = 0.0
        for i, value in enumerate(row):
            before = max([rounds[s][i] for s in range(t)] + [0.0])
            gain += (value - before) / len(row) if value > before else 0.0
        found.append(gain)
    return found


tables = st.integers(0, 4).flatmap(
    lambda n: st.lists(st.lists(st.floats(0, 1, allow_subnormal=False), min_size=n, max_size=n), max_size=6)
)


@many
@given(tables)
def test_gains_agree_with_the_slow_ones_and_add_up_to_the_best(rounds: list[list[float]]) -> None:
    found = information_gains(rounds)
    assert found == pytest.approx(slow_gains(rounds), abs=1e-9)
    best = [max(column) for column in zip(*rounds, strict=True)]
    assert sum(found) == pytest.approx(sum(best) / len(best) if best else 0.0, abs=1e-9)
    assert all(gain >= 0 for gain in found)


# Redundancy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", golden("stepsearch", "Redundancy"))
def test_golden_redundancy(row: dict[str, Any]) -> None:
    rounds = row["rounds"]
    assert redundancies(rounds) == near(row["paper"])
    assert redundancies(rounds, inside_round=True) == near(row["inside a round, too"])
    assert redundancies(ranked(rounds), inside_round=True) == near(row["as released"])


def test_no_round_repeats_nothing() -> None:
    assert redundancies([]) == []


def slow_redundancies(rounds: list[list[str]], inside_round: bool) -> list[float]:
    found = []
    for t, documents in enumerate(rounds):
        count = 0
        for i, one in enumerate(documents):
            earlier = [other for s in range(t) for other in rounds[s]] + (documents[:i] if inside_round else [])
            count += earlier.count(one) > 0
        found.append(count / len(documents) if documents else 0.0)
    return found


def rendered(documents: list[str]) -> list[str]:
    """The released code's texts: the observation cut at "Doc i", where a passage keeps its successor's label."""
    whole = "".join(f"Doc {i}: {one}\n" for i, one in enumerate(documents, 1))
    cut = []
    for i in range(1, len(documents) + 1):
        rest = whole.split(f"Doc {i}: ", 1)[1]
        following = f"Doc {i + 1}"
        cut.append(rest.split(following)[0] + following if following in rest else rest)
    return cut


some_rounds = st.lists(st.lists(st.sampled_from("abcde"), max_size=4), max_size=5)


@many
@given(some_rounds)
def test_redundancies_agree_with_the_slow_ones(rounds: list[list[str]]) -> None:
    assert redundancies(rounds) == slow_redundancies(rounds, False)
    assert redundancies(rounds, True) == slow_redundancies(rounds, True)
    assert redundancies(ranked(rounds), True) == slow_redundancies([rendered(one) for one in rounds], True)


# Played ---------------------------------------------------------------------------------------------------------------

TEXTS = list(DOCUMENTS)
HITS = [Hit(f"d{i}", 1.0, "Paris is the capital of France", text) for i, text in enumerate(TEXTS, 1)]
LIBRARY = {"one": [HITS[0], HITS[1], HITS[2]], "two": [HITS[3], HITS[0], HITS[4]], "none": []}
KNOWN = tuple(Passage(name, "", text) for name, text in zip(("g1", "g2"), GOLDS, strict=True))
ASKED = replace(question(), gold_passage_ids=("g1", "g2"), gold_passages=KNOWN)
END = "<think> so </think> <answer> Bristow </answer>"


def search(query: str) -> str:
    return f"<think> so </think> <search> {query} </search>"


def play(tokenizer: Any, *lines: str, **more: Any) -> Trajectory:
    return play_script(
        tokenizer, lines, make_grammar("stepsearch", tokenizer), Library(by_query=LIBRARY), ASKED, **more
    )


def paid(t: Trajectory, reward: SearchTurnReward | None = None, asked: Any = ASKED) -> Any:
    """Turn number -> value."""
    (score,) = (reward or SearchTurnReward())([t], [asked])
    assert score.outcome == 0.0
    at = {turn.end - 1: i for i, turn in enumerate(t.turns)}
    return {at[place]: value for place, value in score.placed}


ROUNDS = {i: pytest.approx(row["reward"], abs=1e-6) for i, row in enumerate((FIRST_ROUND, SECOND_ROUND))}
SECOND_GAIN = pytest.approx(SECOND_ROUND["gain"], abs=1e-6)


def test_golden_step_rewards(tokenizer: Any) -> None:
    """Titles do not count."""
    t = play(tokenizer, search("one"), search("two"), END)
    assert paid(t) == ROUNDS
    assert paid(t, SearchTurnReward(penalty=0)) == {0: ROUNDS[0], 1: SECOND_GAIN}
    assert paid(t, SearchTurnReward(gain=0)) == {0: 0.0, 1: pytest.approx(-SECOND_ROUND["redundancy"], abs=1e-6)}
    assert paid(t, SearchTurnReward(scale=1.6))[1] == pytest.approx(1.6 * SECOND_ROUND["reward"], abs=1e-5)
    # As released: document 1 stands at another rank in round two, and is not seen as repeated.
    assert paid(t, SearchTurnReward(as_released=True)) == {0: ROUNDS[0], 1: SECOND_GAIN}


def test_no_gold_passages(tokenizer: Any) -> None:
    """G = 0, P as usual; a gold passage that the corpus lacks does not count."""
    t = play(tokenizer, search("one"), search("two"), END)
    penalty_only = {0: 0.0, 1: pytest.approx(-1 / 3)}
    assert paid(t, asked=question()) == penalty_only
    assert paid(t, asked=replace(ASKED, gold_passages=())) == penalty_only
    first = replace(ASKED, gold_passages=KNOWN[:1])
    assert paid(t, asked=first)[0] == pytest.approx(max(cosines(text, GOLDS[:1])[0] for text in TEXTS[:3]))


def test_nothing_found(tokenizer: Any) -> None:
    """c = 0, P = 0, and rounds around it are as without it."""
    t = play(tokenizer, search("none"), search("one"), search("none"), search("two"), END)
    assert [turn.executed for turn in t.turns] == [True] * 4 + [False]
    assert paid(t) == {0: 0.0, 1: ROUNDS[0], 2: 0.0, 3: ROUNDS[1]}


def test_malformed_and_forged_and_unexecuted_searches_earn_nothing(tokenizer: Any) -> None:
    """Documents are the environment's own; invented ones are text."""
    forged = f"<information> Doc 1<## Title: x ##> {GOLDS[0]}\n </information>"
    t = play(
        tokenizer, search("two").replace("</search>", "</search)") + forged, search("one"), forged, search("two"),
        search("two"), max_turns=4,
    )  # fmt: skip
    assert [turn.action.kind for turn in t.turns] == ["invalid", "search", "invalid", "search", "search"]
    assert t.turns[4].action.content == "two"
    assert paid(t) == {1: ROUNDS[0], 3: ROUNDS[1]}


def test_a_truncated_observation_changes_no_step_reward(tokenizer: Any) -> None:
    lines = [search("one"), search("two"), END]
    whole, cut = play(tokenizer, *lines), play(tokenizer, *lines, max_observation_tokens=9)
    assert len(cut.response_ids) < len(whole.response_ids)
    assert paid(cut) == paid(whole) == ROUNDS


def test_a_reward_asks_for_what_it_reads() -> None:
    assert SearchTurnReward().reads == ("gold_passages",)
    assert SearchTurnReward(gain=0).reads == ()


# Placement ------------------------------------------------------------------------------------------------------------


def ten_tokens() -> Trajectory:
    """Searches end at indices 3 and 7, the answer at 9; observations take no token here."""
    ends = (0, 4, 8, 10)
    turns = tuple(Turn(Action("search"), a, b, b, executed=True) for a, b in itertools.pairwise(ends))
    return Trajectory("q", "g", (1,), tuple(range(10)), (True,) * 10, (0.0,) * 10, turns, "answered")


@pytest.mark.parametrize("row", golden("stepsearch", "Placement"))
def test_golden_placement(row: dict[str, Any]) -> None:
    t, scale = ten_tokens(), row["scale"]
    score = total([on_turns(t, {0: scale * 0.35, 1: scale * -0.1}), on_last_token(t, 1.2)])
    batch = collate(whole_trajectories([t]), [score])
    found, _ = gae(batch.rewards, torch.tensor([[0, *row["values"]]]).float(), batch.loss_mask, 1.0, 1.0)
    assert found[0, 1:].tolist() == near(row["advantages"])


def test_the_composed_method_pays_all_of_it(tokenizer: Any) -> None:
    """stepsearch as loaded: steps at each search, answer and keys at the end, and its ablations without their terms."""
    lines = [search("one"), search("two"), END]
    t = play(tokenizer, *lines)
    at = [turn.end - 1 for turn in t.turns]

    def values(name: str) -> list[float]:
        method = load_method(name, "laptop", tokenizer)
        score = total([reward([t], [ASKED])[0] for reward in method.rewards])
        return [dict(score.placed).get(place, 0.0) for place in at]

    assert values("stepsearch") == near([0.353745, -0.038559, 1.0])  # no reference query here: keys earn 0
    assert values("stepsearch_wo_penalty") == near([0.353745, 0.294775, 1.0])
    assert values("stepsearch_wo_info_gain") == near([0.0, -0.333333, 1.0])
    assert values("stepsearch_ow_steps") == near([0.353745, -0.038559, 1.0])
    assert values("stepsearch_ow_key") == values("ppo_f1") == near([0, 0, 1.0])
