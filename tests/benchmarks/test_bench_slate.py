"""The two sides of the benchmark of shared prefixes draw the same; `make bench-slate` measures on a taught policy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.rewards import on_turns
from tasks.rl.samplers import Draw
from tasks.rl.samplers.truncated_steps import TruncatedSteps
from tasks.types import Question, Scores, Trajectory
from tests.benchmarks.bench_slate import ROOT, SeparateGenerator
from tests.rl.acting import taught
from tests.tiny import make_model, make_player, make_tokenizer, question


def score(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
    return [on_turns(t, {len(t.turns) - 1: float(sum(t.response_ids) % 3)}) for t in trajectories]


def drawn(kind: Any) -> tuple[Draw, Any]:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    model.load_state_dict(taught())
    player = make_player(kind(model, tokenizer, True), tokenizer, max_call_tokens=14, max_turns=3)
    questions = [question(i) for i in range(4)]
    return TruncatedSteps(5, 0.7).draw(player, questions, Sampling(1.0, 1.0, (), 3), score), player.cost


def test_both_sides_draw_the_same_and_a_shared_prefix_is_read_once() -> None:
    (shared, less), (separate, more) = drawn(PlainGenerator), drawn(SeparateGenerator)
    assert [sample.ids for sample in shared.samples] == [sample.ids for sample in separate.samples]
    assert less.generated == more.generated
    assert len({sample.group_id for sample in shared.samples}) * 5 == len(shared.samples) > 20  # Several steps.
    prefixes = sum(len(sample.prefix_ids) for sample in separate.samples)
    assert more.prefilled - prefixes == less.prefilled - len(separate.samples)  # Each reads one token with its draw.


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_slate", "--root", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "found no start policy, expected one of laptop scale. Run `make run`." in done.stderr
