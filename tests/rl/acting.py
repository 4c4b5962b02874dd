"""A tiny policy that searches and answers, for tests of what happens over several turns."""

from __future__ import annotations

import functools
import random

import torch

from tests.tiny import PLACES, make_model, make_tokenizer


@functools.cache
def taught() -> dict[str, torch.Tensor]:
    """Weights of the tiny policy that thinks and then searches or answers, mostly in the right form."""
    tokenizer, rng = make_tokenizer(), random.Random(0)
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        texts = []
        for _ in range(12):
            first, second = rng.sample(PLACES, 2)
            action = rng.choice([f"<search> {second} </search>", f"<answer> {second} </answer>"])
            texts.append(f"Question: Who rules {first} ?\n<think> {rng.choice(PLACES)} </think> {action}")
        rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        ids = torch.tensor([(row + [tokenizer.pad_token_id] * 40)[:40] for row in rows])
        labels = torch.where(ids == tokenizer.pad_token_id, -100, ids)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
