"""Near-duplicate questions: which pairs are found, that none is missed, and that odd data takes no quadratic time."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.data import near
from tasks.data.ingest import FolderConf, ingest
from tasks.data.near import LIKENESS, Texts
from tasks.data.notes import notes, shared_hops
from tasks.text import normalize
from tasks.types import Question
from tests.data.rows import Row, question

Asked = tuple[str, str]


def _texts(asked: Sequence[Asked]) -> Texts:
    texts = Texts()
    for text, answer in asked:
        row = Question(id="q", dataset="d", split="dev", question=text, answers=(answer, "---"), hops=1)
        texts.add(normalize(text).encode(), row)
    return texts


def _found(asked: Sequence[Asked]) -> set[frozenset[str]]:
    return {frozenset(key.decode() for key in pair) for pair in _texts(asked).pairs()}


# Templates of public benchmarks, so that their words are frequent and names are not.
NAMES = ["Alien", "Heat", "Brazil", "Casablanca", "Vertigo", "Psycho", "Rashomon", "Metropolis", "Solaris", "Stalker"]
OTHERS: list[Asked] = [
    *((f"Who was the director of {name}?", f"director {i}") for i, name in enumerate(NAMES)),
    *((f"When did the film {name} first come out?", f"year {i}") for i, name in enumerate(NAMES)),
    *((f"Who wrote the music of the film {name}?", "the same composer") for name in NAMES),
]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("When did the ouija board first come out?", "when did the film ouija board come out"),
        ("Who wrote the music of the Phantom of the Opera", "who wrote the phantom of the opera music"),
        ("Who was director of the character Moll Flanders?", "Who was the first director of character Moll Flanders ?"),
    ],
)
def test_questions_that_are_worded_nearly_alike_are_found(one: str, other: str) -> None:
    asked = [*OTHERS, (one, "It."), (other, "it")]
    assert _found(asked) == {frozenset((normalize(one), normalize(other)))}
    assert _found([*OTHERS, (one, "it"), (other, "something else")]) == set()  # Another answer, another question.


def test_questions_of_one_template_are_different_questions() -> None:
    assert _found(OTHERS) == set()
    assert _found([*OTHERS, ("Who was the director of Ran?", "director 1")]) == set()  # As Heat's, with its answer.


def _weights(texts: Collection[str]) -> dict[str, int]:
    count = Counter(word for text in texts for word in set(text.split()))
    return {word: round(1000 * math.log(1 + len(texts) / number)) for word, number in count.items()}


def _likeness(one: str, other: str, weight: dict[str, int]) -> float:
    """The definition, without any index."""
    first, second = set(one.split()), set(other.split())
    return sum(weight[word] for word in first & second) / max(1, sum(weight[word] for word in first | second))


@pytest.mark.parametrize("seed", range(5))
def test_no_pair_is_missed_or_made_up(seed: int) -> None:
    rng = random.Random(seed)
    words = [f"w{int(rng.paretovariate(0.4)) % 300}" for _ in range(400)]
    asked = [(" ".join(rng.sample(words, rng.randint(1, 8))), rng.choice("xyz")) for _ in range(150)]
    asked += [(f"{text} w{rng.randint(0, 300)}", rng.choice("xyz")) for text, _ in asked]
    answers: dict[str, set[str]] = {}
    for text, answer in asked:
        answers.setdefault(text, set()).add(answer)
    weights = _weights(answers)
    expected = {
        frozenset(pair)
        for pair in itertools.combinations(answers, 2)
        if answers[pair[0]] & answers[pair[1]] and _likeness(*pair, weights) >= LIKENESS
    }
    assert len(expected) > 10
    assert _found(asked) == expected
    rng.shuffle(asked)
    assert [*_texts(asked).pairs()] == [*_texts(sorted(asked)).pairs()]


def test_time_stays_bounded_where_all_questions_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "MOST_COMPARED", 5)
    rng = random.Random(0)
    texts = _texts([(" ".join(f"w{rng.randrange(40)}" for _ in range(6)), "it") for _ in range(2000)])
    compared: list[bytes] = []
    monkeypatch.setattr(texts, "_answers", _Counting(texts._answers, compared))
    list(texts.pairs())
    assert len(compared) < 2000 * (1 + 5 * 6)  # Its own answers, and those of 5 others for each of its words.
    assert texts.num_left_out > 0


class _Counting(dict[bytes, set[int]]):
    def __init__(self, answers: dict[bytes, set[int]], compared: list[bytes]) -> None:
        super().__init__(answers)
        self.compared = compared

    def __getitem__(self, key: bytes) -> set[int]:
        self.compared.append(key)
        return super().__getitem__(key)


def _near_rows() -> list[Row]:
    """Twenty questions of one template, and two pairs of near-duplicates: across splits, and in one."""
    rows = [question(n, question=f"Who was the mayor of city{n}?") for n in range(20)]
    pairs = [("When did the ouija board first come out?", "when did the ouija board game come out")]
    pairs += [("Who sang the anthem at Wembley stadium?", "who sang the anthem at the old Wembley stadium")]
    for number, (one, other) in enumerate(pairs):
        rows.append(question(30 + number, question=one, answers=["July 1890"], split="train"))
        rows.append(question(40 + number, question=other, answers=["july 1890"], split=("dev", "train")[number]))
    return rows


def test_near_duplicates_are_counted_and_stay_where_they_were_published(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    rows = _near_rows()
    for leakage in ("error", "drop_train"):
        manifest = ingest(make_folder(rows), tmp_path / "out", FolderConf(leakage=leakage))  # type: ignore[arg-type]
        assert manifest["near_duplicates"] == {
            "likeness": LIKENESS,
            "pairs": 2,
            "pairs_across_splits": {"dev and train": 1},
            "train_rows_near_evaluation": 1,
            "examples": [["d/30", "d/40"]],
            "comparisons_left_out": 0,
        }
        assert sum(row["rows"] for row in manifest["questions"].values()) == len(rows)


def _hops(*texts: str) -> list[dict[str, Any]]:
    return [{"question": text, "answer": f"Answer {n}", "support_passage_id": None} for n, text in enumerate(texts, 1)]


def test_sub_questions_that_training_and_evaluation_share_are_counted(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    first, last = "Who made the clock?", "Where was #1 born?"
    rows = [
        question(0, decomposition=_hops(first, last), split="train"),
        question(1, question="Who built it?", answers=["Answer 1"], split="train"),  # Its own sub-question.
        question(2, decomposition=_hops(first, "Where was ANSWER 1 born"), split="test"),  # All.
        question(3, decomposition=_hops("Who wound the clock?", last), split="dev"),  # The last one.
        question(4, decomposition=_hops("Who built it?", "When did #1 die?"), split="test"),  # Not the last one.
        question(5, decomposition=_hops("Who is he?", first), split="test"),  # With another answer.
        question(6, split="test"),
    ]
    manifest = ingest(make_folder(rows), tmp_path / "out")
    assert manifest["sub_questions"] == {"evaluation_rows": 4, "last_in_training": 2, "all_in_training": 1}
    (told,) = shared_hops(manifest)
    assert told in notes(manifest)
    assert told.startswith("Of 4 evaluation questions with sub-questions, 2 have their last one, ")
    assert shared_hops(ingest(make_folder(rows[4:] + rows[:1]), tmp_path / "other")) == []
