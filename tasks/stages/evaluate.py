"""Stage `evaluate`: play the held-out questions with one system, into `artifacts/evaluate/<system>-<seed>/`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import conf
from tasks.records import schema
from tasks.records import systems as records
from tasks.records.systems import SystemRecord
from tasks.runner import Context, run
from tasks.stages import parts, systems
from tasks.stages.systems import Named
from tasks.store import replacing_folder, write_json
from tasks.types import Question

if TYPE_CHECKING:
    from tasks.evaluate.play import Evaluation
    from tasks.model import Dtype

NUM_RECORDED = 60


def body(ctx: Context, name: str, seed: int) -> None:
    """Greedy and sampled play with the system's budgets and the evaluation's top-k."""
    from tasks.train.settings import TrainConf

    record = records.read(ctx.root / parts.ARTIFACTS / "train" / f"{name}-{seed}")
    system = systems.load(ctx.params, name, ctx.root)
    training = conf.fill(TrainConf, *parts.scale_section(ctx.params, "train"))
    parts.set_threads(training.num_threads)
    splits, questions = _questions(ctx)
    used = {"evaluate": conf.plain(ctx.params.evaluate), "splits": list(splits), "system": system.settings}
    ctx.track.log_params(used)
    ctx.track.set_tags({"policy": name, "seed": seed})
    ctx.track_data("evaluation", len(questions))

    played = _play(ctx, record, system, training.dtype, questions)

    greedy = [row for row in played.scores if row.mode == "greedy"]
    shown = ("em", "f1", "subem", "searches")
    ctx.log(0, {f"{key}_mean": sum(getattr(row, key) for row in greedy) / len(greedy) for key in shown})
    folder = parts.ARTIFACTS / "evaluate" / f"{name}-{seed}"
    with replacing_folder(ctx.root / folder) as out:
        schema.write(out / "scores.jsonl", played.scores)
        schema.write(out / "trajectories.jsonl", played.trajectories)
        write_json(out / "summary.json", _summary(ctx, record, len(questions), used))
    parts.track_outcome(ctx, folder, [schema.plain(row) for row in played.trajectories])


def _play(ctx: Context, record: SystemRecord, system: Named, dtype: Dtype, questions: Sequence[Question]) -> Evaluation:
    """Start what the system calls and plays with, let it play, close all."""
    from tasks import generate, services
    from tasks.evaluate.play import evaluate
    from tasks.systems import Resources

    settings = ctx.params.evaluate
    generator = generate.load(ctx.params.generator, ctx.root)
    bar = parts.Bar(ctx, (2 if settings.sampled else 1) * len(questions))
    done = {"greedy": 0, "sampled": 0}

    def progress(mode: str, count: int) -> None:
        done[mode] = count
        bar.show(sum(done.values()))

    with services.opened(system.services, services.Resources(ctx.root, ctx.scratch)) as called:
        resources = Resources(
            policy=None if record.policy is None else ctx.root / record.policy,
            retriever=parts.retriever(ctx.root),
            top_k=settings.top_k,
            start_generator=lambda policy: generator.start(policy, dtype),
            services=called,
        )
        with system.kind.opened(resources) as playing:
            return evaluate(
                playing, questions, settings.sampled, record.name, record.seed, NUM_RECORDED,
                ctx.scratch, settings.max_failed_share, progress,
            )  # fmt: skip


def _questions(ctx: Context) -> tuple[tuple[str, ...], list[Question]]:
    """The splits that are evaluated, and their questions or a sample of them."""
    from tasks.data.sample import choose
    from tasks.data.settings import DataConf

    splits = conf.load(DataConf, "data", ctx.params.data).evaluate_splits
    questions = choose(parts.questions(ctx.root, splits), splits, ctx.params.evaluate.max_questions)
    if not questions:
        raise ValueError(
            f"conf/data/{ctx.params.data}.yaml: evaluate_splits={list(splits)}: artifacts/data has no question of "
            f"these. Name a split that the data has."
        )
    return splits, questions


def _summary(ctx: Context, record: SystemRecord, num_questions: int, used: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": record.name,
        "seed": record.seed,
        "num_questions": num_questions,
        "data_sha256": ctx.data_sha256,
        "policy_sha256": record.policy_sha256,
        "settings": used,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    run(f"evaluate@{args.system}-{args.seed}", lambda ctx: body(ctx, args.system, args.seed), root=Path("."))


if __name__ == "__main__":
    main()
