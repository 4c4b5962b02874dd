"""A worker on a GPU does what the plain engine does. NCCL wants a GPU for each worker, so there is one.

One worker divides nothing: this tests the worker, its group, and DeepSpeed with offload, but not ZeRO-3.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.engine.deepspeed import DeepSpeedEngine
from tasks.engine.plain import PlainEngine
from tasks.model import LoraConf, export_folder
from tests.engine.test_deepspeed import TRAINING, UNEVEN, prepared, update, weights_of
from tests.tiny import make_model, make_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rank", "bound"), [("float32", 0, 1e-5), ("bfloat16", 0, 2e-2), ("float32", 4, 1e-5)]
)
def test_a_policy_of_one_worker_takes_the_steps_of_the_plain_one(
    offload: bool, dtype: Any, rank: int, bound: float, tmp_path: Path
) -> None:
    tokenizer, folder = make_tokenizer(), tmp_path / "start"
    export_folder(make_model(tokenizer, kv_heads=2), tokenizer, folder)
    training = replace(TRAINING, dtype=dtype, lora=LoraConf(rank=rank))
    kind = DeepSpeedEngine(workers=1, stage=2, offload=offload)
    with PlainEngine().open(folder, training) as plain, kind.open(folder, training) as divided:
        method, batch = prepared(*plain, tokenizer, UNEVEN)  # type: ignore[arg-type]
        for number in range(3):
            read = [engine[0].logprobs(batch, UNEVEN) for engine in (divided, plain)]
            assert float((read[0] - read[1]).abs().max()) <= 10 * bound
            ours, theirs = (update(*e, method, batch, UNEVEN, number == 0) for e in (divided, plain))
            assert ours[0].grad_norm == pytest.approx(theirs[0].grad_norm, rel=100 * bound)
        mine, other = weights_of(divided[0]), weights_of(plain[0])
        assert mine.keys() == other.keys()
        assert max(float((mine[name].cpu().float() - other[name].cpu().float()).abs().max()) for name in mine) <= 0.03

        divided[0].save(tmp_path / "state")
        update(*divided, method, batch, UNEVEN)
        divided[0].load(tmp_path / "state")
        again = weights_of(divided[0])
        assert all(torch.equal(again[name], mine[name]) for name in mine)
