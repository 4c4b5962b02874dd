"""Rollouts whose searches take 0.1 to 2 seconds: all rows wait for all searches, or each for its own.

`python -m tests.benchmarks.bench_overlap` fails if the round without a barrier takes more than `LIMIT` of the other's
time, or if a single trajectory differs. A random tiny policy writes tags often; the delay of a search follows from its
query, so both rounds wait for the same delays.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.agent.rollout import Player
from tasks.generate import Sampling
from tasks.generate.rows import RowsGenerator
from tasks.types import Hit, Trajectory
from tests.agent.test_free_play import CONF, eager
from tests.tiny import PLACES, PROMPT, hit, make_grammar, make_tokenizer, question

LIMIT = 0.6
QUESTIONS, COPIES, ROWS = 64, 5, 40
SHORTEST_S, LONGEST_S = 0.1, 2.0


@dataclass
class Delayed:
    """Answers a batch when its slowest query is answered, as a server does that handles queries at once."""

    seed: int

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """See `Retriever`."""
        delays = [random.Random(f"{self.seed}/{query}").uniform(SHORTEST_S, LONGEST_S) for query in queries]
        time.sleep(max(delays))
        return [[hit(f"{PLACES[len(query) % 8]} rules .", number=i) for i in range(top_k)] for query in queries]


def round_of(tokenizer: Any, overlap: int, seed: int) -> tuple[float, list[Trajectory]]:
    """Seconds and trajectories of one round."""
    conf = replace(CONF, max_turns=4, overlap_searches=overlap, batch_rows=ROWS)
    grammar = make_grammar("search_r1", tokenizer)
    player = Player(conf, RowsGenerator(eager(tokenizer), tokenizer), tokenizer, Delayed(seed), grammar, PROMPT)
    start = time.perf_counter()
    played = player.play([question(i) for i in range(QUESTIONS)], COPIES, Sampling(1.0, 1.0, (), seed))
    return time.perf_counter() - start, played


def main() -> int:
    """Both rounds of three seeds; the exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    tokenizer = make_tokenizer()
    worst = 0.0
    print("| seed | searches | lock step, s | own search alone, s | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for seed in range(3):
        before, wanted = round_of(tokenizer, 0, seed)
        after, found = round_of(tokenizer, ROWS, seed)
        if found != wanted:
            print(f"error: seed {seed}: the trajectories differ")
            return 1
        worst = max(worst, after / before)
        searches = sum(t.num_searches for t in wanted)
        print(f"| {seed} | {searches} | {before:.1f} | {after:.1f} | {after / before:.2f} |", flush=True)
    print(f"worst ratio {worst:.2f}, limit {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
