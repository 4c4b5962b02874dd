"""Training of a reward model: packing, exact resume after a kill, the early end, and what is refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import checkpoint
from tasks.base.tokenizer import END
from tasks.reward_model.fit import Labelled, num_steps, schedule
from tasks.reward_model.losses import losses
from tasks.reward_model.model import load, packs, place_logits, probabilities
from tasks.reward_model.quality import Judged, Quality, measure
from tasks.reward_model.reading import encode, placeholder_id
from tasks.reward_model.settings import LossConf
from tasks.types import Action, Turn
from tests.reward_model.small import FIT, encoded, fitted, labelled, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("reward_model") / "start")


def fresh(folder: Path) -> tuple[Any, Any]:
    """The new model with a head that says something."""
    model, tokenizer = load(folder, is_new=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=generator) / 4)
    return model, tokenizer


def test_a_new_head_says_one_half(folder: Path) -> None:
    model, tokenizer = load(folder, is_new=True)
    assert probabilities(model, [encoded(tokenizer, 1, 2)], 500) == [[0.5] * 4]
    assert model.score.bias is None


def test_packed_trajectories_do_not_see_each_other(folder: Path) -> None:
    """Read together or one by one, values and gradients are the same."""
    model, tokenizer = fresh(folder)
    sequences = [encoded(tokenizer, number, number % 3) for number in range(5)]
    together = place_logits(model, sequences)
    torch.cat(together).square().sum().backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = [place_logits(model, [one])[0] for one in sequences]
    torch.cat(alone).square().sum().backward()
    for a, b in zip(together, alone, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert torch.allclose(gradient[name], p.grad, atol=1e-4), name
    other = [sequences[3], *sequences[1:]]
    assert torch.allclose(torch.cat(place_logits(model, other)[1:]), torch.cat(together[1:]), atol=1e-5)


def test_packs_hold_what_fits() -> None:
    assert packs([], 8) == []
    assert packs([9, 1, 7, 8, 1], 8) == [[0], [1, 2], [3], [4]]


def test_trajectories_that_are_read_alone_have_the_probabilities_of_packed_ones(folder: Path) -> None:
    model, tokenizer = fresh(folder)
    sequences = [encoded(tokenizer, number, 2) for number in range(4)]
    few, many = (probabilities(model, sequences, size) for size in (1, 1000))
    assert torch.allclose(torch.tensor(few), torch.tensor(many), atol=1e-5)
    empty = replace(sequences[0], places=(), turns=())
    assert probabilities(model, [empty, sequences[1]], 1000)[0] == []


class KilledError(Exception):
    """Stands for a kill."""


def mean_loss(model: Any, rows: list[Labelled], loss: LossConf) -> float:
    """The weighted loss of these trajectories, read one by one."""
    with torch.no_grad():
        each = [losses(place_logits(model, [one.encoded])[0], one.pivots, one.is_right, loss) for one in rows]
    return sum(float(final + loss.gold_weight * gold) for final, gold in each) / len(rows)


def trained(folder: Path, scratch: Path, die_at: int = 0, **changes: Any) -> tuple[dict[str, torch.Tensor], Any]:
    model, tokenizer = fresh(folder)

    def log(step: int, metrics: dict[str, float]) -> None:
        if step == die_at:
            raise KilledError

    fit = fitted(model, LossConf(), replace(FIT, **changes), labelled(tokenizer, 12), labelled(tokenizer, 5, 1), "0",
              scratch, log)  # fmt: skip
    progress = fit.run()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, progress


def test_a_killed_training_ends_with_the_same_weights(folder: Path, tmp_path: Path) -> None:
    whole, progress = trained(folder, tmp_path / "whole")
    assert progress.step == num_steps(12, FIT) == 6
    for die_at in (1, 4, 5):
        with pytest.raises(KilledError):
            trained(folder, tmp_path / str(die_at), die_at)
        resumed, again = trained(folder, tmp_path / str(die_at))
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        assert again == progress


def test_a_torn_checkpoint_is_passed_over(folder: Path, tmp_path: Path) -> None:
    whole, _ = trained(folder, tmp_path / "whole")
    with pytest.raises(KilledError):
        trained(folder, tmp_path / "torn", 5)
    newest = checkpoint.latest(tmp_path / "torn")
    assert newest is not None
    (newest / "tensors.safetensors").write_bytes(b"torn")
    resumed, _ = trained(folder, tmp_path / "torn")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_training_ends_early_with_the_best_weights(folder: Path, tmp_path: Path) -> None:
    """A rate this high spoils the model: the validation loss rises at once."""
    weights, progress = trained(folder, tmp_path, lr=0.5, max_epochs=40, patience=2, validate_every=1)
    assert progress.step < 40 * 3
    assert progress.num_looks_since_best() == 2
    looks = {row["step"]: row["metrics"]["validation_loss"] for row in progress.history}
    assert looks[progress.best_step] == min(looks.values()) == progress.best_loss < looks[progress.step]
    model, tokenizer = fresh(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    assert mean_loss(model, labelled(tokenizer, 5, 1), LossConf()) == pytest.approx(progress.best_loss, rel=1e-4)


def test_every_epoch_sees_all_trajectories_in_an_order_of_its_own(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = fresh(folder)
    rows = labelled(tokenizer, 12)
    fit = fitted(model, LossConf(), FIT, rows, rows[:1], "0", tmp_path, lambda step, metrics: None)
    epochs = [[rows.index(one) for step in steps for one in fit._batch(step)] for steps in ((0, 1, 2), (3, 4, 5))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


def test_a_loss_that_is_no_number_ends_the_training(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = fresh(folder)
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    fit = fitted(
        model, LossConf(), FIT, labelled(tokenizer, 4), labelled(tokenizer, 4), "0", tmp_path, lambda s, m: None
    )
    with pytest.raises(ValueError, match="reward model: the loss or its gradient became"):
        fit.run()


def test_recomputed_activations_train_alike(folder: Path, tmp_path: Path) -> None:
    kept, _ = trained(folder, tmp_path / "kept")
    again, _ = trained(folder, tmp_path / "again", keep_activations=False)
    assert all(torch.allclose(kept[name], again[name], atol=1e-5) for name in kept)


def test_an_update_follows_the_mean_of_the_weighted_losses(folder: Path, tmp_path: Path) -> None:
    """The gradient of the first update, and the loss that the best weights are chosen by."""
    model, tokenizer = fresh(folder)
    conf, loss = replace(FIT, batch=6, max_grad_norm=1e9, max_epochs=1, validate_every=1), LossConf(gold_weight=0.3)
    rows, others = labelled(tokenizer, 6), labelled(tokenizer, 5, 1)
    assert any(any(row.pivots) for row in rows)
    each = [losses(place_logits(model, [row.encoded])[0], row.pivots, row.is_right, loss) for row in rows]
    (sum(final + 0.3 * gold for final, gold in each) / 6).backward()  # type: ignore[union-attr]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    expected = torch.stack([gradient.norm() for gradient in gradients]).norm()

    model, _ = fresh(folder)
    progress = fitted(model, loss, conf, rows, others, "0", tmp_path, lambda step, metrics: None).run()
    (row,) = progress.history
    metrics = row["metrics"]
    assert metrics["grad_norm"] == pytest.approx(float(expected), rel=1e-4)
    assert metrics["loss"] == pytest.approx(sum(f.item() + 0.3 * g.item() for f, g in each) / 6, rel=1e-4)
    validated = metrics["validation_loss_final"] + 0.3 * metrics["validation_loss_gold"]
    assert progress.best_loss == metrics["validation_loss"] == pytest.approx(validated)
    assert validated == pytest.approx(mean_loss(model, others, loss), rel=1e-4)


def test_the_rate_rises_and_falls_to_its_floor() -> None:
    conf = replace(FIT, warmup_share=0.1, floor=0.1)
    rates = [schedule(step, 100, conf) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def told(tokenizer: Any, count: int, seed: int, is_shuffled: bool = False) -> list[Labelled]:
    """Plays whose text says which searches are pivots and whether the answer is right; or labels by chance."""
    draw, found = random.Random(seed), []
    for number in range(count):
        pivots = tuple(draw.random() < 0.5 for _ in range(draw.randint(1, 3)))
        is_right = draw.random() < 0.5
        turns = [
            Turn(Action("search", "x"), text=" look new" if is_pivot else " look old", observation=" .", executed=True)
            for is_pivot in pivots
        ]
        turns.append(Turn(Action("answer", "x"), text=" answer yes" if is_right else " answer no"))
        placeholder = placeholder_id(tokenizer, END, "x")
        one = encode(tokenizer, placeholder, f"Who is {number % 3} ?", turns, 400)
        if is_shuffled:
            pivots, is_right = tuple(draw.random() < 0.5 for _ in pivots), draw.random() < 0.5
        found.append(Labelled(one, pivots, is_right))
    return found


def figures(folder: Path, scratch: Path, is_shuffled: bool) -> Quality:
    model, tokenizer = load(folder, is_new=True)
    conf = replace(FIT, batch=16, max_pack_tokens=600, lr=3e-3, max_epochs=6, validate_every=12, patience=9)
    parts = [told(tokenizer, count, seed, is_shuffled) for seed, count in enumerate((160, 40, 160))]
    fitted(model, LossConf(gold_weight=0.1), conf, *parts[:2], "0", scratch, lambda step, metrics: None).run()
    values = probabilities(model, [one.encoded for one in parts[2]], 600)
    return measure([Judged(f, one.pivots, one.is_right, 1) for f, one in zip(values, parts[2], strict=True)], 1e-4)


def test_a_model_separates_what_its_text_tells_and_nothing_where_labels_are_chance(
    folder: Path, tmp_path: Path
) -> None:
    """With some 320 searches the AUC of chance has a standard error of 0.03."""
    found = figures(folder, tmp_path / "told", is_shuffled=False)
    assert found.pivot_auc is not None
    assert found.outcome_auc is not None
    assert found.pivot_auc > 0.95
    assert found.outcome_auc > 0.95
    assert found.ece < 0.1
    chance = figures(folder, tmp_path / "chance", is_shuffled=True)
    assert chance.pivot_auc == pytest.approx(0.5, abs=0.1)
    assert chance.outcome_auc == pytest.approx(0.5, abs=0.1)
