"""Training whose searches take 0.1 to 2 seconds: play and learning in turns, or one step off.

`python -m tests.benchmarks.bench_ahead` fails if the run of one step off takes more than `LIMIT` of the other's time. A
random policy of the laptop's size writes tags often; two generators play, one thread learns. The delay of a search
follows from seed and query. Steps and rollouts of both runs are as many; what is written differs from step 2 on, so
searches and tokens are printed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tasks.agent.rollout import Player, RolloutConf
from tasks.generate.fleet import FleetConf
from tasks.model import export_folder
from tasks.types import Hit
from tests.benchmarks.bench_overlap import Delayed
from tests.tiny import PROMPT, let_search, make_grammar, make_policy, make_tokenizer, make_trainer, optimizer, question

LIMIT = 0.75
STEPS, QUESTIONS, COPIES, GENERATORS = 8, 30, 4, 2
WIDTH, LAYERS = 128, 3
PLAYED = RolloutConf(
    max_turns=4, max_prompt_tokens=40, max_call_tokens=24, max_observation_tokens=100, max_total_tokens=500, top_k=1,
    batch_rows=120, search_retries=0, overlap_searches=120,
)  # fmt: skip


@dataclass
class Wordy(Delayed):
    """Its passages are as long as those of the laptop's world, so that there is as much to learn from."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """See `Retriever`."""
        found = super().search(queries, top_k)
        return [[replace(one, text=" ".join([one.text] * 20)) for one in hits] for hits in found]


def searching(tokenizer: Any) -> Any:
    """A random model of the laptop's size that often writes tags."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    return let_search(model, tokenizer, softness=3.0)


def run(folder: Path, scratch: Path, tokenizer: Any, ahead: bool, seed: int) -> tuple[float, dict[str, float]]:
    """Seconds and last metrics of one training."""
    last: dict[str, float] = {}
    trainer = make_trainer(
        scratch, seed=seed, log=lambda step, metrics: last.update(metrics), num_steps=STEPS,
        rollouts_per_step=QUESTIONS * COPIES, minibatches=4, max_batch_tokens=2048, validate_questions=0,
        validate_every=10 * STEPS, checkpoint_every=10 * STEPS, play_ahead=ahead,
    )  # fmt: skip
    policy = make_policy(searching(tokenizer), tokenizer, conf=replace(optimizer(), lr=1e-6))
    generator = FleetConf(GENERATORS).start(folder, "float32", policy)
    try:
        player = Player(PLAYED, generator, tokenizer, Wordy(seed), make_grammar("search_r1", tokenizer), PROMPT)
        trainer.policy, trainer.generator, trainer.player, trainer.validator = policy, generator, player, player
        trainer.questions, trainer.validation = [question(i) for i in range(QUESTIONS)], []
        start = time.perf_counter()
        trainer.run()
        return time.perf_counter() - start, last
    finally:
        generator.shutdown()


def main() -> int:
    """Both runs of three seeds; the exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    worst = 0.0
    print("| seed | in turns, s | searches | tokens | one step off, s | searches | tokens | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        export_folder(searching(tokenizer), tokenizer, folder)
        for seed in range(3):
            taken, cells = [], []
            for ahead in (False, True):
                seconds, last = run(folder, Path(name) / f"{seed}-{ahead}", tokenizer, ahead, seed)
                taken.append(seconds)
                cells += [f"{seconds:.1f}", f"{last['searches_total']:.0f}", f"{last['generated_tokens_total']:.0f}"]
            ratio = taken[1] / taken[0]
            worst = max(worst, ratio)
            print(f"| {seed} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)
    print(f"worst ratio {worst:.2f}, limit {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
