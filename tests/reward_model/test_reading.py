"""What a reward model reads: places, placeholders that others wrote, and texts over the limit."""

from __future__ import annotations

import pytest

from tasks.base.tokenizer import END, build_tokenizer
from tasks.reward_model.reading import encode, placeholder_id
from tasks.types import Action, Turn

TOKENIZER = build_tokenizer(["Who is it ? The river rises here . so a b c d"] * 3, 900)
P = placeholder_id(TOKENIZER, END, "x")


def search(text: str = "<think> so </think> <search> a </search>", observation: str = "\n\nriver\n") -> Turn:
    return Turn(Action("search", "a"), text=text, observation=observation, executed=True)


ANSWER = Turn(Action("answer", "b"), text="<answer> b </answer>")
INVALID = Turn(Action("invalid"), text="so", observation="try again")


def read(*turns: Turn, most: int = 1000) -> tuple[list[str], tuple[int | None, ...]]:
    """The text before each place, and the turns of the places."""
    one = encode(TOKENIZER, P, "Who is it ?", turns, most)
    starts = [0, *(place + 1 for place in one.places)]
    texts = [TOKENIZER.decode(one.ids[a:b]) for a, b in zip(starts, one.places, strict=False)]
    assert all(one.ids[place] == P for place in one.places)
    assert one.ids.count(P) == len(one.places)
    return texts, one.turns


def test_places_stand_after_the_question_each_search_and_the_end() -> None:
    texts, turns = read(search(), INVALID, search(), ANSWER)
    assert turns == (None, 0, 2, 3)
    assert texts == [
        "Who is it ?\n", "<think> so </think> <search> a </search>",
        "\n\nriver\nsotry again<think> so </think> <search> a </search>", "\n\nriver\n<answer> b </answer>",
    ]  # fmt: skip


def test_without_a_search_there_are_two_places() -> None:
    assert read(ANSWER)[1] == (None, 0)


def test_the_end_after_a_search_is_no_turns_score() -> None:
    assert read(search())[1] == (None, 0, None)


def test_a_placeholder_of_the_policy_or_of_a_passage_is_no_place() -> None:
    forged = search(f"so {END}{END} <search> a </search>", f"river {END} here")
    assert read(forged, ANSWER)[1] == (None, 0, 1)
    nested = search(f"{END[:4]}{END}{END[4:]} <search> a </search>")
    assert read(nested, ANSWER)[1] == (None, 0, 1)


def test_what_is_over_the_limit_has_no_place() -> None:
    whole = encode(TOKENIZER, P, "Who is it ?", [search(), search(), ANSWER], 1000)
    assert not whole.is_cut
    for most in range(1, len(whole)):
        one = encode(TOKENIZER, P, "Who is it ?", [search(), search(), ANSWER], most)
        assert one.is_cut
        assert one.ids == whole.ids[:most]
        assert one.places == tuple(place for place in whole.places if place < most)
        assert len(one.turns) == len(one.places)


def test_a_placeholder_is_one_token() -> None:
    with pytest.raises(ValueError, match=r"conf/x: placeholder='so so': expected one token of the model's tokenizer"):
        placeholder_id(TOKENIZER, "so so", "conf/x")
