"""What is stored beside a trained reader: how it reads, its figures, and a card for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.reader.reading import HABITS, Habits
from tasks.store import write_json

CARD, QUALITY = "README.md", "quality.json"
_KINDS = {
    "all": "all",
    "last": "the passage that holds the answer",
    "chain": "the passages of all hops",
    "noisy": "the passage that holds the answer among others",
    "missing": "other passages only; right is to say so",
}


def write_card(folder: Path, name: str, seed: int, habits: Habits, quality: Mapping[str, Any]) -> None:
    """Write how the model reads, its figures, and its card."""
    write_json(folder / HABITS, conf.plain(habits))
    write_json(folder / QUALITY, dict(quality))
    (folder / CARD).write_text(_text(name, seed, habits, quality), encoding="utf-8")


def _text(name: str, seed: int, habits: Habits, quality: Mapping[str, Any]) -> str:
    accuracy = quality["held_out_accuracy"]
    rows = "\n".join(f"| {meaning} | {accuracy[kind]:.3f} |" for kind, meaning in _KINDS.items() if kind in accuracy)
    return f"""---
pipeline_tag: text-generation
---
# Reader {name}, seed {seed}

A Llama-architecture language model, trained from random weights by Breadcrumb for R-Search's evidence reward: it
answers a question from evidence alone. Its prompt is

```text
{habits.prompt}
```

and its answer has at most {habits.max_new_tokens} tokens. It was trained for {quality["steps"]} steps on
{quality["num_training_questions"]} training questions with gold passages, and measured on {quality["num_held_out"]}
exercises about questions that it was not trained on. Exactly right are

| evidence | share |
| --- | ---: |
{rows}

It knows the words of its corpus and nothing of the world. It believes what it reads: evidence that only states an
answer convinces it.
"""
