"""What a method trains on: hops and gold passages joined to questions, and what is said where data lacks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import inputs, methods
from tasks.data.records import passage_row
from tasks.inputs import join
from tasks.methods import loader
from tasks.store import DataError, write_jsonl
from tasks.types import Hop, Passage, Question

ROOT = Path(__file__).parents[1]
PASSAGES = [Passage(f"p{i}", f"Town {i}", f"Town {i} is ruled by Person {i}.") for i in range(4)]
HOPS = (
    Hop("Who rules Town 0?", "Person 0", "p0", ("Town 0 ruler",)),
    Hop("Who taught Person 0?", "Person 1", None, ()),
)


def question(number: int, gold: Sequence[str] = ("p0",), split: Any = "train") -> Question:
    method = "annotated" if gold else "none"
    return Question(
        f"q{number}", "world", split, f"Who {number}?", ("Person 1",), 2, decomposition=(Hop("#1 >> x", "y"),),
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


def joined(name: str, questions: list[Question], root: Path) -> inputs.Inputs:
    """As the stage `inputs` joins what a method of the house reads."""
    reads = methods.build(loader.load(name, "laptop", ROOT), None).reads
    found = join.join(questions, reads, "dev", root)
    join.check(found, f"conf/method/{name}.yaml")
    return found


def test_hops_come_from_the_augmentation_and_gold_passages_from_the_corpus(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = joined("stepsearch", [question(0), question(1, gold=()), question(2, split="dev")], root)
    assert [q.decomposition for q in found.training] == [HOPS, ()]
    assert [q.gold_passages for q in found.training] == [(PASSAGES[0],), ()]
    assert found.missing == {"decomposition": 1, "queries": 1, "gold_passages": 1}
    assert found.validation == [replace(question(2, split="dev"), decomposition=())]
    printed = capsys.readouterr().out
    assert "1 of 2 training questions have no decomposition: these earn no reward for it" in printed
    assert "1 of 2 training questions have no gold_passages: these earn no reward for it" in printed


def test_a_gold_passage_that_the_corpus_does_not_have_is_missing(root: Path) -> None:
    found = joined("stepsearch", [question(0), question(1, gold=("elsewhere",))], root)
    assert found.missing["gold_passages"] == 1


def test_gold_passages_keep_the_order_of_their_ids(root: Path) -> None:
    found = joined("stepsearch", [question(0, gold=("p3", "elsewhere", "p1"))], root)
    assert found.training[0].gold_passages == (PASSAGES[3], PASSAGES[1])


def test_what_a_method_does_not_read_is_not_there_and_no_file_is_opened(tmp_path: Path) -> None:
    found = joined("search_r1_grpo", [question(0)], tmp_path)
    assert found.training == [replace(question(0), decomposition=())]
    assert found.missing == {}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("stepsearch", "decomposition"), ("stepsearch_ow_key", "decomposition"),
        ("stepsearch_ow_sub_answer", "decomposition"), ("stepsearch_ow_info_gain", "gold_passages"),
    ],
)  # fmt: skip
def test_data_without_what_a_reward_reads_is_an_error(root: Path, name: str, field: str) -> None:
    write_hops(root, {})
    with pytest.raises(DataError, match=rf"conf/method/{name}\.yaml: its rewards read {field} of training questions"):
        joined(name, [question(0, gold=()), question(1, gold=())], root)


def test_reference_queries_that_are_all_empty_are_an_error(root: Path) -> None:
    write_hops(root, {"q0": (Hop("Who rules Town 0?", "Person 0"),)})
    with pytest.raises(DataError, match=r"stepsearch_ow_key\.yaml: its rewards read queries of training questions"):
        joined("stepsearch_ow_key", [question(0)], root)
    assert joined("stepsearch_ow_sub_answer", [question(0)], root).missing == {"decomposition": 0}


def test_the_penalty_alone_reads_nothing(root: Path) -> None:
    """Without gold passages P is as usual."""
    write_hops(root, {})
    assert joined("stepsearch_ow_penalty", [question(0, gold=())], root).missing == {}


def test_inputs_come_back_as_they_were_written(root: Path, tmp_path: Path) -> None:
    odd = replace(question(1), question="Who\u2028rules \U0001f600?", answers=("a", "B"), type="bridge")
    found = joined("stepsearch", [question(0), odd, question(2, split="dev")], root)
    inputs.write(found, tmp_path / "out")
    assert inputs.read(tmp_path / "out") == found


def test_a_row_that_was_spoilt_is_named(root: Path, tmp_path: Path) -> None:
    inputs.write(joined("stepsearch", [question(0)], root), tmp_path / "out")
    path = tmp_path / "out" / "training.jsonl"
    path.write_text(path.read_text().replace('"split":"train"', '"split":"trian"'))
    with pytest.raises(DataError, match=r"training\.jsonl: row 1: split: found 'trian'"):
        inputs.read(tmp_path / "out")


def test_a_spoilt_row_of_the_augmentation_is_named(root: Path) -> None:
    (root / "artifacts/augment/hops.jsonl").write_text('{"question_id": "q0", "hops": [{"question": "#1 x"}]}\n')
    with pytest.raises(DataError, match=r"hops\.jsonl: row 1"):
        joined("stepsearch", [question(0)], root)
