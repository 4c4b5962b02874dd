"""Paper scale has the budgets of `docs/methods`: steps, updates, rates, warm-up, KL, clip and turns of each method."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tasks import conf, methods
from tasks.agent.rollout import RolloutConf
from tasks.methods import loader
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.value_losses.clipped_value import ClippedValueLoss
from tasks.train.settings import TrainConf
from tests import shipped
from tests.papers import clip_range, tables

ROOT = Path(__file__).parents[2]
NAMES = shipped.names("method")


def rows(heading: str) -> list[dict[str, str]]:
    """The rows of all tables under this heading."""
    pages = shipped.files("docs/methods", "*.md")
    found = [table for page in pages for table in tables(page.stem) if table.heading == heading]
    return [row for table in found for row in table.rows]


BUDGETS, LENGTHS = rows("Budgets"), rows("Lengths")


def resolved(name: str) -> tuple[TrainConf, methods.Method, RolloutConf]:
    """Training, method and play of a configuration at paper scale."""
    scale, own = conf.section("scale", "paper", ROOT), loader.load(name, "paper", ROOT)
    training = conf.fill(TrainConf, conf.merge(scale["train"], own["train"]), name)
    play = conf.fill(RolloutConf, conf.merge(scale["rollout"], own["rollout"]), name)
    return training, methods.build(own, None), play


def printed(cell: str) -> tuple[int, Decimal]:
    """`572 (0.285)`: updates of warm-up and their share."""
    updates, _, share = cell.rstrip(")").partition(" (")
    return int(updates), Decimal(share)


def kl_of(method: methods.Method) -> float:
    """In the reward (PPO) or in the loss (GRPO)."""
    in_loss = [term.coefficient for term in method.loss.terms if isinstance(term, ReferenceKl)]
    return float(getattr(method.advantage, "kl_coefficient", 0.0) or sum(in_loss))


def budget(name: str) -> tuple[Any, ...]:
    """All that the tables print of a configuration."""
    train, method, play = resolved(name)
    clips = [(term.low, term.high) for term in method.loss.terms if isinstance(term, PolicyClip)]
    return train, play, method.sampler.size, kl_of(method), clips


def test_every_configuration_has_one_budget_or_that_of_the_file_it_extends() -> None:
    printed = [row["configuration"].strip("`") for row in BUDGETS]
    assert len(set(printed)) == len(printed)
    assert set(printed) <= set(NAMES)
    for name in set(NAMES) - set(printed):
        extended = conf.section("method", name, ROOT).get("extends")
        assert extended is not None, f"{name}: no row of its own, and it extends no configuration"
        assert budget(name) == budget(extended), f"{name}: its budget is not {extended}'s: it needs a row of its own"


@pytest.mark.parametrize("row", BUDGETS, ids=lambda row: row["configuration"].strip("`"))
def test_a_budget_is_that_of_its_page(row: dict[str, str]) -> None:
    train, method, play = resolved(row["configuration"].strip("`"))
    found: dict[str, Any] = {
        "steps": train.num_steps,
        "questions": train.prompts_per_step,
        "rollouts": method.sampler.size,
        "updates a step": train.minibatches * train.epochs,
        "turns": play.max_turns,
    }
    assert found == {key: int(row[key]) for key in found}
    assert train.policy.lr == float(row["policy lr"])
    assert kl_of(method) == float(row["KL"])
    assert [(term.low, term.high) for term in method.loss.terms if isinstance(term, PolicyClip)] == (
        [clip_range(row["clip"])] if row["clip"] else []
    )


@pytest.mark.parametrize("row", BUDGETS, ids=lambda row: row["configuration"].strip("`"))
def test_warm_up_is_its_share_of_all_updates(row: dict[str, str]) -> None:
    train, method, _ = resolved(row["configuration"].strip("`"))
    updates = int(row["steps"]) * int(row["updates a step"])
    warmup, share = printed(row["policy warm-up"])
    assert train.policy.warmup_steps == warmup == int(share * updates)

    assert (method.value_loss is not None) == bool(row["critic lr"])
    if row["critic lr"]:
        warmup, share = printed(row["critic warm-up"])
        assert train.critic.lr == float(row["critic lr"])
        assert train.critic.warmup_steps == warmup == int(share * updates)


@pytest.mark.parametrize("row", LENGTHS, ids=lambda row: row["configuration"].strip("`"))
def test_lengths_are_those_of_the_page(row: dict[str, str]) -> None:
    train, method, play = resolved(row["configuration"].strip("`"))
    found = {
        "whole": play.max_total_tokens,
        "first prompt": play.max_prompt_tokens,
        "call": play.max_call_tokens,
        "observation": play.max_observation_tokens,
        "passages": play.top_k,
        "gradient norm": train.policy.max_grad_norm,
    }
    assert found == {key: float(row[key]) for key in found}
    value_clip = method.value_loss.clip if isinstance(method.value_loss, ClippedValueLoss) else None
    assert value_clip == (float(row["value clip"]) if row["value clip"] else None)
    assert (method.temperature, method.top_p, train.epochs) == (1.0, 1.0, 1)


def test_updates_a_step_follow_from_the_mini_batch() -> None:
    """The arithmetic behind the table of the decisions: a mini-batch counts rollouts or questions."""
    (table,) = [table for table in tables("decisions") if table.heading == "Updates a step"]
    for row in table.rows:
        questions, rollouts, minibatch = (int(row[key]) for key in ("questions", "rollouts", "mini-batch"))
        counted = questions * rollouts if row["counts"] == "rollouts" else questions
        assert counted == minibatch * int(row["updates a step"]), row["method"]
    budgets = {(row["questions"], row["rollouts"], row["updates a step"]) for row in BUDGETS}
    assert {(row["questions"], row["rollouts"], row["updates a step"]) for row in table.rows} <= budgets
