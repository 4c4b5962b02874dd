"""Candidates for the next turn, forked from one prefix and scored while playing: same draws, one reading, training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.agent.rollout import Player
from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator, PlainSession
from tasks.rewards import on_last_token
from tasks.train.loop import Trainer
from tasks.train.order import Refill
from tasks.types import Question, Scores, Trajectory
from tests.rl.candidates import Candidates
from tests.tiny import make_model, make_player, make_trainer, question

SAMPLING = Sampling(1.0, 1.0, (), 3)
K = 3


@dataclass(frozen=True)
class EvenLast:
    """1 when the last token the policy wrote has an even id; says something of an unfinished trajectory, too."""

    reads: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    components: tuple[str, ...] = ("em",)

    def __call__(self, trajectories: Sequence[Trajectory], questions: Any, services: Any = None) -> list[Scores]:
        values = [float(t.num_generated > 0 and t.response_ids[t.last_generated] % 2 == 0) for t in trajectories]
        return [on_last_token(t, value, em=value) for t, value in zip(trajectories, values, strict=True)]


def real_player(tokenizer: Any, **changes: Any) -> Player:
    """A player of a random policy, made anew each time."""
    budgets = {"max_turns": 2, "max_call_tokens": 7, "max_total_tokens": 400} | changes
    return make_player(PlainGenerator(make_model(tokenizer), tokenizer, True), tokenizer, **budgets)


def score(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
    return EvenLast()(trajectories, questions)


# Draws and costs --------------------------------------------------------------------------------------------------


def test_candidates_are_those_of_separate_plays_and_the_prefix_is_read_once(
    merging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k plays that each read the whole prefix draw the same tokens, and read k prefixes."""
    player = real_player(merging)
    (row,) = player.start([question()], 1, SAMPLING)
    player.observe([row], player.act([row]))
    prefix = [*row.prompt, *row.response]
    assert row.turns[0].observation

    read: list[int] = []
    forward = PlainSession._forward

    def counted(session: PlainSession, chunks: Any, starts: Any) -> Any:
        read.append(sum(map(len, chunks)))
        return forward(session, chunks, starts)

    monkeypatch.setattr(PlainSession, "_forward", counted)
    before = player.cost.prefilled
    candidates = player.fork(row, K)
    player.act(candidates)
    written = [candidate.response[len(row.response) :] for candidate in candidates]
    # Once what the first turn left unread; then every candidate reads its newest token, and one token a draw.
    assert player.cost.prefilled - before == K
    unread = row.turns[0].observation_end - row.turns[0].end
    assert sum(read) == unread + sum(map(len, written))

    seeded = Sampling(1.0, 1.0, player.grammar.stop, SAMPLING.seed * 1_000_003)
    separate: list[list[int]] = []
    read_separately = 0
    for candidate in candidates:
        session = real_player(merging).generator.open([prefix], candidate.number + 1, seeded, 400)
        (call,) = session.generate([candidate.number], [7])
        separate.append(list(call.token_ids))
        read_separately += len(prefix)
    assert written == separate
    assert len({tuple(ids) for ids in written}) > 1
    assert read_separately == K * len(prefix) > 10 * K


def test_a_whole_draw_reads_each_token_once(merging: Any) -> None:
    """Prompts, observations of the lines that went on, and one token a candidate; nothing of a prefix again."""
    player = real_player(merging)
    questions = [question(i) for i in range(3)]
    sampler = Candidates(K)
    draw = sampler.draw(player, questions, SAMPLING, score)
    observed = sum(len(t.response_ids) - t.num_generated for t in draw.trajectories)
    num_forks = K * sum(len(t.turns) for t in draw.trajectories)
    assert player.cost.prefilled == sum(len(t.prompt_ids) for t in draw.trajectories) + observed + num_forks
    assert player.cost.generated >= sum(sum(sample.trained) for sample in draw.samples)


