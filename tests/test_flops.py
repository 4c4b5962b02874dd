"""The formula of floating-point operations, against those that torch counts while it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tasks.engine import Objective
from tasks.engine.plain import PlainCritic
from tasks.flops import Decoder, Read, Trained, critic_of, of_folder, policy_of
from tasks.model import LoraConf, export_folder
from tasks.rl.losses import Normalizer
from tasks.train.reads import read_by
from tests.engine.test_plain import batch_of
from tests.tiny import make_method, make_model, make_policy, make_tokenizer, optimizer

NO_ADAPTERS = LoraConf()


def model_of(**options: Any) -> Any:
    """A tiny model whose attention is made of products that torch counts; the fused kernel of a CPU is not."""
    model = make_model(make_tokenizer(), kv_heads=2, **options)
    model.config._attn_implementation = "eager"
    return model


def counted(work: Any) -> int:
    """The operations of a call as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def squared(read: Read) -> Read:
    """What one row reads where attention computes the pairs with later tokens as well, and masks them."""
    return replace(read, pairs=read.positions**2)


def policy_objective() -> Any:
    loss = make_method("grpo", make_tokenizer(), kl_coefficient=0.0).loss
    return lambda batch: Objective(loss, Normalizer.of(batch.loss_mask), loss.needs_entropy_gradient, is_first=True)


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_of_the_policy_is_counted_exactly(tied: bool) -> None:
    model, batch = model_of(tied=tied), replace(batch_of(1), advantages=torch.ones_like(batch_of(1).rewards))
    read = read_by(batch, [[0]], False)
    expected = policy_of(model, NO_ADAPTERS).flop(squared(read))
    policy = make_policy(model, make_tokenizer(), reference=False)
    assert counted(lambda: policy.update(batch, [[0]], policy_objective()(batch))) == expected
    # A pair counts where a token attends to the other: some more than half of all pairs of a row.
    assert read.pairs == read.positions * (read.positions + 1) // 2
    assert policy_of(model, NO_ADAPTERS).flop(read) < expected


def test_an_update_with_adapters_is_counted_up_to_the_first_layer() -> None:
    """Nothing before the first layer's adapters is trained, so their inputs need no gradient; of two layers it shows.

    Its share is at most 3 matrices in a layer (query, key, value) of 7, 2 of 4 operations, in one of two layers: 5%.
    """
    lora = LoraConf(rank=4)
    model, batch = model_of(), replace(batch_of(1), advantages=torch.ones_like(batch_of(1).rewards))
    expected = policy_of(model, lora).flop(squared(read_by(batch, [[0]], False)))
    policy = make_policy(model, make_tokenizer(), rank=4, reference=False)
    found = counted(lambda: policy.update(batch, [[0]], policy_objective()(batch)))
    assert 0.95 * expected <= found <= expected
    assert expected < policy_of(model, NO_ADAPTERS).flop(squared(read_by(batch, [[0]], False)))


def test_an_update_of_the_critic_is_counted_exactly() -> None:
    model, batch = model_of(), batch_of(1)
    method = make_method("ppo", make_tokenizer())
    critic = PlainCritic(model, optimizer(), "float32")
    values = critic.values(batch, [[0]])
    learned = replace(batch, values=values, returns=values + 1, advantages=values)
    assert method.value_loss is not None
    objective = Objective(method.value_loss, Normalizer.of(batch.response_mask))
    expected = critic_of(model).flop(squared(read_by(batch, [[0]], False)))
    assert counted(lambda: critic.update(learned, [[0]], objective)) == expected


def test_the_formula_is_six_operations_a_weight_and_palms_attention() -> None:
    """By hand: 7 tokens, 3 of them predicted, 28 pairs; 6 (7 x 100 + 3 x 50) + 12 x 8 x 28."""
    every = Decoder(body=100, trained=100, head=50, trained_head=50, attention=8)
    assert every.flop(Read(7, 28, 3)) == 6 * (700 + 150) + 12 * 8 * 28
    frozen = replace(every, trained=0, trained_head=0)
    assert frozen.flop(Read(7, 28, 3)) == 4 * (700 + 150) + 12 * 8 * 28
    assert Trained(every, frozen).flop(Read(7, 28, 3)) == every.flop(Read(7, 28, 3)) + frozen.flop(Read(7, 28, 3))


def test_sizes_come_from_the_folder_of_a_model(tmp_path: Path) -> None:
    model = make_model(make_tokenizer(), kv_heads=2)
    export_folder(model, make_tokenizer(), tmp_path / "m")
    found = of_folder(tmp_path / "m", NO_ADAPTERS, has_critic=True)
    # Two layers of query and output (32 x 32), key and value (16 x 32), and three of 32 x 64.
    assert found.policy.body == 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    assert found.policy.head == len(make_tokenizer()) * 32
    assert found.policy.attention == 2 * 4 * 8
    assert found.critic is not None
    assert found.critic.body == found.policy.body + 32
    assert of_folder(tmp_path / "m", NO_ADAPTERS, has_critic=False).critic is None
