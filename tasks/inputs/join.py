"""Joins to questions what rewards read: hops resolved by the augmentation, and gold passages of the corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tasks.augment.records import read_hops
from tasks.data.records import read_passages
from tasks.inputs import Inputs
from tasks.store import DataError
from tasks.types import Hop, Passage, Question

HOPS, CORPUS = Path("artifacts/augment/hops.jsonl"), Path("artifacts/data/corpus.jsonl")


def join(questions: Sequence[Question], reads: Sequence[str], validation_split: str, root: Path) -> Inputs:
    """Join the fields that `reads` names to the training questions, and remove all others from all questions.

    Raises:
        DataError: a row of the hops or of the corpus breaks its schema.
    """
    training = [replace(question, decomposition=()) for question in questions if question.split == "train"]
    validation = [replace(question, decomposition=()) for question in questions if question.split == validation_split]

    if "decomposition" in reads or "queries" in reads:
        hops = read_hops(root / HOPS)
        training = [replace(question, decomposition=hops.get(question.id, ())) for question in training]
    if "gold_passages" in reads:
        passages = _gold_passages(training, root / CORPUS)
        training = [replace(question, gold_passages=_present(question, passages)) for question in training]

    return Inputs(training, validation, {name: sum(map(LACKS[name], training)) for name in reads})


def check(inputs: Inputs, where: str) -> None:
    """Print how many training questions lack a field, and refuse data in which all lack it.

    Args:
        inputs: of one method.
        where: the file that describes the method, for messages.

    Raises:
        DataError: no training question has a field that a reward reads.
    """
    total = len(inputs.training)
    for name, count in inputs.missing.items():
        if total and count == total:
            source = CORPUS.parent if name == "gold_passages" else HOPS
            why = "" if name == "gold_passages" else " (what was rejected, and why, is in rejected.jsonl beside it)"
            raise DataError(
                f"{where}: its rewards read {name} of training questions, and none of the {count} has any in "
                f"{source}{why}. Train it on data that has them (the generated world, MuSiQue)."
            )
        if count:
            print(f"{count} of {total} training questions have no {name}: these earn no reward for it", flush=True)


def _gold_passages(questions: Sequence[Question], corpus: Path) -> dict[str, Passage]:
    gold_ids = {name for question in questions for name in question.gold_passage_ids}
    return {passage.id: passage for passage in read_passages(corpus) if passage.id in gold_ids}


def _present(question: Question, passages: Mapping[str, Passage]) -> tuple[Passage, ...]:
    return tuple(passages[name] for name in question.gold_passage_ids if name in passages)


def _has_queries(hops: Sequence[Hop]) -> bool:
    return any(hop.queries for hop in hops)


LACKS = {
    "decomposition": lambda question: not question.decomposition,
    "queries": lambda question: not _has_queries(question.decomposition),
    "gold_passages": lambda question: not question.gold_passages,
}
"""Field that rewards read -> whether a question lacks it."""
