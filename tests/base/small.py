"""A small world, and a tokenizer that read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.agent.prompts import Prompt
from tasks.base.demonstrations import expert_plan
from tasks.base.tokenizer import build_tokenizer
from tasks.data import world

PROMPT = Prompt(None, "Question: {question}\n")
SMALL = world.WorldConf(
    seed=3,
    regions={"train": 1, "dev": 1, "test": 1},
    entities=dict.fromkeys(world.KINDS, 8),
    distractors=6,
    questions={"train": 40, "dev": 10, "test": 10},
    hop_shares=(0.25, 0.25, 0.25, 0.25),
    held_out_share=0.3,
)


def small_tokenizer(conf: world.WorldConf = SMALL) -> Any:
    """A tokenizer trained on a world's passages, prompts and scripts."""
    return build_tokenizer(world_texts(conf), 4096)


def world_texts(conf: world.WorldConf = SMALL) -> Iterator[str]:
    """Passages and questions as a policy meets them."""
    for passage in world.passages(conf):
        yield f" {passage.title} {passage.text}"
        yield passage.title
    for question in world.questions(conf):
        yield PROMPT.user.replace("{question}", question.question)
        for step in expert_plan(question):
            yield f" {step.think} {step.action.content}"
