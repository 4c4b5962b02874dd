"""Rewards that only one method uses, against second implementations: sub-answers, ReSearch's format, MT-PPO's turns."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tasks.rewards.f1_or_format import F1OrFormat
from tasks.rewards.sub_answer import SubAnswerReward
from tasks.rewards.turn_rules import TurnRules
from tasks.types import Action, Hit, Hop, Question, Trajectory, Turn

QUESTION = Question("q", "world", "train", "Who?", ("bristow hall",), 2)
SEARCH = "<think> need it </think> <search> q </search>"


def trajectory(turns: list[Turn], answer: str | None) -> Trajectory:
    """Each turn three tokens and one of observation."""
    placed = [replace(turn, start=4 * i, end=4 * i + 3, observation_end=4 * i + 4) for i, turn in enumerate(turns)]
    mask = (True, True, True, False) * len(turns)
    ids, zeros = (1,) * len(mask), (0.0,) * len(mask)
    return Trajectory(
        "q", "g", (1,), ids, mask, zeros, tuple(placed), "answered" if answer is not None else "open", answer
    )


def search_turn(text: str = SEARCH, hits: tuple[Hit, ...] = ()) -> Turn:
    return Turn(Action("search", "q"), 0, 0, 0, text=text, executed=True, hits=hits)


def answer_turn(text: str) -> Turn:
    return Turn(Action("answer", "x"), 0, 0, 0, text=text)


# Sub-answers ------------------------------------------------------------------------------

NAMES = ["hask", "hask elvane", "elvane", "dunholt", ""]


def slow_f1(one: str, other: str) -> float:
    left, right = one.split(), other.split()
    common = 0
    rest = list(right)
    for word in left:
        if word in rest:
            rest.remove(word)
            common += 1
    return 2 * common / (len(left) + len(right)) if common else 0.0


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(NAMES)), max_size=3), min_size=1, max_size=3),
    st.lists(st.sampled_from(NAMES[:4]), max_size=3),
)
def test_sub_answers_agree_with_the_slow_mean(written: list[list[tuple[int, str]]], golds: list[str]) -> None:
    texts = ["".join(f"<sub_answer{n}> {name} </sub_answer{n}>" for n, name in turn) + SEARCH for turn in written]
    t = trajectory([*map(search_turn, texts), answer_turn("<answer> x </answer>")], "x")
    question = replace(QUESTION, decomposition=tuple(Hop("?", gold) for gold in golds))
    (score,) = SubAnswerReward(0.618)([t], [question])
    total = 0.0
    for number, gold in enumerate(golds, 1):
        said = [name for turn in written for n, name in turn if n == number]
        total += slow_f1(said[-1], gold) if said else 0.0
    wanted = total / len(golds) if golds else 0.0
    assert abs(score.components["sub_answer"] - wanted) < 1e-12
    assert abs(score.outcome - 0.618 * wanted) < 1e-12
    assert dict(score.placed) == {t.last_generated: score.outcome}


# ReSearch -------------------------------------------------------------------------------------------

PIECES = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<result>", "x", " "]
WHOLE = ["<think> a </think> <search> q </search>", "<think> a </think> <answer> x </answer>", "<think></think>"]


def slow_is_turn(text: str) -> bool:
    """A machine that reads the tags one after the other."""
    state = "start"
    steps = {
        ("start", "<think>"): "thinking", ("thinking", "</think>"): "thought", ("thought", "<search>"): "searching",
        ("thought", "<answer>"): "answering", ("searching", "</search>"): "end", ("answering", "</answer>"): "end",
    }  # fmt: skip
    place = 0
    while place < len(text):
        tag = next((piece for piece in [*PIECES[:7], "</result>"] if text.startswith(piece, place)), None)
        if tag is None:
            place += 1
            continue
        if (state, tag) not in steps:
            return False
        state = steps[state, tag]
        place += len(tag)
    return state == "end"


@given(
    st.lists(st.lists(st.sampled_from([*PIECES, *WHOLE]), max_size=4).map("".join), min_size=1, max_size=3),
    st.sampled_from(["bristow hall", "hall", "hask", "", None]),
    st.booleans(),
)
def test_research_agrees_with_the_slow_format(texts: list[str], answer: str | None, has_invalid: bool) -> None:
    turns = [search_turn(text) for text in texts[:-1]]
    if has_invalid:
        turns.append(Turn(Action("invalid"), 0, 0, 0, text=WHOLE[0]))
    t = trajectory([*turns, answer_turn(texts[-1])], answer)
    (score,) = F1OrFormat(0.1)([t], [QUESTION])
    is_right = (
        bool(answer) and not has_invalid and all(map(slow_is_turn, texts)) and texts[-1].rstrip(" ")[-9:] == "</answer>"
    )
    f1 = slow_f1(answer or "", "bristow hall")
    assert score.outcome == (f1 if f1 > 0 else 0.1 if is_right else 0.0)
    assert score.components["format"] == is_right


# MT-PPO ---------------------------------------------------------------------------------------------

WORDS = ["no", "norway", "north", "hall", "bristow", "the"]
texts_of = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)


@given(
    st.lists(st.one_of(st.none(), st.lists(texts_of, max_size=2)), min_size=1, max_size=4),
    st.lists(st.sampled_from(["no", "bristow hall", "the hall"]), min_size=1, max_size=2),
)
def test_turn_rules_agree_with_windows_of_words(turns: list[list[str] | None], golds: list[str]) -> None:
    """None is an invalid turn, a list the documents of a search; articles are dropped before words are compared."""
    made = [
        Turn(Action("invalid"), 0, 0, 0, text="hm")
        if documents is None
        else search_turn(hits=tuple(Hit(f"p{i}", 1.0, "", one) for i, one in enumerate(documents)))
        for documents in turns
    ]
    t = trajectory([*made, answer_turn("<answer> x </answer>")], "x")
    (score,) = TurnRules(0.3, -0.2)([t], [replace(QUESTION, answers=tuple(golds))])
    wanted: dict[int, float] = {}
    is_found = False
    for number, documents in enumerate(turns):
        if documents is None:
            wanted[4 * number + 2] = -0.2
            continue
        for document in documents:
            words = [word for word in document.split() if word != "the"]
            for gold in golds:
                parts = [word for word in gold.split() if word != "the"]
                windows = [words[i : i + len(parts)] for i in range(len(words) - len(parts) + 1)]
                if parts in windows and not is_found:
                    is_found = True
                    wanted[4 * number + 2] = 0.3
    assert dict(score.placed) == wanted
    assert score.outcome == 0.0
