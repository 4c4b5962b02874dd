"""Stage `evaluate`: play the held-out questions with one system, into `artifacts/evaluate/<system>-<seed>/`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.records import schema
from tasks.records import systems as records
from tasks.records.systems import SystemRecord
from tasks.runner import Context, run
from tasks.stages import parts, systems
from tasks.store import replacing_folder, write_json
from tasks.types import Question

NUM_RECORDED = 60


def body(ctx: Context, name: str, seed: int) -> None:
    """Greedy and sampled play with the system's budgets and the evaluation's top-k."""
    from tasks import generate
    from tasks.evaluate.play import evaluate
    from tasks.systems import Resources
    from tasks.train.settings import TrainConf

    params = ctx.params
    record = records.read(ctx.root / parts.ARTIFACTS / "train" / f"{name}-{seed}")
    system = systems.load(params, name, ctx.root)
    training = conf.fill(TrainConf, *parts.scale_section(params, "train"))
    parts.set_threads(training.num_threads)
    splits, questions = _questions(ctx)
    used = {"evaluate": conf.plain(params.evaluate), "splits": list(splits), "system": conf.plain(system)}
    ctx.track.log_params(used)
    ctx.track.set_tags({"policy": name, "seed": seed})
    ctx.track_data("evaluation", len(questions))

    generator = generate.load(params.generator, ctx.root)
    resources = Resources(
        policy=None if record.policy is None else ctx.root / record.policy,
        retriever=parts.retriever(ctx.root),
        top_k=params.evaluate.top_k,
        start_generator=lambda policy: generator.start(policy, training.dtype),
    )
    bar = parts.Bar(ctx, (2 if params.evaluate.sampled else 1) * len(questions))
    done = {"greedy": 0, "sampled": 0}

    def progress(mode: str, count: int) -> None:
        done[mode] = count
        bar.show(sum(done.values()))

    with system.opened(resources) as playing:
        found = evaluate(
            playing, questions, params.evaluate.sampled, name, seed, NUM_RECORDED,
            ctx.scratch, params.evaluate.max_failed_share, progress,
        )  # fmt: skip
    greedy = [row for row in found.scores if row.mode == "greedy"]
    shown = ("em", "f1", "subem", "searches")
    ctx.log(0, {f"{key}_mean": sum(getattr(row, key) for row in greedy) / len(greedy) for key in shown})

    folder = parts.ARTIFACTS / "evaluate" / f"{name}-{seed}"
    with replacing_folder(ctx.root / folder) as out:
        schema.write(out / "scores.jsonl", found.scores)
        schema.write(out / "trajectories.jsonl", found.trajectories)
        write_json(out / "summary.json", _summary(ctx, record, len(questions), used))
    parts.track_outcome(ctx, folder, [schema.plain(row) for row in found.trajectories])


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
