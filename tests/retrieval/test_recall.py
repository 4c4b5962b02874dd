"""The recall table, worked by hand."""

from __future__ import annotations

import pytest

from tasks.retrieval.recall import answered, recall_table
from tasks.types import Hit, Question


class Fixed:
    """Answers each query with listed passage ids; the text of passage `x` is `about x`."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        return [
            [Hit(i, 1.0 / (n + 1), f"Title {i}", f"about {i}") for n, i in enumerate(self.answers[q][:top_k])]
            for q in queries
        ]


def _question(
    number: int, dataset: str, gold: tuple[str, ...], complete: bool = True, answer: str = "no such"
) -> Question:
    return Question(
        id=f"{dataset}/{number}",
        dataset=dataset,
        split="test",
        question=f"{dataset} {number}",
        answers=(answer,),
        hops=2,
        gold_passage_ids=gold,
        gold_method="annotated" if gold else "none",
        gold_complete=complete,
    )


def test_by_hand():
    """Dataset a: question 1 has gold at ranks 1 and 4, question 2 has one of its golds at rank 9, the other nowhere.

    recall@3 = (1/2 + 0/2) / 2 = 0.25; @5 = (2/2 + 0) / 2 = 0.5; @10 = (1 + 1/2) / 2 = 0.75;
    all gold in 10: 1 of 2. Question 3 is left out: its gold is not complete.
    Dataset b has no labels: its answer "deer" stands at rank 4, so 0 of 2 at 3 and 1 of 2 at 5 and 10.
    """
    ranked = {
        "a 1": ["g1", "x", "y", "g2", "z"],
        "a 2": ["x", "y", "z", "u", "v", "w", "s", "t", "g3", "r"],
        "a 3": ["g1"],
        "b 1": ["x", "y", "reindeer", "deer", "z"],
        "b 2": ["x"],
    }
    questions = [
        _question(1, "a", ("g1", "g2")),
        _question(2, "a", ("g3", "g4"), answer="Title The Z!"),
        _question(3, "a", ("g1",), complete=False),
        _question(1, "b", (), complete=False, answer="The Deer"),
        _question(2, "b", (), complete=False),
    ]
    table = recall_table(questions, Fixed(ranked))
    assert table == {
        "a": {
            "num_questions": 2, "recall@3": 0.25, "recall@5": 0.5, "recall@10": 0.75, "all_gold@10": 0.5,
            "answer@3": 0.5, "answer@5": 0.5, "answer@10": 0.5,
        },
        "b": {"num_questions": 2, "answer@3": 0.0, "answer@5": 0.5, "answer@10": 0.5},
    }  # fmt: skip


def test_order_and_batches_do_not_matter():
    ranked = {f"a {i}": ["g"] if i % 3 else ["x"] for i in range(300)}
    questions = [_question(i, "a", ("g",)) for i in range(300)]
    table = recall_table(iter(questions), Fixed(ranked))
    assert table == recall_table(reversed(questions), Fixed(ranked))
    assert table["a"]["recall@3"] == pytest.approx(2 / 3, abs=1e-6)


def test_no_questions_no_rows():
    assert recall_table([], Fixed({})) == {}


def test_which_questions_find_their_answer():
    """The answer in the title or text of a passage among the first k; yes and no stand everywhere by chance."""
    ranked = {f"a {number}": ["x", "deer", "yes"] for number in range(5)}
    wanted = {0: "The Deer", 1: "Title X!", 2: "rein", 3: "yes", 4: "no such"}
    questions = [_question(number, "a", (), answer=answer) for number, answer in wanted.items()]
    assert answered(questions, Fixed(ranked), 3) == [questions[0], questions[1]]
    assert answered(questions, Fixed(ranked), 1) == [questions[1]]
