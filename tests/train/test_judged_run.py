"""SLATE in the real training loop, judged by a real server: killed, out of budget, away, and then as if never cut."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import services
from tasks.rewards import judged_actions
from tasks.rewards.judged_actions import JudgedActions
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.experience import Experience
from tasks.rl.losses import LossSum
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.samplers.truncated_steps import TruncatedSteps
from tasks.services import Resources, ServiceError
from tasks.services.chat_judge import ChatJudge
from tasks.services.endpoint import Endpoint
from tasks.services.rule_judge import RuleJudge
from tasks.train.loop import Trainer
from tests.rl.acting import taught
from tests.services.completions import Completions, completion, serving
from tests.tiny import make_trainer

ROOT = Path(__file__).parents[2]
LOSS = LossSum((PolicyClip(0.2, 0.2, "token", "question_mean"), ReferenceKl(0.01, "question_mean")))


def slate(scratch: Path, **changes: Any) -> Trainer:
    """SLATE on the tiny random policy."""
    options: dict[str, Any] = {
        "num_steps": 3, "prompts_per_step": 3, "rollouts_per_step": None, "minibatches": 2, "checkpoint_every": 1,
        "minibatches_of": "questions", "share_prefixes": True,
        "rollout": {"max_turns": 2, "max_call_tokens": 14}, "validate_questions": 0,
    }  # fmt: skip
    trainer = make_trainer(
        scratch, sampler=TruncatedSteps(3, 0.7), rewards=(JudgedActions("last", 0.1, 2),),
        services={"judge": RuleJudge(0.8, 0.5)},  # The one that runs is given to the trainer.
        **(options | changes),
    )  # fmt: skip
    trainer.method = replace(trainer.method, advantage=GroupAdvantage(1e-6, "population"), loss=LOSS)
    for model in (trainer.policy.causal_lm, trainer.policy.reference):  # type: ignore[attr-defined]
        model.load_state_dict(taught())
    return trainer


def judge_at(endpoint: Endpoint) -> ChatJudge:
    shipped = services.load("judge", "chat_judge", ROOT)
    assert isinstance(shipped, ChatJudge)
    return replace(shipped, chat=endpoint)


def train(folder: Path, endpoint: dict[str, Any]) -> None:
    """A whole run, in whatever process; leaves the final weights and the history in the folder."""
    judge = judge_at(Endpoint(**endpoint))
    with judge.opened(Resources(folder, folder)) as running:
        trainer = slate(folder / "run")
        trainer.services = {"judge": running}
        trainer.run()
    weights = {name: p.detach().tolist() for name, p in trainer.policy.trained.items()}  # type: ignore[attr-defined]
    (folder / "end.json").write_text(json.dumps([trainer.progress.history, weights], sort_keys=True))


@pytest.fixture
def server() -> Iterator[Completions]:
    with serving() as completions:
        completions.answer = verdict
        yield completions


def verdict(body: dict[str, Any]) -> Any:
    """A score that depends on the prompt alone."""
    number = int(hashlib.sha256(body["messages"][0]["content"].encode()).hexdigest(), 16)
    return 200, completion(f"<explanation> so </explanation> <score> {number % 3 - 1} </score>")


def settings(server: Completions, **changes: Any) -> dict[str, Any]:
    return asdict(server.conf(request={"temperature": 0}, max_total_tokens=10**8, **changes))


def test_a_run_that_is_killed_while_it_is_judged_ends_in_the_same_bytes(server: Completions, tmp_path: Path) -> None:
    train(tmp_path / "whole", settings(server))
    whole, num_asked = (tmp_path / "whole" / "end.json").read_bytes(), len(server.asked)
    assert num_asked > 20

    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=train, args=(tmp_path / "cut", settings(server, model="writer-2")))

    def deadly(body: dict[str, Any]) -> Any:
        if len(server.asked) == num_asked + num_asked // 2 and child.pid:
            os.kill(child.pid, signal.SIGKILL)
        return verdict(body)

    server.answer = deadly
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / "cut" / "end.json").exists()

    before = len(server.asked)
    server.answer = verdict
    train(tmp_path / "cut", settings(server, model="writer-2"))
    assert (tmp_path / "cut" / "end.json").read_bytes() == whole
    assert len(server.asked) - before < num_asked  # What was answered is not asked again.


def test_a_budget_that_is_used_up_in_mid_step_keeps_what_was_learned(server: Completions, tmp_path: Path) -> None:
    train(tmp_path / "whole", settings(server))
    num_asked = len(server.asked)
    with pytest.raises(ServiceError, match="the budget is spent"):
        train(tmp_path / "cut", settings(server, model="writer-2", max_requests=num_asked // 2))
    train(tmp_path / "cut", settings(server, model="writer-2"))
    assert (tmp_path / "cut" / "end.json").read_bytes() == (tmp_path / "whole" / "end.json").read_bytes()
    assert len(server.asked) == 2 * num_asked


def one_step(server: Completions, scratch: Path, reply: str, bonus: float = 0.1) -> tuple[Trainer, list[Experience]]:
    """A trainer after one step whose judge always says this, and what that step was learned from; no KL term."""
    server.answer = lambda body: (200, completion(reply))
    seen: list[Experience] = []
    compare = GroupAdvantage(1e-6, "population")

    @dataclass(frozen=True)
    class Seen(GroupAdvantage):
        def __call__(self, experience: Experience) -> Experience:
            seen.append(compare(experience))
            return seen[-1]

    with judge_at(server.conf()).opened(Resources(scratch, scratch)) as running:
        trainer = slate(scratch, num_steps=1)
        policy_alone = LossSum((PolicyClip(0.2, 0.2, "token", "question_mean"),))
        rewards = (JudgedActions("last", bonus, 2),)
        trainer.method = replace(trainer.method, loss=policy_alone, advantage=Seen(), rewards=rewards)
        trainer.services = {"judge": running}
        trainer.run()
    return trainer, seen


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in trainer.policy.trained.items()}  # type: ignore[attr-defined]


def counted(trainer: Trainer) -> tuple[float, float]:
    """Judgements of a question that could not be read, and the sum of its scores."""
    (metrics,) = [row["metrics"] for row in trainer.progress.history if row["step"] == 1]
    return metrics["judge_unreadable_mean"], metrics["judge_mean"]


def test_a_judge_that_talks_rubbish_teaches_nothing_and_is_counted(
    server: Completions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the judge can tell actions apart, all advantages are 0 and no weight moves by a bit."""
    monkeypatch.setattr(judged_actions, "_INVALID", 0.0)
    trainer, (experience,) = one_step(server, tmp_path / "rubbish", "<score> 1945 </score>", bonus=0.0)
    assert counted(trainer)[0] >= 1
    assert len(experience) > 3
    assert not experience.rewards.any()
    assert experience.advantages is not None
    assert not experience.advantages.any()
    started = taught()
    assert all(torch.equal(weight, started[name]) for name, weight in weights_of(trainer).items())

    # A judge that says something does move them: the same step, with scores that differ.
    server.answer = verdict
    other = slate(tmp_path / "telling", num_steps=1)
    with judge_at(server.conf(model="writer-2")).opened(Resources(tmp_path, tmp_path)) as running:
        other.services = {"judge": running}
        other.run()
    assert any(not torch.equal(weight, started[name]) for name, weight in weights_of(other).items())


