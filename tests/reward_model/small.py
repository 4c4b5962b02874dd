"""A tiny reward model and labelled trajectories for tests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tasks import trained
from tasks.base.tokenizer import END
from tasks.model import export_folder
from tasks.reward_model.card import Card, write_card
from tasks.reward_model.fit import Fit, Labelled, supervision
from tasks.reward_model.model import load
from tasks.reward_model.quality import Judged, measure
from tasks.reward_model.reading import Encoded, encode, placeholder_id
from tasks.reward_model.settings import FitConf, LossConf
from tasks.services import Head
from tasks.supervised import PlainLearner
from tasks.trained import Trained
from tasks.types import Action, Turn
from tests.tiny import make_merging_tokenizer, make_model

FIT = FitConf(
    batch=4, max_tokens=400, max_pack_tokens=160, lr=1e-3, max_epochs=2, validate_every=2, patience=9, control_steps=0,
    dtype="float32",
)  # fmt: skip


def fitted(model: Any, loss: LossConf, conf: FitConf, *rest: Any) -> Fit:
    """The training of this very model."""
    return Fit(PlainLearner(model, supervision(loss, conf)), loss, conf, *rest)


def start(folder: Path) -> Path:
    """A model folder with random weights."""
    tokenizer = make_merging_tokenizer()
    export_folder(make_model(tokenizer), tokenizer, folder)
    return folder


def stored(root: Path, name: str, seed: int, start: Path, head: Head = "success") -> Trained:
    """A reward model whose head says something, as the stage stores it below `root`."""
    folder = root / trained.FOLDER / f"{name}-{seed}"
    model, tokenizer = load(start, is_new=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=generator) / 4)
    folder.mkdir(parents=True)
    export_folder(model, tokenizer, folder)
    card = Card(head, END, placeholder_id(tokenizer, END, "x"), 600, 1200)
    write_card(folder, name, seed, card, measure([Judged([0.5, 0.5], [], True, 1)], 1e-4))
    trained.seal(folder, {})
    return trained.find(root, [name], seed)[name]


def encoded(tokenizer: Any, number: int, searches: int) -> Encoded:
    """A question with so many searches and an answer."""
    placeholder = placeholder_id(tokenizer, tokenizer.eos_token or END, "x")
    turns = [
        Turn(Action("search", "x"), text=f" look {number} {i}", observation=" found", executed=True)
        for i in range(searches)
    ]
    turns.append(replace(turns[0], text=f" answer {number}", observation="", executed=False) if turns else
                 Turn(Action("answer", "x"), text=f" answer {number}"))  # fmt: skip
    return encode(tokenizer, placeholder, f"Who is {number} ?", turns, 400)


def labelled(tokenizer: Any, count: int, seed: int = 0) -> list[Labelled]:
    """Trajectories with labels by chance."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        searches = draw.randint(0, 3)
        pivots = tuple(draw.random() < 0.6 for _ in range(searches))
        found.append(Labelled(encoded(tokenizer, number, searches), pivots, draw.random() < 0.5))
    return found
