"""Stage `train`: reinforcement learning of one method and seed, into `artifacts/train/<method>-<seed>/`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasks import conf
from tasks.stages import parts
from tasks.stages.runner import Context, run
from tasks.store import replacing_folder, write_json, write_jsonl


def body(ctx: Context, method: str, seed: int) -> None:
    """Load the start policy, run the loop, write policy, metrics, trajectories and summary."""
    from tasks import methods
    from tasks.data.sample import choose
    from tasks.data.settings import DataConf
    from tasks.engine.plain import PlainCritic, PlainPolicy, load_policy, pick_device
    from tasks.train.loop import TrainConf, Trainer

    data_conf = conf.load(DataConf, "data", ctx.params.data)
    model_conf = parts.model_conf(ctx.params)
    start = ctx.root / parts.ARTIFACTS / "base" / str(seed) / "policy"
    model, tokenizer = load_policy(start)
    model = model.to(pick_device())
    grammar = parts.grammar(tokenizer)
    loaded = methods.load(method, ctx.params.scale, model_conf.prompt, grammar, ctx.root)
    budget, where = parts.scale_section(ctx.params, "train")
    settings = conf.fill(TrainConf, conf.merge(budget, loaded.overrides), where)
    rollout = parts.rollout_conf(ctx.params)
    parts.set_threads(settings.num_threads)

    composed = loaded.method
    keep = settings.keep_activations
    critic = None
    if composed.advantage.needs_values:  # Made first: adapters of the policy would be copied with the decoder.
        critic = PlainCritic(model, settings.critic, settings.dtype, keep)
    policy = PlainPolicy(
        model, tokenizer, settings.policy, model_conf.lora, settings.dtype, composed.needs_reference, keep, seed
    )
    generator = parts.make_generator(
        ctx.params, policy.causal_lm, tokenizer, start, True, lambda folder, probes: policy.sequence_logprobs(probes)
    )
    search = parts.retriever(ctx.root)
    questions = parts.questions(ctx.root, ("train", data_conf.validation_split))
    wanted = settings.validate_questions
    validation = choose(questions, (data_conf.validation_split,), wanted) if wanted else []
    used = {"train": conf.plain(settings), "rollout": conf.plain(rollout), "method": loaded.settings}
    ctx.track.log_params(used)
    training = [q for q in questions if q.split == "train"]
    ctx.track_data("training", len(training))
    trainer = Trainer(
        conf=settings,
        method=composed,
        policy=policy,
        critic=critic,
        generator=generator,
        player=parts.make_player(rollout, generator, tokenizer, search, grammar, composed.template),
        validator=parts.make_player(rollout, generator, tokenizer, search, grammar, composed.template),
        questions=training,
        validation=validation,
        seed=seed,
        scratch=ctx.scratch,
        log=parts.Bar(ctx, settings.num_steps).log,
    )
    try:
        progress = trainer.run()
    finally:
        generator.shutdown()
    with replacing_folder(ctx.root / parts.ARTIFACTS / "train" / f"{method}-{seed}") as out:
        policy.export(out / "policy")
        write_jsonl(out / "metrics.jsonl", progress.history)
        rows = [row | {"policy": method} for row in trainer.trajectories()]
        write_jsonl(out / "trajectories.jsonl", rows)
        summary = {
            "method": method,
            "seed": seed,
            "steps": progress.step,
            "generated_tokens": progress.cost.generated,
            "prefill_tokens": progress.cost.prefilled,
            "searches": progress.cost.searches,
            "num_trajectories": progress.num_trajectories,
            "num_failed": progress.num_failed,
            "settings": used,
            "data_sha256": ctx.data_sha256,
            "policy_sha256": parts.policy_sha256(out / "policy"),
        }
        write_json(out / "summary.json", summary)
    parts.track_outcome(ctx, parts.ARTIFACTS / "train" / f"{method}-{seed}", rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    run(f"train@{args.method}-{args.seed}", lambda ctx: body(ctx, args.method, args.seed), root=Path("."))


if __name__ == "__main__":
    main()
