"""Stage `evaluate`: play the held-out questions with one policy, into `artifacts/evaluate/<policy>-<seed>/`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from tasks import conf
from tasks.agent.rollout import RolloutConf
from tasks.records import schema
from tasks.runner import Context, run
from tasks.stages import parts
from tasks.store import replacing_folder, write_json

BASE = "base"
NUM_RECORDED = 60


def body(ctx: Context, policy: str, seed: int) -> None:
    """Greedy and sampled play with the scale's budgets and the evaluation's top-k."""
    from tasks import generate as generators
    from tasks import methods
    from tasks.data.sample import choose
    from tasks.data.settings import DataConf
    from tasks.evaluate.play import evaluate
    from tasks.model import load_tokenizer
    from tasks.systems.policy import PolicySystem
    from tasks.train.settings import TrainConf

    params = ctx.params
    is_base = policy == BASE
    folder = ctx.root / parts.ARTIFACTS / (f"base/{seed}" if is_base else f"train/{policy}-{seed}") / "policy"
    tokenizer = load_tokenizer(folder)
    if is_base:
        prompt, grammar = parts.prompting(params, ctx.root)
        rollout = parts.rollout_conf(params)
    else:
        resolved = methods.load(policy, params.scale, ctx.root, *parts.own_prompting(params, ctx.root))
        prompt, grammar = (method := methods.build(resolved, None)).prompt, method.grammar
        rollout = parts.changed(RolloutConf, params, "rollout", resolved["rollout"], policy)
    splits = conf.load(DataConf, "data", params.data).evaluate_splits
    rollout = replace(rollout, top_k=params.evaluate.top_k or rollout.top_k)
    training = conf.fill(TrainConf, *parts.scale_section(params, "train"))
    parts.set_threads(training.num_threads)
    questions = choose(parts.questions(ctx.root, splits), splits, params.evaluate.max_questions)
    if not questions:
        raise ValueError(
            f"conf/data/{params.data}.yaml: evaluate_splits={list(splits)}: artifacts/data has no question of these. "
            f"Name a split that the data has."
        )
    used = {"evaluate": conf.plain(params.evaluate), "splits": list(splits), "rollout": conf.plain(rollout)}
    ctx.track.log_params(used)
    ctx.track.set_tags({"policy": policy, "seed": seed})
    ctx.track_data("evaluation", len(questions))

    generator = generators.load(params.generator, ctx.root).start(folder, training.dtype)
    player = parts.make_player(
        rollout, generator, tokenizer, parts.retriever(ctx.root), grammar.fitted(tokenizer), prompt
    )
    modes = 2 if params.evaluate.sampled else 1
    bar = parts.Bar(ctx, modes * len(questions))
    done = {"greedy": 0, "sampled": 0}

    def progress(mode: str, count: int) -> None:
        done[mode] = count
        bar.show(sum(done.values()))

    try:
        found = evaluate(
            PolicySystem(player), questions, params.evaluate.sampled, policy, seed, NUM_RECORDED,
            ctx.scratch, params.evaluate.max_failed_share, progress,
        )  # fmt: skip
    finally:
        generator.shutdown()
    greedy = [row for row in found.scores if row.mode == "greedy"]
    shown = ("em", "f1", "subem", "searches")
    ctx.log(0, {f"{key}_mean": sum(getattr(row, key) for row in greedy) / len(greedy) for key in shown})
    with replacing_folder(ctx.root / parts.ARTIFACTS / "evaluate" / f"{policy}-{seed}") as out:
        schema.write(out / "scores.jsonl", found.scores)
        schema.write(out / "trajectories.jsonl", found.trajectories)
        summary = {
            "policy": policy,
            "seed": seed,
            "num_questions": len(questions),
            "data_sha256": ctx.data_sha256,
            "policy_sha256": parts.policy_sha256(folder),
            "settings": used,
        }
        write_json(out / "summary.json", summary)
    parts.track_outcome(
        ctx, parts.ARTIFACTS / "evaluate" / f"{policy}-{seed}", [schema.plain(row) for row in found.trajectories]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    run(f"evaluate@{args.policy}-{args.seed}", lambda ctx: body(ctx, args.policy, args.seed), root=Path("."))


if __name__ == "__main__":
    main()
