"""Answers questions from evidence with a causal language model of any architecture, greedily.

Evidence is data: neither special tokens nor tags in it can act. A prompt that is longer than the model's window loses
the end of its evidence. Pairs of one call are read in batches of equal make-up, whatever was read before them, so that
a run that is killed and resumed gets the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tasks import store
from tasks.agent.grammar import SearchGrammar
from tasks.conf import require
from tasks.model import Dtype, computes_in, load_policy, pick_device
from tasks.store import DataError

QUESTION, EVIDENCE = "{question}", "{evidence}"
HABITS = "reading.json"
"""File of a model folder that holds the prompt which its model was trained with."""
Pair = tuple[str, str]
"""A question and its evidence."""


@dataclass(frozen=True)
class Habits:
    """What a model reads and writes.

    Attributes:
        prompt: text with {question} and {evidence}.
        max_new_tokens: most tokens of an answer.
    """

    prompt: str
    max_new_tokens: int

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")


def check_prompt(prompt: str) -> None:
    """Raise the ValueError for a prompt without exactly one place for the question and one for the evidence."""
    for place in (QUESTION, EVIDENCE):
        require(prompt.count(place) == 1, "prompt", f"{prompt[:40]}...", f"text with {place} once")


def filled(prompt: str, question: str, evidence: str) -> str:
    """The prompt with question and evidence; a placeholder inside either of them stays text.

    >>> filled("{evidence} Question: {question}", "Who is {evidence}?", "A text.")
    'A text. Question: Who is {evidence}?'
    """
    first, second = sorted((QUESTION, EVIDENCE), key=prompt.index)
    head, _, rest = prompt.partition(first)
    middle, _, tail = rest.partition(second)
    values = {QUESTION: question, EVIDENCE: evidence}
    return head + values[first] + middle + values[second] + tail


@dataclass
class Reading:
    """A model that reads.

    Attributes:
        model, tokenizer: of a model folder; the model is never trained here.
        habits: its prompt and the length of its answers.
        window: most tokens of prompt and answer together.
        batch: pairs that are read at once.
    """

    model: Any
    tokenizer: Any
    habits: Habits
    window: int
    batch: int
    num_tokens: int = 0
    _inert: SearchGrammar = field(init=False)

    def __post_init__(self) -> None:
        self._inert = SearchGrammar(opening="", closing="", document_format="{text}").fitted(self.tokenizer)
        expected = f"more than max_new_tokens={self.habits.max_new_tokens}"
        require(self.window > self.habits.max_new_tokens, "window", self.window, expected)

    def batches(self, pairs: Sequence[Pair]) -> Iterator[tuple[list[Pair], list[str]]]:
        """Pairs with their answers, in batches of similar length; each answer is the model's whole reply, stripped.

        Raises:
            DataError: a question alone is longer than the model's window.
        """
        prompts = {pair: self.prompt_ids(*pair) for pair in pairs}
        ordered = sorted(prompts, key=lambda pair: (len(prompts[pair]), pair))
        for first in range(0, len(ordered), self.batch):
            chunk = ordered[first : first + self.batch]
            yield chunk, self._answers([prompts[pair] for pair in chunk])

    def answers(self, pairs: Sequence[Pair]) -> list[str]:
        """The answer of each pair, in order."""
        found: dict[Pair, str] = {}
        for chunk, replies in self.batches(pairs):
            found.update(zip(chunk, replies, strict=True))
        return [found[pair] for pair in pairs]

    def prompt_ids(self, question: str, evidence: str) -> list[int]:
        """Token ids of the prompt, in the tokenizer's chat template where it has one; evidence is cut at its end.

        Raises:
            DataError: the question alone does not fit.
        """
        room = self.window - self.habits.max_new_tokens
        question, evidence = self._inert.neutralize(question), self._inert.neutralize(evidence)
        ids = self._encode(question, evidence)
        if len(ids) <= room:
            return ids

        # Whoever cuts ids may cut a character; whoever cuts text may need more tokens than were counted.
        whole = list(self.tokenizer.encode(evidence, add_special_tokens=False))
        kept = len(whole) - (len(ids) - room)
        while kept > 0:
            cut = self.tokenizer.decode(whole[:kept], skip_special_tokens=False).rstrip("\ufffd")
            ids = self._encode(question, cut)
            if len(ids) <= room:
                return ids
            kept -= max(1, len(ids) - room)
        ids = self._encode(question, "")
        if len(ids) > room:
            raise DataError(
                f"the reader's prompt for question {question[:60]!r} has {len(ids)} tokens without evidence, expected "
                f"at most {room}. Shorten the question or the prompt, or take a reader with a wider window."
            )
        return ids

    def _encode(self, question: str, evidence: str) -> list[int]:
        text = filled(self.habits.prompt, question, evidence)
        if getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return list(self.tokenizer.encode(text))

    @torch.inference_mode()
    def _answers(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Greedy replies to prompts, padded on their left."""
        width = max(map(len, prompts))
        padding = self._padding
        rows = [[padding] * (width - len(ids)) + list(ids) for ids in prompts]
        seen = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        device = self.model.device
        written = self.model.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(seen, device=device),
            max_new_tokens=self.habits.max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=padding,
            temperature=None,
            top_p=None,
            top_k=None,
        )[:, width:]
        self.num_tokens += sum(map(len, prompts)) + int(written.numel())
        return [self.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in written.tolist()]

    @property
    def _padding(self) -> int:
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)


def open_folder(folder: Path, habits: Habits | None, window: int | None, batch: int, dtype: Dtype = "auto") -> Reading:
    """The reader of a model folder.

    Args:
        folder: any causal language model of transformers, with its tokenizer.
        habits: None takes those that the folder itself has.
        window: most tokens of prompt and answer; None takes the model's own.
        batch: pairs that are read at once.
        dtype: of the forward passes.

    Raises:
        DataError: no model folder, or one that says nothing of its prompt.
    """
    where = pick_device()
    model, tokenizer = load_policy(folder, computes_in(dtype, where))
    widest = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    window = min(window, widest) if window and widest else window or widest
    return Reading(model.to(where), tokenizer, habits or habits_of(folder), window, batch)


def habits_of(folder: Path) -> Habits:
    """The prompt that a model was trained with.

    Raises:
        DataError: the folder has none.
    """
    from tasks import conf

    path = folder / HABITS
    if not path.is_file():
        raise DataError(f"{path}: the file is missing. Name the model's prompt and max_new_tokens in conf/service.")
    return conf.fill(Habits, store.read_json(path), str(path))
