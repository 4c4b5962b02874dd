"""The settings of `conf/reader/<name>.yaml`: a reader that is trained here. Loads no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveInt

from tasks.base.fit import PhaseConf
from tasks.base.settings import TinyConf
from tasks.conf import Share, require
from tasks.reader.reading import Habits

KINDS = ("last", "chain", "noisy", "missing")


@dataclass(frozen=True)
class EvidenceConf:
    """How often each kind of evidence is shown; the shares sum to 1.

    Attributes:
        last: the passage that holds the answer.
        chain: the passages of all hops, in order.
        noisy: the passage that holds the answer among others.
        missing: other passages only; the right answer is `unknown`.
        num_others: most passages of other questions in noisy and missing evidence.
    """

    last: Share
    chain: Share
    noisy: Share
    missing: Share
    num_others: PositiveInt

    def __post_init__(self) -> None:
        total = sum(getattr(self, kind) for kind in KINDS)
        require(abs(total - 1) < 1e-6, "evidence", total, f"shares of {', '.join(KINDS)} that sum to 1")


@dataclass(frozen=True)
class ReaderConf:
    """One file of `conf/reader/`: a Llama-architecture model, made from random weights.

    Attributes:
        architecture: its size.
        habits: its prompt and the length of its answers.
        num_threads, checkpoint_every, max_batch_tokens: as for the start policy.
        recall: the first phase, which repeats shuffled token segments.
        read: the second phase, which answers from evidence.
        evidence: the kinds of evidence.
        unknown: the right answer where evidence holds none.
        check_every: steps of the second phase between measurements of held-out accuracy.
        num_held_out: held-out questions of such a measurement.
        enough: accuracy at which training ends.
        patience: measurements in a row without a better accuracy after which it ends, too.
    """

    architecture: TinyConf
    habits: Habits
    num_threads: PositiveInt
    checkpoint_every: PositiveInt
    max_batch_tokens: PositiveInt
    recall: PhaseConf
    read: PhaseConf
    evidence: EvidenceConf
    unknown: Annotated[str, Field(min_length=1)]
    check_every: PositiveInt
    num_held_out: PositiveInt
    enough: Share
    patience: PositiveInt
