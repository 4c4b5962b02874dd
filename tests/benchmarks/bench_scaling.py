"""The seconds that `tasks.plan.scaling` predicts for one and two workers, beside those that they take here.

    python -m tests.benchmarks.bench_scaling

The sums are told how fast one worker does half of the work, for two workers beside a second one that does the same
and with which it exchanges nothing: the cores of a machine share caches and memory. The exchange is measured with two
workers and nothing else. Each worker has one thread, as in a run with as many threads as workers. Fails where a
prediction is off by more than LIMIT.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from tasks.engine import Objective, OptimizerConf, Plan, Training, deepspeed
from tasks.engine.deepspeed import DeepSpeedEngine, DeepSpeedPolicy
from tasks.model import LoraConf, export_folder
from tasks.plan.scaling import Speeds, Work, step_seconds
from tasks.pretrained import Qwen2Config, Qwen2ForCausalLM
from tasks.rl.experience import Experience
from tasks.rl.losses import Normalizer
from tests.tiny import make_method, make_tokenizer

LIMIT, ROUNDS = 0.2, 9
READS = 4  # In each round, so that a read takes as long as an update: a second is too short to be measured well.
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


def medians(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each, after a round that warms up. They take turns: a slower minute then slows all alike."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if number:
                taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in taken.items()}


def at_once(work: Callable[[DeepSpeedPolicy], object], policies: Sequence[DeepSpeedPolicy]) -> None:
    """The same work with each policy, until the last has ended."""
    with ThreadPoolExecutor(len(policies)) as pool:
        list(pool.map(work, policies))


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
    whole, half = experience(ROWS, len(tokenizer)), ROWS // 2
    method = make_method("grpo", tokenizer, kl_coefficient=0.0)

    def update(policy: DeepSpeedPolicy, rows: int) -> None:
        policy.update(whole, plan_of(rows), Objective(method.loss, Normalizer.of(whole.loss_mask[:rows])))

    def read(policy: DeepSpeedPolicy, rows: int) -> None:
        for _ in range(READS):
            policy.logprobs(whole, plan_of(rows))

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name) / "policy"
        export_folder(model, tokenizer, folder)
        one, other, two = (stack.enter_context(policy_of(folder, workers)) for workers in (1, 1, 2))
        taken = medians(
            {
                # What the sums are told: half of the work by one worker, alone and beside one that is as busy.
                "read alone": lambda: read(one, half),
                "learn alone": lambda: update(one, half),
                "read beside": lambda: at_once(lambda policy: read(policy, half), (one, other)),
                "learn beside": lambda: at_once(lambda policy: update(policy, half), (one, other)),
                "exchange": lambda: two.crew.call("exchange", [(EXCHANGED,)] * 2),
                # What they are compared with: all of the work.
                "1 logprobs": lambda: read(one, ROWS),
                "1 learn": lambda: update(one, ROWS),
                "2 logprobs": lambda: read(two, ROWS),
                "2 learn": lambda: update(two, ROWS),
            }
        )

    worst = report(weights, taken)
    if worst > LIMIT:
        sys.exit(f"a prediction is off by {worst:.0%}, more than {LIMIT:.0%}")


def report(weights: int, taken: dict[str, float]) -> float:
    """Print predictions beside what was measured; returns how far the worst is off, as a share."""
    tokens, exchanged = ROWS * TOKENS, 4 * EXCHANGED / taken["exchange"]
    work = Work(0, 0, 0, READS * tokens, tokens, 1, ROWS // 2, weights, 0)
    print(f"{weights:,} weights, {tokens:,} tokens, read {READS} times and learned from once")
    print(f"Two workers exchange {exchanged / 1e6:,.0f} MB/s each.")
    print("| workers | part | predicted s | measured s | ratio |\n| ---: | --- | ---: | ---: | ---: |")
    worst = 0.0
    for workers, how in ((1, "alone"), (2, "beside")):
        passed, learned = READS * tokens / 2 / taken[f"read {how}"], tokens / 2 / taken[f"learn {how}"]
        parts = step_seconds(Speeds(1, 1, passed, learned, exchanged, exchanged, 1, 0), work, workers)
        predicted = {"logprobs": parts["logprobs"], "learn": parts["learn"] + parts["exchange"]}
        for part, seconds in predicted.items():
            ratio = seconds / taken[f"{workers} {part}"]
            worst = max(worst, abs(1 - ratio))
            print(f"| {workers} | {part} | {seconds:.2f} | {taken[f'{workers} {part}']:.2f} | {ratio:.2f} |")
    return worst


if __name__ == "__main__":
    main()
