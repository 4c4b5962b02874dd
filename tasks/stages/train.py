"""Stage `train`: makes what plays under a name with a seed, into `artifacts/train/<system>-<seed>/`.

Of a method that is a trained policy. Whatever does not learn needs nothing but its description.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import conf, inputs
from tasks.agent.prompts import check_prompts
from tasks.agent.rollout import RolloutConf
from tasks.data.records import SPLITS
from tasks.parts import kind_of
from tasks.records import schema
from tasks.records import systems as records
from tasks.records.metrics import MetricRow
from tasks.records.systems import SystemRecord
from tasks.runner import Context, run
from tasks.services import Resources, opened
from tasks.stages import parts, systems
from tasks.store import digest, replacing_folder, write_json, write_jsonl

if TYPE_CHECKING:
    from tasks.agent.rollout import Player
    from tasks.base.settings import ModelConf
    from tasks.engine import Critic, Policy
    from tasks.generate import Generator
    from tasks.retrieval import Retriever
    from tasks.rl.method import Method
    from tasks.train.loop import Trainer
    from tasks.train.settings import TrainConf


def body(ctx: Context, name: str, seed: int) -> None:
    """Train a method's policy, or describe a system that does not learn."""
    if conf.kind_of(conf.SYSTEMS, name, ctx.root) == "method":
        train(ctx, name, seed)
    else:
        describe(ctx, name, seed)


def describe(ctx: Context, name: str, seed: int) -> None:
    """Write what is played where nothing is trained: the start policy, or no policy at all."""
    system, policy = systems.load(ctx.params, name, ctx.root), parts.start_policy(seed)
    plays_policy = system.kind.plays_policy
    record = SystemRecord(
        name=name,
        seed=seed,
        kind=kind_of(system.kind),
        policy=str(policy) if plays_policy else None,
        policy_sha256=parts.policy_sha256(ctx.root / policy) if plays_policy else digest(system.settings),
        made_by=f"base@{seed}" if plays_policy else ctx.name,
        is_trained=False,
    )
    with replacing_folder(ctx.root / parts.ARTIFACTS / "train" / f"{name}-{seed}") as out:
        records.write(out, record)


def train(ctx: Context, method: str, seed: int) -> None:
    """Load the start policy, run the loop, write policy, metrics, trajectories and summary."""
    from tasks import methods
    from tasks.data.sample import choose
    from tasks.data.settings import DataConf
    from tasks.model import load_tokenizer
    from tasks.train.loop import Trainer
    from tasks.train.settings import TrainConf

    data_conf = conf.load(DataConf, "data", ctx.params.data)
    model_conf = parts.model_conf(ctx.params)
    start = ctx.root / parts.start_policy(seed)
    tokenizer = load_tokenizer(start)
    resolved = methods.load(method, ctx.params.scale, ctx.root, *parts.own_prompting(ctx.params, ctx.root))
    settings = parts.changed(TrainConf, ctx.params, "train", resolved["train"], method)
    rollout = parts.changed(RolloutConf, ctx.params, "rollout", resolved["rollout"], method)
    parts.set_threads(settings.num_threads)

    composed = methods.build(resolved, tokenizer)
    search = parts.retriever(ctx.root)
    given = inputs.read(ctx.root / parts.ARTIFACTS / "inputs" / method)
    wanted = settings.validate_questions
    validation = choose(given.validation, (data_conf.validation_split,), wanted) if wanted else []
    used = {"train": conf.plain(settings), "rollout": conf.plain(rollout), "method": methods.composition(resolved)}
    ctx.track.log_params(used)
    if model_conf.pretrained is not None:  # Another tokenizer, other lengths: found now, not amid the training.
        everything = parts.questions(ctx.root, SPLITS)
        check_prompts(tokenizer, composed.prompt, everything, composed.grammar, rollout.max_prompt_tokens)
    ctx.track_data("training", len(given.training))

    def player(plays: Generator, searched: Retriever) -> Player:
        return parts.make_player(rollout, plays, tokenizer, searched, composed.grammar, composed.prompt)

    with _models(ctx, start, settings, model_conf, composed, seed) as models:
        resources = Resources(ctx.root, ctx.scratch, models.policy, tokenizer, settings.max_batch_tokens)
        with opened(composed.services, resources) as services:
            trainer = Trainer(
                conf=settings,
                method=composed,
                policy=models.policy,
                critic=models.critic,
                generator=models.generator,
                player=player(models.sampler, composed.search.retriever(search, services)),
                validator=player(models.generator, search),
                questions=given.training,
                validation=validation,
                seed=seed,
                scratch=ctx.scratch,
                log=parts.Bar(ctx, settings.num_steps).log,
                services=services,
            )
            trainer.run()
        _publish(ctx, trainer, method, used, given.missing)