def test_a_draw_of_candidates(merging: Any) -> None:
    """Groups are turns, samples of a group share their prefix, and the best of a group is part of the trajectory."""
    questions = [question(i) for i in range(3)]
    draw = Candidates(K).draw(real_player(merging), questions, SAMPLING, score)
    assert [t.question_id for t in draw.trajectories] == ["q0", "q1", "q2"]
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(draw.samples):
        groups.setdefault(sample.group_id, []).append(i)
    assert len(groups) == sum(len(t.turns) for t in draw.trajectories) > 3
    for members in groups.values():
        assert len(members) == K
        assert len({draw.samples[i].prefix_ids for i in members}) == 1
        assert all(all(draw.samples[i].trained) for i in members)
        (chosen,) = (i for i in members if draw.owners[i] is not None)
        assert draw.scores[chosen].outcome == max(draw.scores[i].outcome for i in members)
        owner, sample = draw.trajectories[draw.owners[chosen] or 0], draw.samples[chosen]
        whole = owner.prompt_ids + owner.response_ids
        assert whole[: len(sample.prefix_ids) + len(sample.ids)] == sample.prefix_ids + sample.ids


# Training ---------------------------------------------------------------------------------------------------------


def candidate_trainer(scratch: Path, **changes: Any) -> Trainer:
    budgets = {"max_turns": 2, "max_call_tokens": 6}
    base: dict[str, Any] = {
        "num_steps": 3, "prompts_per_step": 4, "rollouts_per_step": None, "minibatches": 2, "record_trajectories": 2,
    }  # fmt: skip
    return make_trainer(scratch, sampler=Candidates(K), rewards=(EvenLast(),), rollout=budgets, **(base | changes))


def test_the_real_loop_learns_from_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[Any] = []
    collect = Refill.collect

    def watched(*args: Any) -> Any:
        collected.append(collect(*args))
        return collected[-1]

    monkeypatch.setattr(Refill, "collect", watched)
    trainer = candidate_trainer(tmp_path, num_steps=1)
    before = {name: p.detach().clone() for name, p in trainer.policy.trained.items()}  # type: ignore[attr-defined]
    trainer.run()
    (rollouts,) = collected
    metrics = trainer.progress.history[-1]["metrics"]
    assert any(not torch.equal(p, before[name]) for name, p in trainer.policy.trained.items())  # type: ignore[attr-defined]
    assert metrics["logprob_gap_max"] < 1e-4  # The trainer reads prefix and candidate as the generator did.
    assert metrics["reward_mean"] == pytest.approx(sum(s.outcome for s in rollouts.scores) / len(rollouts.samples))
    assert len(rollouts.kept_questions) == len(rollouts.trajectories) == trainer.progress.num_trajectories == 4
    assert len({sample.group_id for sample in rollouts.samples}) > 4

    rows = trainer.trajectories()
    assert [row["question_id"] for row in rows] == [t.question_id for t in rollouts.trajectories[:2]]
    for row in rows:
        rewards = [turn["reward"] for turn in row["turns"]]
        assert row["outcome"] == sum(rewards)
        assert all(len(set(turn["advantages"])) == 1 for turn in row["turns"])  # One candidate, one advantage.


def test_only_the_candidate_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.train.update import Learner

    learned: list[Any] = []
    learn = Learner.learn

    def watched(*args: Any) -> Any:
        result = learn(*args)
        learned.append((args[1], result[0]))
        return result

    monkeypatch.setattr(Learner, "learn", watched)
    candidate_trainer(tmp_path, num_steps=1).run()
    ((samples, experience),) = learned
    for row, sample in enumerate(samples):
        start = len(sample.prefix_ids)
        assert not experience.loss_mask[row, :start].any()
        assert not experience.advantages[row, :start].any()
        assert experience.loss_mask[row, start : start + len(sample.ids)].tolist() == list(sample.trained)
    sums: dict[str, float] = {}
    for row, group in enumerate(experience.group_ids):
        first = len(samples[row].prefix_ids)
        sums[group] = sums.get(group, 0.0) + float(experience.advantages[row, first])
    assert all(total == pytest.approx(0.0, abs=1e-5) for total in sums.values())  # Compared within a turn.


def test_a_cut_run_with_candidates_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = candidate_trainer(tmp_path / "whole")
    whole.run()
    candidate_trainer(tmp_path / "cut", num_steps=2).run()
    rest = candidate_trainer(tmp_path / "cut")
    rest.run()
    assert rest.progress.history[-1] == whole.progress.history[-1]
    for name, parameter in whole.policy.trained.items():  # type: ignore[attr-defined]
        assert torch.equal(parameter, rest.policy.trained[name]), name  # type: ignore[attr-defined]
