"""Both sides of an RL step write the same calls: the model computes and draws every token, then the script decides it.

A pretrained model that nobody has taught the tool does not call it, and a step without searches is a cheap one. A
taught one would write another number of tokens on each side. With a script both sides search as often and write as
much, token by token; what a token costs does not depend on which one it is. A script holds, for each prompt and each
of its rollouts, the ids of its calls, end-of-turn token included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator, PlainSession
from tasks.store import read_jsonl, write_jsonl

FILE = "script.jsonl"
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Script:
    """`calls[prompt][copy][turn]` is what rollout `copy` of a prompt writes in that turn."""

    calls: dict[Ids, tuple[tuple[Ids, ...], ...]]

    def write(self, folder: Path) -> None:
        """Save it beside the policy."""
        write_jsonl(folder / FILE, ({"prompt": prompt, "calls": calls} for prompt, calls in self.calls.items()))

    @staticmethod
    def read(folder: Path) -> Script | None:
        """The script of a prepared folder; None where the policy itself decides."""
        if not (folder / FILE).is_file():
            return None
        rows = (row for _, row in read_jsonl(folder / FILE))
        return Script(
            {tuple(row["prompt"]): tuple(tuple(map(tuple, rollout)) for rollout in row["calls"]) for row in rows}
        )


class ScriptedGenerator(PlainGenerator):
    """The plain generator, whose draws are replaced by those of a script."""

    script: Script

    def open(
        self, prompts: Sequence[Sequence[int]], copies: int, sampling: Sampling, max_total_tokens: int
    ) -> PlainSession:
        """See `Generator.open`."""
        return ScriptedSession(self, prompts, copies, sampling, max_total_tokens)


class ScriptedSession(PlainSession):
    """It draws as its base class does, so that a draw costs what it costs, and then takes the token of the script."""

    def __init__(
        self,
        owner: ScriptedGenerator,
        prompts: Sequence[Sequence[int]],
        copies: int,
        sampling: Sampling,
        max_total_tokens: int,
    ) -> None:
        self.lines = [owner.script.calls[tuple(prompt)][copy] for prompt in prompts for copy in range(copies)]
        self.turns = [0] * len(self.lines)
        super().__init__(owner, prompts, copies, sampling, max_total_tokens)

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """See `Session.append`."""
        super().append(rows, token_ids)
        for row in rows:
            self.turns[row] += 1

    def _sample(self, logits: Tensor, rows: list[int]) -> tuple[list[int], list[float]]:
        import torch

        super()._sample(logits, rows)
        tokens = [self.lines[row][self.turns[row]][len(self.written[row])] for row in rows]
        places = torch.tensor(tokens, device=logits.device)[:, None]
        return tokens, logits.log_softmax(-1).gather(-1, places)[:, 0].tolist()


class Prompter:
    """Tells a batch of `generate` what to write: a processor of logits for each call of it.

    TRL gives every call the whole text of its rows, left-padded. A row continues the rollout whose text it begins with;
    rollouts with equal texts are interchangeable.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.texts: list[Ids] = []
        self.lines: list[tuple[Ids, ...]] = []
        self.turns: list[int] = []

    def processor(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """The processor of one call, which decides each token of each row."""
        rows = [tuple(ids[mask.bool()].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        if all(row in self.script.calls for row in rows):
            self._start(rows)
        found = list(self._rollouts(rows))
        lines = [self.lines[rollout][self.turns[rollout]] for rollout in found]
        for row, rollout, line in zip(rows, found, lines, strict=True):
            self.texts[rollout] = row + line
            self.turns[rollout] += 1
        return _Deciding(lines, input_ids.shape[1])

    def _start(self, prompts: list[Ids]) -> None:
        """A new rollout batch: the n-th row of a prompt plays its n-th rollout."""
        seen: dict[Ids, int] = {}
        self.texts, self.turns, self.lines = list(prompts), [0] * len(prompts), []
        for prompt in prompts:
            self.lines.append(self.script.calls[prompt][seen.get(prompt, 0)])
            seen[prompt] = seen.get(prompt, 0) + 1

    def _rollouts(self, rows: list[Ids]) -> Iterator[int]:
        free = set(range(len(self.texts)))
        for row in rows:
            fitting = [i for i in sorted(free) if row[: len(self.texts[i])] == self.texts[i]]
            if not fitting:
                raise ValueError("a row continues no rollout of the script: the peer has changed a text it was given.")
            free.remove(fitting[0])
            yield fitting[0]


class _Deciding:
    """Makes one token of each row certain; the draw itself stays. A row that has ended gets any token."""

    def __init__(self, lines: list[Ids], prompt: int) -> None:
        longest = max(map(len, lines))
        self.prompt = prompt
        self.tokens = np.array([[*line, *[line[-1]] * (longest - len(line))] for line in lines])  # [rows, longest]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        import torch

        tokens = torch.from_numpy(self.tokens[:, input_ids.shape[1] - self.prompt])
        return scores.scatter(1, tokens.to(scores.device)[:, None], 1e9)