@dataclass(frozen=True)
class _Models:
    """The policy under training, its critic, who plays it, and who plays the training questions."""

    policy: Policy
    critic: Critic | None
    generator: Generator
    sampler: Generator


@contextmanager
def _models(
    ctx: Context, start: Path, settings: TrainConf, model_conf: ModelConf, method: Method, seed: int
) -> Iterator[_Models]:
    """The models of a run, freed when the block ends."""
    from tasks import engine, generate

    training = engine.Training(
        policy=settings.policy,
        critic=settings.critic if method.advantage.needs_values else None,
        lora=model_conf.lora,
        dtype=settings.dtype,
        keep_activations=settings.keep_activations,
        needs_reference=method.needs_reference,
        seed=seed,
    )
    chosen = generate.load(ctx.params.generator, ctx.root)
    with ExitStack() as stack:
        opened_engine = engine.load(ctx.params.engine, ctx.root).open(start, training)
        policy, critic = stack.enter_context(opened_engine)
        generator = sampler = chosen.start(start, settings.dtype, policy)
        stack.callback(generator.shutdown)
        if method.sampler.from_start:
            sampler = chosen.start(start, settings.dtype)
            stack.callback(sampler.shutdown)
        yield _Models(policy, critic, generator, sampler)


def _publish(ctx: Context, trainer: Trainer, method: str, used: dict[str, Any], missing: Mapping[str, int]) -> None:
    """Write policy, metrics, trajectories and summary of a run that has ended."""
    progress, seed = trainer.progress, trainer.seed
    folder = parts.ARTIFACTS / "train" / f"{method}-{seed}"
    with replacing_folder(ctx.root / folder) as out:
        trainer.export(out / "policy")
        policy_sha256 = parts.policy_sha256(out / "policy")
        schema.write(out / "metrics.jsonl", (MetricRow(**row) for row in progress.history))
        rows = [row | {"policy": method} for row in trainer.trajectories()]
        write_jsonl(out / "trajectories.jsonl", rows)
        summary = {
            "method": method,
            "seed": seed,
            "steps": progress.step,
            "stopped": {"step": progress.step, "reason": progress.stopped} if progress.stopped else None,
            "selected_step": progress.step if progress.selected_step is None else progress.selected_step,
            "questions_without": missing,
            "generated_tokens": progress.cost.generated,
            "prefill_tokens": progress.cost.prefilled,
            "searches": progress.cost.searches,
            "num_trajectories": progress.num_trajectories,
            "num_failed": progress.num_failed,
            "settings": used,
            "data_sha256": ctx.data_sha256,
            "policy_sha256": policy_sha256,
        }
        write_json(out / "summary.json", summary)
        record = SystemRecord(
            name=method,
            seed=seed,
            kind=kind_of(systems.load(ctx.params, method, ctx.root).kind),
            policy=str(folder / "policy"),
            policy_sha256=policy_sha256,
            made_by=ctx.name,
            is_trained=True,
        )
        records.write(out, record)
    parts.track_outcome(ctx, folder, rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    run(f"train@{args.system}-{args.seed}", lambda ctx: body(ctx, args.system, args.seed), root=Path("."))


if __name__ == "__main__":
    main()