def test_rubbish_counts_as_a_score_of_0(server: Completions, tmp_path: Path) -> None:
    """Form and bonus go on teaching as if a judge had said 0 to everything."""
    rubbish, (of_rubbish,) = one_step(server, tmp_path / "rubbish", "<score> 1945 </score>")
    zero, (of_zero,) = one_step(server, tmp_path / "zero", "<score> 0 </score>")
    assert counted(rubbish)[0] >= 1
    assert counted(rubbish)[1] == 0
    assert counted(zero) == (0, 0)
    assert of_rubbish.rewards.any()
    assert torch.equal(of_rubbish.rewards, of_zero.rewards)
    wanted = weights_of(zero)
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights_of(rubbish).items())


def test_the_trainer_reads_candidates_as_the_generator_wrote_them(server: Completions, tmp_path: Path) -> None:
    """Log-probabilities from packed rows, advantages of candidates, notes of those that were not taken."""
    with judge_at(server.conf()).opened(Resources(tmp_path, tmp_path)) as running:
        trainer = slate(tmp_path, num_steps=1)
        trainer.services = {"judge": running}
        trainer.run()
    (metrics,) = [row["metrics"] for row in trainer.progress.history if row["step"] == 1]
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["grad_norm"] > 0

    rows = trainer.trajectories()
    assert rows
    for row in rows:
        notes = row.get("notes", [])
        names = {note["name"] for note in notes}
        assert "candidate" in names
        for turn in range(len(row["turns"])):
            candidates = [note for note in notes if note["turn"] == turn and note["name"] == "candidate"]
            assert 2 <= len(candidates) <= 3
            assert sum(bool(note["taken"]) for note in candidates) == 1
