"""What is stored beside a reward model: how it reads, and a card for people with its figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import PositiveInt

from tasks import conf
from tasks.reward_model.quality import Quality
from tasks.services import Head
from tasks.store import read_json, write_json

READING, CARD = "reading.json", "README.md"


@dataclass(frozen=True)
class Card:
    """How a reward model reads.

    Attributes:
        head: meaning of its sigmoid.
        placeholder, placeholder_id: the token at which it is read.
        max_tokens: what lies beyond is not read.
        max_pack_tokens: tokens that are read together.
    """

    head: Head
    placeholder: str
    placeholder_id: int
    max_tokens: PositiveInt
    max_pack_tokens: PositiveInt


def read_card(folder: Path) -> Card:
    """How the model in a folder reads.

    Raises:
        ValueError: the file is missing or no such description.
    """
    return conf.fill(Card, read_json(folder / READING), str(folder / READING))


def write_card(folder: Path, name: str, seed: int, card: Card, quality: Quality) -> None:
    """Write how the model reads, and its card."""
    write_json(folder / READING, conf.plain(card))
    (folder / CARD).write_text(_text(name, seed, card, quality), encoding="utf-8")


def _text(name: str, seed: int, card: Card, quality: Quality) -> str:
    meaning = {
        "success": "trained to be the probability that the final answer will be right, given the question and all up "
        "to that action; how near it comes is measured below",
        "hazard": "the probability that the first error happens at that step (the variant of PiCA's release)",
    }[card.head]
    return f"""---
pipeline_tag: text-classification
---
# Reward model {name}, seed {seed}

A language model with one number at the end (`score`), trained by Breadcrumb for PiCA (pivot-based credit assignment).
At each
`{card.placeholder}` in its text the sigmoid of that number is {meaning}.

The text is the question, a line break, and turn after turn what the policy wrote and what the search returned. The
placeholder stands after the question, after each executed search before its result, and at the end. Texts of more than
{card.max_tokens} tokens are cut.

Figures of {quality.num_trajectories} trajectories of questions that it was not trained on, with {quality.num_searches}
searches, {quality.num_pivots} of them pivots:

| figure | value |
| --- | ---: |
| AUC of pivots against other searches | {_shown(quality.pivot_auc)} |
| AUC of right against wrong answers, at the end | {_shown(quality.outcome_auc)} |
| expected calibration error at the end | {_shown(quality.ece)} |
| expected calibration error at all places | {_shown(quality.ece_all)} |

| place | plays | mean of f | right answers | AUC of the answer |
| --- | ---: | ---: | ---: | ---: |
{_places(quality)}

It knows the searches and answers of the policy whose plays it was trained on. It is no judge of facts, and a policy
that is trained against it for long may learn to please it.
"""


def _places(quality: Quality) -> str:
    start = [(f"the question, {by.hops} hops", by.count, by.mean, by.rate, None) for by in quality.start]
    turns = [(f"search {at.turn}", at.count, at.mean, at.rate, at.auc) for at in quality.turns]
    return "\n".join(
        f"| {place} | {count} | {mean:.3f} | {rate:.3f} | {_shown(auc)} |"
        for place, count, mean, rate, auc in [*start, *turns]
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
