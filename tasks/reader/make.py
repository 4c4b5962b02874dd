"""Trains a tiny Llama-architecture model to answer from evidence: random weights -> recall -> reading.

It learns on training questions alone, and its accuracy is measured on others. Training ends early once that accuracy is
high enough or no longer rises. It is another family than the policy: another architecture, tokenizer and training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks import text
from tasks.base.demonstrations import Example
from tasks.base.fit import Fit, PhaseConf, supervision
from tasks.base.make import recall_examples, sizes
from tasks.base.settings import TinyConf
from tasks.base.tokenizer import build_tokenizer
from tasks.reader.examples import Exercise, Exercises, usable
from tasks.reader.reading import Reading, filled
from tasks.reader.settings import KINDS, ReaderConf
from tasks.store import DataError
from tasks.supervised import Divides, opened
from tasks.types import Passage, Question

_BATCH = 64


@dataclass
class MadeReader:
    """A trained reader.

    Attributes:
        model, tokenizer: of its folder.
        history: the record of its training.
        quality: what the card prints: accuracy on held-out questions by kind of evidence, steps, questions.
    """

    model: Any
    tokenizer: Any
    history: list[dict[str, Any]]
    quality: dict[str, Any]


class ReaderFit(Fit):
    """Supervised training that ends early by its held-out accuracy, which stands in `history`.

    Args:
        conf: settings of the reader.
        accuracy: measures the model as it is.
        rest: those of `Fit`.
    """

    def __init__(self, conf: ReaderConf, accuracy: Callable[[], float], *rest: Any) -> None:
        super().__init__(*rest)
        self.conf, self.accuracy = conf, accuracy

    def _done(self, conf: PhaseConf) -> bool:
        if conf is not self.conf.read:
            return super()._done(conf)
        measured = [row for row in self.history if "accuracy" in row["metrics"]]
        is_due = self.phase_step and self.phase_step % self.conf.check_every == 0
        if is_due and not (measured and measured[-1]["step"] == self.step):
            self.learner.bring_back()
            self.model.eval()
            measured.append({"step": self.step, "metrics": {"accuracy": self.accuracy()}})
            self.model.train()
            self.history.append(measured[-1])
            self.log(self.step, measured[-1]["metrics"])
        return is_over([row["metrics"]["accuracy"] for row in measured], self.conf.enough, self.conf.patience)


def is_over(accuracies: Sequence[float], enough: float, patience: int) -> bool:
    """Whether training ends: the last accuracy is high enough, or the last `patience` were none better.

    >>> is_over([0.2, 0.5, 0.4], 0.9, 2), is_over([0.2, 0.5, 0.4, 0.5], 0.9, 2), is_over([0.95], 0.9, 2)
    (False, True, True)
    """
    if not accuracies:
        return False
    best = max(accuracies)
    return accuracies[-1] >= enough or len(accuracies) - 1 - accuracies.index(best) >= patience


def make_reader(
    conf: ReaderConf,
    questions: Sequence[Question],
    held_out_split: str,
    passages: Mapping[str, Passage],
    seed: int,
    scratch: Path,
    log: Callable[[int, dict[str, float]], None],
    engine: Divides | None = None,
) -> MadeReader:
    """Train a reader on the questions of split `train`; continues from `scratch` after a kill, exactly.

    Args:
        conf: settings.
        questions: of all splits, with gold passages.
        held_out_split: split of the questions that measure it.
        passages: of the corpus, by id.
        seed: of weights, exercises and batches.
        scratch: checkpoints.
        log: receives (step, metrics).
        engine: divides the training among processes; None is this process.

    Raises:
        DataError: too few questions have gold passages.
    """
    training = _with_gold(questions, "train", passages)
    held_out = _with_gold(questions, held_out_split, passages)
    tokenizer = build_tokenizer(_texts(training, passages, conf), conf.architecture.max_vocab, ())
    model = new_model(conf.architecture, tokenizer, seed)
    reading = Reading(model, tokenizer, conf.habits, conf.architecture.max_positions, _BATCH)
    test = Exercises(held_out, passages, conf.evidence, conf.unknown).draw(conf.num_held_out, f"{held_out_split}")

    def measured() -> float:
        return accuracy(reading, test)["all"]

    words = range(256, tokenizer.vocab_size)
    drawn = Exercises(training, passages, conf.evidence, conf.unknown)

    def batch(step: int) -> list[Example]:
        exercises = drawn.draw(conf.read.batch, f"{seed}/read/{step}")
        return [example(reading, exercise) for exercise in exercises]

    with opened(model, supervision(), engine) as learner:
        fit = ReaderFit(conf, measured, learner, scratch, conf.checkpoint_every, conf.max_batch_tokens, log)
        fit.run("recall", conf.recall, lambda step: recall_examples(f"{seed}/reader/{step}", conf.recall.batch, words))
        fit.run("read", conf.read, batch)

    model.eval()
    quality = {
        "held_out_accuracy": accuracy(reading, test), "num_held_out": len(test), "steps": fit.step,
        "num_training_questions": len(training),
    }  # fmt: skip
    return MadeReader(model, tokenizer, fit.history, quality)


def accuracy(reading: Reading, exercises: Sequence[Exercise]) -> dict[str, float]:
    """Share of exactly right answers: `all`, and by kind of evidence."""
    replies = reading.answers([(one.question, one.evidence) for one in exercises])
    right = [text.exact_match(reply, [one.answer]) for reply, one in zip(replies, exercises, strict=True)]
    found = {"all": sum(right) / len(right)}
    for kind in KINDS:
        of_kind = [value for value, one in zip(right, exercises, strict=True) if one.kind == kind]
        if of_kind:
            found[kind] = sum(of_kind) / len(of_kind)
    return found


def example(reading: Reading, exercise: Exercise) -> Example:
    """An exercise as prompt and trained answer, which ends the text."""
    prompt = reading.prompt_ids(exercise.question, exercise.evidence)
    answer = [*reading.tokenizer.encode(f" {exercise.answer}"), reading.tokenizer.eos_token_id]
    return Example(tuple(prompt), tuple(answer), (True,) * len(answer))


def new_model(architecture: TinyConf, tokenizer: Any, seed: int) -> Any:
    """A Llama causal LM with random weights that depend on the seed only."""
    from tasks.pretrained import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes(architecture, tokenizer)))


def _with_gold(questions: Sequence[Question], split: str, passages: Mapping[str, Passage]) -> list[Question]:
    found = usable([question for question in questions if question.split == split], passages)
    if not found:
        raise DataError(
            f"questions.jsonl: no question of split {split!r} has a gold passage in the corpus that holds its answer, "
            "and a reader is trained on such passages. Take a reader that is a given model folder (conf/service)."
        )
    return found


def _texts(questions: Sequence[Question], passages: Mapping[str, Passage], conf: ReaderConf) -> Iterator[str]:
    """Text as the reader will meet it, so that words get a token both with and without a space before them."""
    for passage in passages.values():
        yield f" {passage.text}"
        yield passage.title
    for question in questions:
        yield filled(conf.habits.prompt, question.question, "")
        yield f" {question.answers[0]} {conf.unknown}"
