"""What the stage `train` hands a method besides its start policy, and what it says where data lacks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tasks.data.records import passage_row
from tasks.rl.method import Method
from tasks.stages.train import prepare
from tasks.store import DataError, write_jsonl
from tasks.types import Hop, Passage, Question
from tests.tiny import load_method

ROOT = Path(__file__).parents[2]
PASSAGES = [Passage(f"p{i}", f"Town {i}", f"Town {i} is ruled by Person {i}.") for i in range(4)]
HOPS = (
    Hop("Who rules Town 0?", "Person 0", "p0", ("Town 0 ruler",)),
    Hop("Who taught Person 0?", "Person 1", None, ()),
)


def question(number: int, gold: Sequence[str] = ("p0",)) -> Question:
    method = "annotated" if gold else "none"
    return Question(
        f"q{number}", "world", "train", f"Who {number}?", ("Person 1",), 2, decomposition=(Hop("#1 >> x", "y"),),
        gold_passage_ids=tuple(gold), gold_method=method,
    )  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "artifacts/data/corpus.jsonl", map(passage_row, PASSAGES))
    write_hops(tmp_path, {"q0": HOPS})
    return tmp_path


def write_hops(root: Path, found: dict[str, tuple[Hop, ...]]) -> None:
    from tasks.augment.records import hops_row

    write_jsonl(root / "artifacts/augment/hops.jsonl", (hops_row(name, hops) for name, hops in found.items()))


def method(name: str) -> Method:
    return load_method(name, "laptop")


def test_reference_queries_come_from_the_augmentation_and_texts_from_the_corpus(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [question(0), question(1, gold=())]
    found = prepare(method("stepsearch"), questions, root, "stepsearch")
    assert [q.decomposition for q in found.questions] == [HOPS, ()]
    assert [q.gold_passages for q in found.questions] == [(PASSAGES[0],), ()]
    assert found.missing == {"decomposition": 1, "queries": 1, "gold_passages": 1}
    printed = capsys.readouterr().out
    assert "1 of 2 training questions have no decomposition: these earn nothing by it" in printed
    assert "1 of 2 training questions have no gold_passages: these earn nothing by it" in printed


def test_a_gold_passage_that_the_corpus_does_not_have_is_missing(root: Path) -> None:
    found = prepare(method("stepsearch"), [question(0), question(1, gold=("elsewhere",))], root, "stepsearch")
    assert found.missing["gold_passages"] == 1


def test_a_method_without_such_needs_reads_neither(tmp_path: Path) -> None:
    questions = [question(0, gold=())]
    found = prepare(method("search_r1_grpo"), questions, tmp_path, "search_r1_grpo")  # Nothing is there to be read.
    assert found.questions == questions
    assert found.missing == {}


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("stepsearch", "decomposition"), ("stepsearch_ow_key", "decomposition"),
        ("stepsearch_ow_sub_answer", "decomposition"), ("stepsearch_ow_info_gain", "gold_passages"),
    ],
)  # fmt: skip
def test_data_without_what_a_reward_needs_is_an_error(root: Path, name: str, need: str) -> None:
    write_hops(root, {})
    with pytest.raises(DataError, match=rf"conf/method/{name}\.yaml: its rewards read {need} of training questions"):
        prepare(method(name), [question(0, gold=()), question(1, gold=())], root, name)


def test_reference_queries_that_are_all_empty_are_an_error(root: Path) -> None:
    write_hops(root, {"q0": (Hop("Who rules Town 0?", "Person 0"),)})
    with pytest.raises(DataError, match=r"stepsearch_ow_key\.yaml: its rewards read queries of training questions"):
        prepare(method("stepsearch_ow_key"), [question(0)], root, "stepsearch_ow_key")
    assert prepare(method("stepsearch_ow_sub_answer"), [question(0)], root, "x").missing == {"decomposition": 0}


def test_the_penalty_alone_needs_nothing(root: Path) -> None:
    """stepsearch pitfall 1: without gold passages P is as usual."""
    write_hops(root, {})
    found = prepare(method("stepsearch_ow_penalty"), [question(0, gold=())], root, "stepsearch_ow_penalty")
    assert found.missing == {}


def test_a_spoilt_row_of_the_augmentation_is_named(root: Path) -> None:
    (root / "artifacts/augment/hops.jsonl").write_text('{"question_id": "q0", "hops": [{"question": "#1 x"}]}\n')
    with pytest.raises(DataError, match=r"hops\.jsonl: row 1"):
        prepare(method("stepsearch"), [question(0)], root, "stepsearch")
