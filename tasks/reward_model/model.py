"""A reward model in memory: a causal language model with a scalar head, read at the places of packed trajectories.

It is stored as transformers stores a sequence classifier with one label: an ordinary model folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.model import load_tokenizer, loaded
from tasks.reward_model.card import READING, Card, read_card
from tasks.reward_model.reading import Encoded
from tasks.store import DataError


def load(folder: Path, is_new: bool) -> tuple[Any, Any]:
    """A model folder as (reward model, tokenizer), on the CPU; of a new one the head is 0, so that every f is 0.5.

    Raises:
        DataError: the folder lacks a configuration, weights or a tokenizer, or one cannot be loaded; or it is no
            reward model and has to be one.
    """
    from transformers.utils import logging

    from tasks.pretrained import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(folder)
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True, "num_labels": 1}
    options["trust_remote_code"] = False  # Code of a folder is never run.
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # A new head is no news.
    try:
        model, report = loaded(
            folder,
            "configuration and weights",
            lambda: AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True, **options),
        )
    finally:
        logging.set_verbosity(before)
    if is_new:
        torch.nn.init.zeros_(model.score.weight)
    elif missing := sorted(report["missing_keys"]):
        raise DataError(
            f"{folder}: found no weights {', '.join(missing[:3])}, expected all of a reward model with one number at "
            "its end. Its scores would be made up; copy or train the model again."
        )
    return model.eval(), tokenizer


def opened(folder: Path) -> tuple[Any, Any, Card]:
    """A stored reward model as (model, tokenizer, how it reads), on the CPU.

    Raises:
        DataError: see `load`; or the card names another placeholder than the tokenizer has.
    """
    card = read_card(folder)
    model, tokenizer = load(folder, is_new=False)
    if tokenizer.convert_tokens_to_ids(card.placeholder) != card.placeholder_id:
        raise DataError(
            f"{folder / READING}: placeholder={card.placeholder!r}: found placeholder_id={card.placeholder_id}, "
            f"expected {tokenizer.convert_tokens_to_ids(card.placeholder)}, its token in the tokenizer. Copy "
            "or train the model again."
        )
    return model, tokenizer, card


def packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of trajectories that are read together, in order; each at most `max_tokens`, or one longer trajectory.

    >>> packs([3, 4, 9, 2], 8)
    [[0, 1], [2], [3]]
    """
    rows: list[list[int]] = []
    filled = 0
    for number, length in enumerate(lengths):
        if not rows or filled + length > max_tokens:
            rows.append([])
            filled = 0
        rows[-1].append(number)
        filled += length
    return rows


def place_logits(model: Any, sequences: Sequence[Encoded]) -> list[Tensor]:
    """The head's output at the places of each trajectory, [P] each; all are read in one row of tokens.

    Positions begin at 0 in each trajectory. By that the model knows where one begins, and no token sees another
    trajectory.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([[i for sequence in sequences for i in sequence.ids]], device=device)  # [1, T]
    positions = torch.tensor([[i for sequence in sequences for i in range(len(sequence))]], device=device)

    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence))
    places = [start + place for start, one in zip(starts, sequences, strict=False) for place in one.places]
    hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
    logits = model.score(hidden[torch.tensor(places, device=device)])[:, 0].float()
    return list(logits.split([len(sequence.places) for sequence in sequences]))


@torch.no_grad()
def probabilities(model: Any, sequences: Sequence[Encoded], max_pack_tokens: int) -> list[list[float]]:
    """Sigmoid of the head at each place of each trajectory, in order."""
    found: list[list[float]] = [[] for _ in sequences]
    with_places = [number for number, sequence in enumerate(sequences) if sequence.places]
    for row in packs([len(sequences[number]) for number in with_places], max_pack_tokens):
        numbers = [with_places[i] for i in row]
        for number, logits in zip(numbers, place_logits(model, [sequences[i] for i in numbers]), strict=True):
            found[number] = logits.sigmoid().tolist()
    return found
