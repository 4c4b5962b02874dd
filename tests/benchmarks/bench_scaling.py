"""The seconds that `tasks.plan.scaling` predicts for one and two workers, beside those that they take here.

    python -m tests.benchmarks.bench_scaling

The parts are measured with one worker and half of the rows, the exchange with two workers and nothing else. Each worker
has one thread. Fails where a prediction is off by more than LIMIT.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tasks.engine import Objective, OptimizerConf, Plan, Training, deepspeed
from tasks.engine.deepspeed import DeepSpeedEngine, DeepSpeedPolicy
from tasks.model import LoraConf, export_folder
from tasks.plan.scaling import Speeds, Work, step_seconds
from tasks.pretrained import Qwen2Config, Qwen2ForCausalLM
from tasks.rl.experience import Experience
from tasks.rl.losses import Normalizer
from tests.tiny import make_method, make_tokenizer

LIMIT = 0.2
ROWS, TOKENS, EXCHANGED = 32, 256, 2**24
WIDTH, LAYERS = 384, 6
OPTIMIZER = OptimizerConf(1e-4, 0, (0.9, 0.95), 0.0, 1e9)
TRAINING = Training(OPTIMIZER, None, LoraConf(), "float32", keep_activations=True, needs_reference=False, seed=0)


def experience(rows: int, vocab: int) -> Experience:
    """Rows of random tokens, all written by the policy but the first half."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (rows, TOKENS), generator=draw)
    mask = (torch.arange(TOKENS) >= TOKENS // 2).expand(rows, -1).clone()
    table = torch.zeros(rows, TOKENS)
    advantages = torch.randn(rows, TOKENS, generator=draw) * mask
    names = tuple(str(row) for row in range(rows))
    lengths = torch.full((rows,), TOKENS)
    return Experience(ids, lengths, mask, mask, table, names, table, old_logprobs=table, advantages=advantages)


def plan_of(rows: int) -> Plan:
    """Micro-batches of two rows."""
    return [[row, row + 1] for row in range(0, rows, 2)]


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """The least of some attempts, after one that warms up."""
    work()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


@contextmanager
def policy_of(folder: Path, workers: int) -> Iterator[DeepSpeedPolicy]:
    with DeepSpeedEngine(workers=workers, stage=2).open(folder, TRAINING) as (policy, _):
        assert isinstance(policy, DeepSpeedPolicy)
        yield policy


def main() -> None:
    """Measure, predict, print."""
    argparse.ArgumentParser(description="Predicted and measured seconds of one and two workers.").parse_args()
    torch.set_num_threads(1)
    deepspeed._MODULE = "tests.engine.exchange_worker"
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=2048, hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    weights = sum(weight.numel() for weight in model.parameters())
    whole = experience(ROWS, len(tokenizer))
    method = make_method("grpo", tokenizer, kl_coefficient=0.0)

    def update(policy: DeepSpeedPolicy, rows: int) -> Any:
        objective = Objective(method.loss, Normalizer.of(whole.loss_mask[:rows]))
        return policy.update(whole, plan_of(rows), objective)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        export_folder(model, tokenizer, folder)
        with policy_of(folder, 1) as policy:
            half = ROWS // 2
            learned = half * TOKENS / seconds(lambda: update(policy, half))
            passed = half * TOKENS / seconds(lambda: policy.logprobs(whole, plan_of(half)))
            handed = 4 * weights / seconds(lambda: [None for _ in policy.weights()])
            alone = {
                "logprobs": seconds(lambda: policy.logprobs(whole, plan_of(ROWS))),
                "learn": seconds(lambda: update(policy, ROWS)),
            }
        with policy_of(folder, 2) as policy:
            given = [(EXCHANGED,)] * 2
            exchanged = 4 * EXCHANGED / 2 / seconds(lambda: policy.crew.call("exchange", given))
            both = {
                "logprobs": seconds(lambda: policy.logprobs(whole, plan_of(ROWS))),
                "learn": seconds(lambda: update(policy, ROWS)),
            }

    speeds = Speeds(1, 1, passed, learned, exchanged, exchanged, handed, 0)
    tokens = ROWS * TOKENS
    work = Work(0, 0, 0, tokens, tokens, 1, weights, 0)
    print(f"{weights:,} weights; one worker learns {learned:,.0f} and passes {passed:,.0f} tokens/s;")
    print(f"two exchange {exchanged / 1e6:,.0f} MB/s each; weights are handed over with {handed / 1e6:,.0f} MB/s")
    print("| workers | part | predicted s | measured s | ratio |\n| ---: | --- | ---: | ---: | ---: |")
    worst = 0.0
    for workers, measured in ((1, alone), (2, both)):
        parts = step_seconds(speeds, work, workers)
        predicted = {"logprobs": parts["logprobs"], "learn": parts["learn"] + parts["exchange"]}
        for part, taken in measured.items():
            ratio = predicted[part] / taken
            worst = max(worst, abs(1 - ratio))
            print(f"| {workers} | {part} | {predicted[part]:.2f} | {taken:.2f} | {ratio:.2f} |")
    if worst > LIMIT:
        sys.exit(f"a prediction is off by {worst:.0%}, more than {LIMIT:.0%}")


if __name__ == "__main__":
    main()
