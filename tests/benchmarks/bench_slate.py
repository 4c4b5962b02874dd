"""What a shared prefix saves in a step of SLATE, and SLATE beside GRPO at equal CPU time.

    python -m tests.benchmarks.bench_slate [--root FOLDER] [--seconds 45]

It needs the data, the index and the start policy of a run at laptop scale (`make run` makes them in `artifacts/`).

The first part runs steps of SLATE in one process, each twice in turn (shared, separate, separate, shared, ...), from
the same weights, questions and seeds. "Separate" reads the whole prefix again for each of the k candidates, in play and
in training; it draws the same candidates, because a draw depends on seed, row and position alone. Tokens are counted
where the model reads them. CPU-seconds are those of the process, one thread, for play, judge and training together.

The second part trains SLATE and GRPO from the same start policy until each has used the same CPU-seconds for its steps
(validation is left out of both), and prints validation EM at marks of time, with the generated tokens.

Exit 1 when a shared step takes more than 0.6 of the CPU-seconds of a separate one, or when the sides drew differently
in half of the steps or more (rounding may change a rare draw).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tasks import conf, methods, retrieval
from tasks.agent.rollout import Player, RolloutConf
from tasks.data.records import read_questions
from tasks.device import use_threads
from tasks.engine.plain import PlainPolicy
from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator, PlainSession
from tasks.inputs.join import join
from tasks.methods import loader
from tasks.model import LoraConf, load_policy
from tasks.services import Resources, opened
from tasks.train.loop import Trainer
from tasks.train.settings import TrainConf
from tasks.types import Question

ROOT = Path(__file__).parents[2]
MOST_SHARE = 0.6
SCALE = "laptop"


class SeparateSession(PlainSession):
    """A session whose forks read the whole text of their row again."""

    def __init__(self, owner: Any, prompts: Any, copies: int, sampling: Sampling, max_total_tokens: int) -> None:
        self.texts: list[list[int]] = [list(prompt) for prompt in prompts for _ in range(copies)]
        super().__init__(owner, prompts, copies, sampling, max_total_tokens)

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        super().append(rows, token_ids)
        for row, ids in zip(rows, token_ids, strict=True):
            self.texts[row] += ids

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> Any:
        calls = super().generate(rows, max_new_tokens)
        for row, call in zip(rows, calls, strict=True):
            self.texts[row] += call.token_ids
        return calls

    def fork(self, row: int, times: int) -> list[int]:
        before = self.num_prefilled
        new_rows = super().fork(row, times)
        for new in new_rows:
            self.texts.append(list(self.texts[row]))
            self.pending[new] = list(self.texts[row])
            self.length[self.slot[new]] = 0
        self.num_prefilled = before + times * len(self.texts[row])
        return new_rows


class SeparateGenerator(PlainGenerator):
    """Generates without sharing prefixes."""

    def open(self, prompts: Any, copies: int, sampling: Sampling, max_total_tokens: int) -> PlainSession:
        return SeparateSession(self, prompts, copies, sampling, max_total_tokens)


@dataclass
class Counted:
    """What the model read in training, and the CPU-seconds of a step."""

    prefilled: int = 0
    generated: int = 0
    trained: int = 0
    cpu_s: float = 0.0
    drawn: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class Given:
    """What `make run` left behind."""

    root: Path
    questions: Sequence[Question]
    validation: Sequence[Question]

    @staticmethod
    def read(root: Path) -> Given:
        """Training questions with their decompositions, and 100 validation questions."""
        questions = list(read_questions(root / "artifacts/data/questions.jsonl"))
        joined = join(questions, ("decomposition",), "dev", root)
        return Given(root, joined.training, joined.validation[:100])

    @contextmanager
    def trainer(self, method: str, scratch: Path, shares: bool, **changes: Any) -> Iterator[Trainer]:
        """A run of this method at laptop scale, as the stage puts it together."""
        tree = loader.load(method, SCALE, ROOT, *self._tiny())
        model, tokenizer = load_policy(self.root / "artifacts/base/0/policy")
        built = methods.build(tree, tokenizer)
        scale = conf.section("scale", SCALE, ROOT)
        changed = {"collapse": None, "variance_questions": 0, "record_trajectories": 0, "select": "last"} | changes
        settings = conf.fill(TrainConf, conf.merge(conf.merge(scale["train"], tree["train"]), changed), method)
        rollout = conf.fill(RolloutConf, conf.merge(scale["rollout"], tree["rollout"]), method)
        use_threads(1)

        shares_here = shares and settings.share_prefixes
        settings = replace(settings, share_prefixes=shares_here)
        policy = PlainPolicy(
            model, tokenizer, settings.policy, LoraConf(), "float32", built.needs_reference, share_prefixes=shares_here
        )
        kind = PlainGenerator if shares else SeparateGenerator
        generator = kind(policy.causal_lm, tokenizer, True)
        data = self.root / "artifacts"
        search = retrieval.open_retriever(data / "index", data / "data/corpus.jsonl")
        resources = Resources(self.root, scratch, policy, tokenizer, settings.max_batch_tokens)
        with opened(built.services, resources) as services:
            play = (rollout, generator, tokenizer, search, built.grammar, built.prompt)
            yield Trainer(
                conf=settings, method=built, policy=policy, critic=None, generator=generator, player=Player(*play),
                validator=Player(*play), questions=self.questions, validation=self.validation, seed=0,
                scratch=scratch, log=lambda step, metrics: None, services=services,
            )  # fmt: skip

    def _tiny(self) -> tuple[Any, Any]:
        from tasks.agent import grammars, prompts

        return prompts.load("tiny", "bench_slate", ROOT), grammars.make({"kind": "search_r1"}, None, "bench_slate")


def one_step(given: Given, shares: bool, step: int) -> Counted:
    """One step of SLATE from the start policy; the number of the step decides its questions and draws."""
    counted = Counted()
    with tempfile.TemporaryDirectory() as folder, given.trainer("slate", Path(folder), shares) as trainer:
        trainer.progress.num_draws = step
        decoder = trainer.policy.causal_lm.get_decoder()  # type: ignore[union-attr]

        def count(module: Any, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                counted.trained += int(kwargs["input_ids"].numel())

        with decoder.register_forward_pre_hook(count, with_kwargs=True):
            trainer.player.cost = trainer.progress.cost
            before = time.process_time()
            rollouts = trainer._refill.collect(step)
            trainer._learner.learn(rollouts.samples, rollouts.scores, step)
            counted.cpu_s = time.process_time() - before
        counted.prefilled, counted.generated = trainer.progress.cost.prefilled, trainer.progress.cost.generated
        counted.drawn = [sample.ids for sample in rollouts.samples]
    return counted


def compare_steps(given: Given, num_steps: int) -> bool:
    """Print the first part; returns whether sharing pays as much as it should."""
    found: dict[bool, list[Counted]] = {True: [], False: []}
    one_step(given, True, 90)  # The first step of a process pays for what is loaded once.
    for step in range(1, num_steps + 1):
        for shares in (True, False) if step % 2 else (False, True):
            found[shares].append(one_step(given, shares, step))

    same = sum(a.drawn == b.drawn for a, b in zip(found[True], found[False], strict=True))
    print(f"{num_steps} steps of slate, k = 5, {SCALE} scale; the same draws in {same} of {num_steps}\n")
    print("| | shared | separate | share |\n|---|---:|---:|---:|")
    shares_of: dict[str, float] = {}
    for name in ("prefilled", "generated", "trained", "cpu_s"):
        ours, theirs = (statistics.median(getattr(one, name) for one in found[side]) for side in (True, False))
        shares_of[name] = ours / theirs
        unit = "CPU-seconds" if name == "cpu_s" else f"{name} tokens"
        print(f"| {unit} a step | {ours:,.4g} | {theirs:,.4g} | {ours / theirs:.3f} |")
    print()
    return shares_of["cpu_s"] <= MOST_SHARE and same > num_steps / 2


def race(given: Given, method: str, seconds: float, marks: int) -> list[tuple[float, int, float]]:
    """(CPU-seconds, generated tokens, validation EM) while this method trains for so many CPU-seconds."""
    points: list[tuple[float, int, float]] = []
    used = 0.0
    changes = {"num_steps": 10_000, "max_generated_tokens": 0, "checkpoint_every": 10_000, "validate_questions": 0}
    with tempfile.TemporaryDirectory() as folder, given.trainer(method, Path(folder), True, **changes) as trainer:
        trainer._resume()
        step = 0
        while True:
            if used >= len(points) * seconds / marks:
                generated = trainer.progress.cost.generated
                points.append((used, generated, _validation_em(trainer)))
            if used >= seconds:
                return points
            step += 1
            before = time.process_time()
            trainer._step(step)
            trainer.progress.step = step
            used += time.process_time() - before


def _validation_em(trainer: Trainer) -> float:
    from tasks.train.validate import validate

    return float(validate(trainer.validator, trainer.validation)["validation_em"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder whose artifacts/ are used")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=45.0, help="CPU-seconds of each method; 0 leaves this out")
    parser.add_argument("--methods", default="slate,slate_wo_truncation,search_r1_grpo")
    given_args = parser.parse_args()
    if not (given_args.root / "artifacts/base/0/policy").is_dir():
        sys.exit(f"{given_args.root}/artifacts: found no start policy, expected one of laptop scale. Run `make run`.")

    given = Given.read(given_args.root)
    is_met = compare_steps(given, given_args.steps)
    if given_args.seconds:
        print(f"Validation EM of 100 questions after CPU-seconds of training steps, {SCALE} scale, seed 0\n")
        print("| method | " + " | ".join(f"{i / 4 * given_args.seconds:.0f} s" for i in range(5)) + " | tokens |")
        print("|---|" + "---:|" * 6)
        for method in given_args.methods.split(","):
            points = race(given, method, given_args.seconds, 4)
            print(f"| {method} | " + " | ".join(f"{em:.2f}" for _, _, em in points) + f" | {points[-1][1]:,} |")
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
