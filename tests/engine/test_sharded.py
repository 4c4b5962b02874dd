"""The plain engine and a double that spreads rows over two workers: the same gradients, updates, checkpoints, runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks import checkpoint
from tasks.engine import Critic, Objective, Policy
from tasks.engine.plain import PlainCritic
from tasks.rl.experience import Experience
from tasks.rl.losses import Normalizer
from tasks.train.loop import Trainer
from tests.engine.sharded import ShardedCritic, ShardedPolicy
from tests.engine.test_plain import batch_of, whole
from tests.tiny import make_method, make_model, make_policy, make_trainer, optimizer

EXACT = [[0, 3, 5], [1, 2, 4, 6]]
"""One micro-batch a worker: both engines add the same two gradients, and a + b = b + a."""
ROUNDED = [[0], [3, 5], [1], [2, 4], [6]]
"""Several: plain adds (((a + b) + c) + d) + e, two workers ((a + c) + e) + (b + d); float32 rounds each sum."""


def policies(tokenizer: Any, tied: bool = True) -> tuple[Policy, Policy]:
    plain, *workers = (make_policy(make_model(tokenizer, tied=tied), tokenizer) for _ in range(3))
    return plain, ShardedPolicy(workers)


def critics(tokenizer: Any) -> tuple[Critic, Critic]:
    plain, *workers = (PlainCritic(make_model(tokenizer), optimizer(), "float32") for _ in range(3))
    return plain, ShardedCritic(workers)


def prepared(policy: Policy, tokenizer: Any) -> tuple[Any, Experience]:
    method, batch = make_method("ppo", tokenizer, entropy_coefficient=0.01), batch_of(7)
    old = policy.logprobs(batch, whole(batch))
    values = torch.linspace(-1, 1, old.numel()).view_as(old) * batch.response_mask
    batch = replace(batch, old_logprobs=old - 0.1, ref_logprobs=old + 0.2, values=values)
    return method, method.advantage(batch)


def assert_alike(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("plan", "tolerance"), [(EXACT, 0.0), (ROUNDED, 1e-6)])
def test_gradients_and_updates_are_those_of_the_plain_engine(
    tokenizer: Any, plan: list[list[int]], tolerance: float, tied: bool
) -> None:
    plain, sharded = policies(tokenizer, tied)
    method, batch = prepared(plain, tokenizer)
    gradients: list[dict[str, Tensor]] = []
    for worker in (*sharded.workers, plain):  # type: ignore[attr-defined]
        worker.optimizer.register_step_pre_hook(
            lambda *_, w=worker: gradients.append({n: p.grad.clone() for n, p in w.trained.items()})
        )

    for number in range(3):
        rows = [row for micro in plan for row in micro]
        objective = Objective(method.loss, Normalizer.of(batch.loss_mask[rows]), True, is_first=number == 0)
        for reference in (True, False):
            assert_alike(*(e.logprobs(batch, plan, reference) for e in (sharded, plain)), 10 * tolerance)

        gradients.clear()
        ours, theirs = sharded.update(batch, plan, objective), plain.update(batch, plan, objective)

        assert len(gradients) == 3
        for mine in gradients[:2]:
            assert mine.keys() == gradients[2].keys()
            assert all(torch.allclose(g, gradients[2][n], rtol=0, atol=tolerance) for n, g in mine.items())
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=10 * tolerance)
        for mine, other in zip(ours.metrics, theirs.metrics, strict=True):
            assert mine == pytest.approx(other, abs=10 * tolerance)
        assert (ours.logprobs is None) == (theirs.logprobs is None) == (number > 0)
        # Adam divides a gradient by its own size, so a rounding of a tiny gradient moves a weight more than itself.
        weights = dict(plain.weights())
        for name, tensor in sharded.weights():
            assert_alike(tensor, weights[name], 100 * tolerance)


@pytest.mark.parametrize(("plan", "tolerance"), [(EXACT, 0.0), (ROUNDED, 1e-6)])
def test_the_critic_too(tokenizer: Any, plan: list[list[int]], tolerance: float) -> None:
    plain, sharded = critics(tokenizer)
    method, batch = prepared(policies(tokenizer)[0], tokenizer)
    objective = Objective(method.value_loss, Normalizer.of(batch.loss_mask))
    for _ in range(3):
        ours, theirs = sharded.update(batch, plan, objective), plain.update(batch, plan, objective)
        assert [m["value_loss"] for m in ours.metrics] == pytest.approx(
            [m["value_loss"] for m in theirs.metrics], abs=10 * tolerance
        )
        assert_alike(*(engine.values(batch, plan) for engine in (sharded, plain)), 1000 * tolerance)


def test_a_worker_without_rows(tokenizer: Any) -> None:
    plain, sharded = policies(tokenizer)
    method, batch = prepared(plain, tokenizer)
    objective = Objective(method.loss, Normalizer.of(batch.loss_mask[[2, 5]]))
    assert plain.update(batch, [[2, 5]], objective) == sharded.update(batch, [[2, 5]], objective)
    assert sharded.rows_of == [[2, 5], []]  # type: ignore[attr-defined]


def test_its_checkpoints_have_files_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    _, sharded = policies(tokenizer)
    method, batch = prepared(sharded, tokenizer)
    objective = Objective(method.loss, Normalizer.of(batch.loss_mask))
    sharded.update(batch, EXACT, objective)
    with checkpoint.writing(tmp_path, 1) as folder:
        sharded.save(folder / "policy")
    _, other = policies(tokenizer)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    other.load(path / "policy")
    assert sharded.update(batch, EXACT, objective) == other.update(batch, EXACT, objective)

    torn = path / "policy" / "worker-1" / "tensors.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert checkpoint.latest(tmp_path) is None


def test_the_training_loop_runs_on_it(tmp_path: Path) -> None:
    """PPO with critic and reference: the generator takes the gathered weights, a restart goes on exactly."""

    def trainer(name: str, sharded: bool, **changes: Any) -> Trainer:
        made = make_trainer(tmp_path / name, "ppo", share=False, max_batch_tokens=10_000, **changes)
        if sharded:
            tokenizer = made.player.tokenizer
            made.policy, made.critic = policies(tokenizer)[1], critics(tokenizer)[1]
        return made

    history = trainer("plain", False, num_steps=2).run().history
    through = trainer("whole", True, num_steps=2).run().history
    for mine, other in zip(through, history, strict=True):
        assert mine["metrics"] == pytest.approx(other["metrics"], abs=1e-4)
    trainer("cut", True, num_steps=1).run()
    continued = trainer("cut", True, num_steps=2).run().history
    assert continued[-1] == through[-1]
