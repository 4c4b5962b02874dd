"""Text and logprobs from a model: one protocol, two generators.

`plain.py` (transformers, one prefill per prompt group, KV cache kept across turns) and `vllm.py` (fast
on GPUs, runs on CPU for tests). A generator knows tokens, stop strings and budgets; it knows nothing of
questions, tags, retrieval or rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy.

    Attributes:
        temperature: logits are divided by it; reported logprobs are those of the distribution at
            temperature 1 without top-p (what the trainer computes), greedy or not.
        top_p: nucleus mass; 1.0 keeps all.
        stop: a call ends right after the token that completes one of these strings.
        seed: with the call's position in the session it determines every draw (plain generator, one machine).
    """

    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Call:
    """What one call of the policy wrote: ids exactly as sampled, never re-tokenised.

    Attributes:
        token_ids: up to and including the token that completes a stop string; the end-of-text token is not included.
        logprobs: natural log, one per token, at temperature 1.
        stopped: a stop string was completed (False: end of text, or the token budget ran out).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


class Session(Protocol):
    """Rows that play several turns at once; row r belongs to prompt r // group_size, or continues a forked row.

    A session whose rows are all closed is closed. `num_prefilled` and `num_generated` count tokens the model read
    without sampling, and sampled.
    """

    num_prefilled: int
    num_generated: int

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        """Continue these rows, each until a stop string, end of text, or its own budget (at least 1)."""
        ...

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Add environment tokens (an observation) to these rows; read by the next `generate`."""
        ...

    def fork(self, row: int, times: int) -> list[int]:
        """`times` new rows that continue `row` from where it stands; `row` itself stays open.

        New rows take the next numbers. Their draws are those of rows with these numbers in a session that was opened
        with so many rows. What `row` has read is not read again, but for its newest token, which every row reads with
        its next draw.
        """
        ...

    def close(self, rows: Sequence[int]) -> None:
        """These rows are finished; their memory may be used again. Nothing but `close` may be asked of them."""
        ...


def not_open(row: int, num_rows: int, num_open: int) -> str:
    """The error of a request for a row that is closed or never was."""
    if not num_open:
        return f"row {row}: the session is closed, all its {num_rows} rows are. Open a new session."
    state = f"closed, {num_open} other rows are open" if 0 <= row < num_rows else "unknown"
    return f"row {row}: {state}. Expected an open row of 0 to {num_rows - 1}; fork or continue a row before closing it."


class Generator(Protocol):
    """A model that plays sessions, and takes new weights between them."""

    def open(
        self, prompts: Sequence[Sequence[int]], group_size: int, sampling: Sampling, max_total_tokens: int
    ) -> Session:
        """Start `len(prompts) * group_size` rows; prompt + response never exceed `max_total_tokens` per row."""
        ...

    def update_weights(self, folder: Path) -> None:
        """Load the policy saved in this model folder (same architecture); caches of old weights are dropped."""
        ...

    def shutdown(self) -> None:
        """Free the model and stop its processes, if any."""
        ...
