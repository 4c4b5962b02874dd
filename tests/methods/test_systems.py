"""Every configuration is the system its name says: its parts, written down a second time from docs/methods."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import conf, methods
from tasks.methods import loader
from tasks.parts import kind_of
from tasks.rewards.answer import AnswerReward
from tasks.rewards.ended_answer import EndedAnswer
from tasks.rewards.evidence import EvidenceReward
from tasks.rewards.evidence_format import EvidenceFormatReward
from tasks.rewards.format_answer import FormatAnswerReward
from tasks.rewards.hazard_steps import HazardSteps
from tasks.rewards.judged_actions import JudgedActions
from tasks.rewards.key import KeyReward
from tasks.rewards.overlong import OverlongPenalty
from tasks.rewards.ruled_actions import RuledActions
from tasks.rewards.search_turns import SearchTurnReward
from tasks.rewards.step_penalty import StepPenalty
from tasks.rewards.success_gain import SuccessGain
from tasks.rewards.turn_rules import TurnRules
from tasks.rl.advantages.constant import ConstantAdvantage
from tasks.rl.advantages.gae import TokenGae
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.advantages.own_reward import OwnReward
from tasks.rl.losses import LossSum
from tasks.rl.losses.imitation import Imitation
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.search.index import IndexSearch
from tasks.rl.search.simulated import SimulatedSearch
from tasks.rl.value_losses.clipped_value import ClippedValueLoss
from tests import shipped
from tests.tiny import make_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = make_tokenizer()
PPO = {"group": 1, "advantage": TokenGae(1.0, 1.0, 0.001), "loss": LossSum((PolicyClip(0.2, 0.2),)), "critic": True}
TOKEN, SEQUENCE = PolicyClip(0.2, 0.2), PolicyClip(3e-4, 4e-4, "sequence", "seq_mean")
GRPO = {
    "group": 5, "advantage": GroupAdvantage(), "loss": LossSum((TOKEN, ReferenceKl(0.001))), "critic": False,
}  # fmt: skip
GSPO = GRPO | {"loss": LossSum((SEQUENCE, ReferenceKl(0.001, "seq_mean")))}
WIDE, IMITATION = LossSum((PolicyClip(0.2, 0.28),)), LossSum((Imitation(),))
QUESTION = LossSum((PolicyClip(0.2, 0.2, "token", "question_mean"), ReferenceKl(0.001, "question_mean")))
SLATE = GRPO | {
    "advantage": GroupAdvantage(1e-6, "population"), "loss": QUESTION, "sampler": "TruncatedSteps",
    "services": ["chat_judge"],
}  # fmt: skip
ALONE = {
    "sampler": "IndependentGroup",
    "loss": LossSum((PolicyClip(0.2, 0.2, "token", "seq_mean"), GSPO["loss"].terms[1])),
}
JUDGED = JudgedActions("last", 0.1, 4)
F1, EM, SUBEM = AnswerReward("f1", gated=True), AnswerReward("em"), AnswerReward("subem")
KEY, GAIN_AND_PENALTY = KeyReward(0.618), SearchTurnReward(1.0, 1.0)
F1_OF_PICA, STEP_PENALTY = AnswerReward("f1", weight=1.5), StepPenalty(0.3, 0.3, 1.5, 3)
GAIN_IN_SUCCESS = SuccessGain(0.3, keep_final=False, clamp=1e-4, limit=1.0)
TURNS = PPO | {"group": 5, "advantage": TokenGae(1.0, 1.0, 0.001, "none", "turn")}
EVIDENCE = EvidenceReward(1.0)
GAIN, PENALTY = SearchTurnReward(1.0, 0.0), SearchTurnReward(0.0, 1.0)


@functools.cache
def loaded(name: str, scale: str) -> conf.Tree:
    """A configuration at a scale; not to be changed."""
    return loader.load(name, scale, ROOT)


def of(parts: dict[str, Any], *rewards: Any, filter: str = "KeepAll", **more: Any) -> dict[str, Any]:
    return parts | {"rewards": rewards, "filter": filter, **more}


SYSTEMS: dict[str, dict[str, Any]] = {
    # docs/methods/search_r1.md
    "search_r1_ppo": of(PPO, EM),
    "search_r1_grpo": of(GRPO, EM),
    "search_r1_ppo_subem": of(PPO, SUBEM),
    "search_r1_grpo_subem": of(GRPO, SUBEM),
    "search_r1_ppo_format": of(PPO, FormatAnswerReward(0.2, 0.1, 0.0)),
    # docs/methods/stepsearch.md
    "ppo_f1": of(PPO, F1),
    "grpo_f1": of(GRPO, F1),
    "stepsearch": of(PPO, F1, KEY, GAIN_AND_PENALTY),
    "stepsearch_wo_penalty": of(PPO, F1, KEY, GAIN),
    "stepsearch_wo_info_gain": of(PPO, F1, KEY, PENALTY),
    "stepsearch_ow_key": of(PPO, F1, KEY),
    "stepsearch_ow_penalty": of(PPO, F1, PENALTY),
    "stepsearch_ow_info_gain": of(PPO, F1, GAIN),
    "stepsearch_ow_steps": of(PPO, F1, GAIN_AND_PENALTY),
    "stepsearch_ow_sub_answer": of(PPO, F1, "SubAnswerReward"),
    # docs/methods/dspo.md
    "dspo": of(GSPO, SUBEM, filter="MixedOutcomes 10"),
    "gspo": of(GSPO, SUBEM),
    "dspo_token_ratio": of(GRPO, SUBEM, filter="MixedOutcomes 10"),
    "dapo": of(GRPO, SUBEM, OverlongPenalty(2500, 500), filter="MixedOutcomes 10", loss=WIDE),
    "gspo_high_lr": of(GSPO, SUBEM, lr=1e-5),
    "grpo_subem_high_lr": of(GRPO, SUBEM, lr=1e-5),
    # docs/methods/pica.md
    "pica": of(TURNS, F1_OF_PICA, GAIN_IN_SUCCESS, STEP_PENALTY, lr=7e-7, services=["reward_model"]),
    "pica_w_f1": of(TURNS, F1_OF_PICA, lr=7e-7),
    "pica_w_f1_penalty": of(TURNS, F1_OF_PICA, STEP_PENALTY, lr=7e-7),
    "pica_as_released": of(
        PPO,
        EndedAnswer("f1", 1.5, -1.5),
        HazardSteps(0.3, 0.55, 0.3, 1.5),
        group=5,
        loss=WIDE,
        lr=7e-7,
        services=["reward_model"],
    ),
    # docs/methods/r_search.md
    "r_search": of(GRPO, AnswerReward("f1"), EVIDENCE, EvidenceFormatReward(0.2, 0.2), services=["model_reader"]),
    "r_search_ppo": of(PPO, AnswerReward("f1"), EVIDENCE, EvidenceFormatReward(0.2, 0.2), services=["model_reader"]),
    "r_search_wo_evidence": of(GRPO, AnswerReward("f1"), EvidenceFormatReward(0.0, 0.2)),
    # the pages of r1, research, mt_ppo, tips, zerosearch, sft
    "r1": of(PPO, EM, searches=False),
    "research": of(GRPO, "F1OrFormat"),
    "mt_ppo": of(PPO, EM, TurnRules(0.3, -0.2)),
    "tips": of(PPO, EM, "AnswerPotential", services=["start_policy"]),
    "zerosearch": of(PPO, AnswerReward("f1"), search=SimulatedSearch(0.0, 0.5, 4.0), services=["endpoint_documents"]),
    "sft": of(
        GRPO, EM, group=1, advantage=ConstantAdvantage(), loss=IMITATION, searches=False, sampler="GoldAnswers", lr=None
    ),
    # docs/methods/slate.md
    "slate": of(SLATE, JUDGED),
    "slate_k1": of(SLATE, JUDGED, group=1, advantage=OwnReward()),
    "slate_k3": of(SLATE, JUDGED, group=3),
    "slate_k7": of(SLATE, JUDGED, group=7),
    "slate_wo_bonus": of(SLATE, JudgedActions("last", 0.0, 4)),
    "slate_wo_truncation": of(SLATE, JudgedActions("all", 0.1, 4), **ALONE),
    "slate_wo_judge": of(SLATE, RuledActions("last", 0.1, 4), services=[]),
    "slate_em_only": of(SLATE, EM, services=[]),
    "rejection_sampling": of(GRPO, EM, advantage=ConstantAdvantage(), loss=IMITATION, filter="Successful", frozen=True),
}


def test_every_configuration_is_written_down() -> None:
    assert set(SYSTEMS) == set(shipped.names("method"))


def test_no_two_configurations_are_the_same_system() -> None:
    """Two names for one system would be trained twice, to the same bytes; one file may name several printed rows."""
    names: dict[str, list[str]] = {}
    for name in SYSTEMS:
        tree = loaded(name, "paper")
        own = {key: value for key, value in tree.items() if key not in ("name", "title", "paper_rows")}
        names.setdefault(json.dumps(own, sort_keys=True), []).append(name)
    assert [same for same in names.values() if len(same) > 1] == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_configuration_is_what_its_name_says(name: str) -> None:
    """At paper scale; the laptop's differs in clip range, lengths and the service that simulates alone."""
    wanted: dict[str, Any] = {"searches": True, "sampler": "IndependentGroup", "frozen": False, "lr": 1e-6}
    wanted |= {"search": IndexSearch(), "services": []}
    wanted |= SYSTEMS[name]
    if name.startswith("stepsearch") or name in ("ppo_f1", "grpo_f1"):
        wanted["lr"] = 7e-7
    resolved = loaded(name, "paper")
    m = methods.build(resolved, TOKENIZER)
    assert {
        "group": m.sampler.size,
        "advantage": m.advantage,
        "loss": m.loss,
        "critic": m.value_loss is not None,
        "rewards": tuple(
            type(one).__name__ if isinstance(other, str) else one
            for one, other in zip(m.rewards, wanted["rewards"], strict=True)
        ),
        "filter": type(m.filter).__name__ + (f" {m.filter.max_rounds}" if m.filter.max_rounds > 1 else ""),
        "searches": m.grammar.can_search,
        "sampler": type(m.sampler).__name__,
        "frozen": m.sampler.from_start,
        "search": m.search,
        "services": [kind_of(service) for service in m.services.values()],
        "lr": resolved["train"].get("policy", {}).get("lr"),
    } == wanted
    assert m.value_loss in (None, ClippedValueLoss(0.5))


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_scale_changes_the_kind_of_a_part(name: str) -> None:
    """The laptop trains the same system as the paper's scale; lengths and budgets of steps differ."""

    def kinds(scale: str) -> tuple[Any, ...]:
        m = methods.build(loaded(name, scale), TOKENIZER)
        rewards = tuple(
            replace(one, budget=4) if isinstance(one, JudgedActions | RuledActions) else one
            for one in m.rewards
            if not isinstance(one, OverlongPenalty)
        )
        return (
            m.sampler,
            m.advantage,
            m.filter,
            rewards,
            m.value_loss,
            [type(term) for term in m.loss.terms],
            m.loss.needs_reference,
        )

    assert kinds("laptop") == kinds("smoke") == kinds("paper")


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
@pytest.mark.parametrize("name", [name for name in SYSTEMS if name.startswith("slate")])
def test_the_bonus_counts_the_steps_that_a_question_may_take(name: str, scale: str) -> None:
    """The sampler's budget is the scale's; the reward's must be the same."""
    tree = loaded(name, scale)
    play = conf.merge(conf.section("scale", scale, ROOT)["rollout"], tree["rollout"])
    budgets = [reward["budget"] for reward in tree["rewards"] if "budget" in reward]
    assert budgets == ([] if name == "slate_em_only" else [play["max_turns"]])


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name.startswith("slate")])
def test_slate_trains_trees(name: str) -> None:
    """The candidates of a step share all turns before it."""
    assert loaded(name, "smoke")["train"] == {"minibatches_of": "questions", "share_prefixes": True}
    assert (loaded(name, "laptop")["train"]["variance_questions"] > 0) is (name == "slate")


def test_only_methods_whose_credit_comes_from_a_model_read_a_prefix_once() -> None:
    """All others keep their bits; one rollout a question has nobody to share with."""
    sharing = {name for name in SYSTEMS if loaded(name, "laptop")["train"].get("share_prefixes")}
    assert sharing == {name for name in SYSTEMS if name.startswith(("slate", "pica", "r_search"))} - {"r_search_ppo"}
