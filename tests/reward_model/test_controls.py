"""Two controls of a reward model's figures: what each of them finds, and what it cannot find."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.base.tokenizer import END
from tasks.model import load_tokenizer
from tasks.records.played import LabelRow, PlayedTurn
from tasks.reward_model.card import Card
from tasks.reward_model.reading import Blanked, placeholder_id
from tasks.reward_model.settings import LossConf
from tasks.stages.reward_model import Settings, controls, encoded_rows
from tests.reward_model.small import FIT, start

CONF = replace(FIT, batch=16, max_pack_tokens=300, lr=3e-3, validate_every=16, control_steps=32)
PARTS = ("train",) * 160 + ("validation",) * 40 + ("held_out",) * 160
WORDS = {True: " look new", False: " look old"}
TAGS = {True: " <good> look", False: " <bad> look"}
LENGTHS = {True: " look look look", False: " look"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("controls") / "start")


def turn(text: str, executed: bool) -> PlayedTurn:
    kind: Any = "search" if executed else "answer"
    observation = " <information> . </information>" if executed else ""
    return PlayedTurn(kind=kind, content="x", queries=[], text=text, observation=observation, executed=executed)


def rows(texts: dict[bool, str]) -> list[LabelRow]:
    """Plays whose text gives labels and outcomes away in one way."""
    draw, found = random.Random(0), []
    for number, part in enumerate(PARTS):
        labels = [draw.random() < 0.5 for _ in range(draw.randint(1, 3))]
        is_right = draw.random() < 0.5
        turns = [*(turn(texts[label], True) for label in labels), turn(texts[is_right], False)]
        found.append(
            LabelRow(
                question_id=f"q{number}", question=f"Who is {number % 3} ?", copy=0, part=part, status="answered",
                answer="x", is_right=is_right, hops=1, golden=["Who? x"],
                labels=["+" if one else "-" for one in labels], reason="", turns=turns,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize(("texts", "is_form"), [(WORDS, False), (TAGS, True), (LENGTHS, True)])
def test_only_what_stands_in_the_form_is_found_without_words(
    folder: Path, tmp_path: Path, texts: dict[bool, str], is_form: bool
) -> None:
    """With some 320 searches the AUC of chance has a standard error of 0.03; shuffled labels always are."""
    tokenizer = load_tokenizer(folder)
    card = Card("success", END, placeholder_id(tokenizer, END, "x"), 400, 600)
    settings = Settings("small", 0, None, END, LossConf(gold_weight=0.1), CONF)
    ctx: Any = SimpleNamespace(settings=settings, scratch=tmp_path)
    encoded, blanked = (encoded_rows(rows(texts), one, card)[0] for one in (tokenizer, Blanked(tokenizer)))
    lengths = [[len(one.encoded) for one in known["held_out"]] for known in (encoded, blanked)]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.05)  # A word may have merged with a tag.

    found = controls(ctx, folder, encoded, blanked)
    assert found["control_auc"] == pytest.approx(0.5, abs=0.1)
    assert found["blanked_auc"] is not None
    if is_form:
        assert found["blanked_auc"] > 0.9
    else:
        assert found["blanked_auc"] == pytest.approx(0.5, abs=0.1)


def test_without_steps_there_are_no_controls(folder: Path, tmp_path: Path) -> None:
    settings = Settings("small", 0, None, END, LossConf(), replace(CONF, control_steps=0))
    ctx: Any = SimpleNamespace(settings=settings, scratch=tmp_path)
    assert controls(ctx, folder, {}, {}) == {"control_auc": None, "blanked_auc": None}  # type: ignore[typeddict-item]
