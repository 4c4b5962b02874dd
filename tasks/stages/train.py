"""Stage `train`: makes one system with one seed ready to play, in `artifacts/train/<system>-<seed>/`.

For a method it trains a policy. For a system that does not learn it writes only a description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks import conf, flops, inputs, limits, methods, parts, retrieval, trained
from tasks.agent.prompts import check_prompts
from tasks.agent.rollout import Player, RolloutConf
from tasks.data.records import read_questions
from tasks.data.sample import choose
from tasks.engine import Critic, Engine, Limited, Policy, Training
from tasks.generate import Generator, GeneratorConf
from tasks.model import LoraConf
from tasks.reached import divided
from tasks.records import schema, systems
from tasks.records.metrics import MetricRow
from tasks.records.systems import SystemRecord
from tasks.records.usage import work_of
from tasks.retrieval import Retriever
from tasks.retrieval.recall import answered
from tasks.rl.method import Method
from tasks.runner import Context, main
from tasks.runner.progress import Watch
from tasks.services import Resources, opened
from tasks.store import DataError, digest, replacing_folder, sha256, write_json, write_jsonl
from tasks.systems import Named, Prompted, build
from tasks.train.settings import TrainConf
from tasks.types import Question

if TYPE_CHECKING:
    from tasks.plan import RunSettings
    from tasks.train.loop import Trainer

MATRIX = ("system", "seed")
DATA, INDEX, INPUTS = Path("artifacts/data"), Path("artifacts/index"), Path("artifacts/inputs")
BASE, OUT = Path("artifacts/base"), Path("artifacts/train")


@dataclass(frozen=True)
class Learning:
    """How a method trains a policy.

    Attributes:
        method: the resolved method, see `tasks.methods.build`.
        train, rollout: budgets of training and of play.
        lora: adapters.
        start: name of the trained model that the policy begins with; null takes the run's start policy.
        checks_prompts: whether all prompts are checked before training, because a given model has its own tokenizer.
        engine, generator: kind and settings of the engine and of the generator.
        retriever: settings of the backend that opens the index.
    """

    method: dict[str, Any]
    train: TrainConf
    rollout: RolloutConf
    lora: LoraConf
    start: str | None
    checks_prompts: bool
    engine: dict[str, Any]
    generator: dict[str, Any]
    retriever: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        system, seed: name of the system, and its seed.
        kind: file of `tasks/systems/` that plays it.
        described: kind, settings and services of a system that does not learn; else None.
        learning: how a method trains its policy; else None.
        given: folder of the pretrained model, for a system that plays it as it comes; else None.
        given_sha256: of the files in that folder.
    """

    system: str
    seed: int
    kind: str
    described: dict[str, Any] | None
    learning: Learning | None
    given: str | None = None
    given_sha256: str | None = None


def settings(run: RunSettings, system: str, seed: int) -> Settings:
    """A method with this run's budgets, engine and index, or a system as it is."""
    playing = run.system(system)
    if not run.is_method(system):
        given = _given(run, system, playing)
        return Settings(system, seed, playing[parts.KIND], playing, None, given, given and run.given_sha256)
    method, where = run.method(system), f"{conf.CONF}/method/{system}.yaml"
    rollout = run.rollout(method["rollout"], where)
    _check_budgets(method, rollout, where)
    learning = Learning(
        method=methods.composition(method),
        train=run.training(method["train"], where),
        rollout=rollout,
        lora=run.model.lora,
        start=run.start(system),
        checks_prompts=run.model.pretrained is not None,
        engine=run.engine(),
        generator=run.generator(),
        retriever=run.retriever(),
    )
    return Settings(system, seed, playing[parts.KIND], None, learning)


def _given(run: RunSettings, system: str, playing: Mapping[str, Any]) -> str | None:
    """The folder of the model that a system plays before anything is taught to it; None for other systems."""
    if playing.get("weights") != "given":
        return None
    if run.model.pretrained is None:
        raise ValueError(
            f"{conf.CONF}/system/{system}.yaml: weights='given': model {run.params.model!r} begins with random weights "
            "and is made in this run. Expected a model of kind pretrained; take the system off the list."
        )
    return run.model.pretrained.folder


def _check_budgets(method: Mapping[str, Any], rollout: RolloutConf, where: str) -> None:
    """Raise the ValueError for a reward that counts down to another last step than that of the game."""
    for reward in method["rewards"]:
        key, expected = f"{where}: rewards: {reward[parts.KIND]}: budget", f"{rollout.max_turns}, the scale's max_turns"
        conf.require(reward.get("budget", rollout.max_turns) == rollout.max_turns, key, reward.get("budget"), expected)


@dataclass(frozen=True)
class Loaded:
    """The parts that training loads by kind.

    Attributes:
        method: built for the tokenizer of the start policy.
        engine, generator: settings of the engine and of the generator.
        retriever: settings of the backend that opens the index.
    """

    method: Method
    engine: Engine
    generator: GeneratorConf
    retriever: Any


def loads(settings: Settings, tokenizer: Any = None) -> Loaded | Named:
    """Build what the settings name: the parts of training, or the system that is described."""
    learning = settings.learning
    if learning is None:
        assert settings.described is not None
        return build(settings.described, "described")
    return Loaded(
        methods.build(learning.method, tokenizer, "learning: method"),
        cast(Engine, parts.make("engine", learning.engine, "learning: engine")),
        cast(GeneratorConf, parts.make("generate", learning.generator, "learning: generator")),
        retrieval.settings_of(learning.retriever, "learning: retriever"),
    )


def body(ctx: Context[Settings]) -> None:
    """Train a method's policy, or describe a system that does not learn."""
    if ctx.settings.learning is None:
        describe(ctx)
    else:
        train(ctx, ctx.settings.learning)


def describe(ctx: Context[Settings]) -> None:
    """Write the description of a system that is not trained, which plays the start policy or no policy at all.

    Its prompts are checked now, because its evaluation may wait until all methods are trained.
    """
    from tasks.model_files import require_content, weights_sha256

    settings = ctx.settings
    policy, made_by = BASE / str(settings.seed) / "policy", f"base@{settings.seed}"
    if settings.given is not None:
        policy, made_by = Path(settings.given), settings.given
        require_content(ctx.root / policy, settings.given_sha256)
    kind = cast(Named, loads(settings)).kind
    plays_policy = kind.plays_policy

    if isinstance(kind, Prompted):
        where = f"{conf.CONF}/system/{settings.system}.yaml: prompt"
        kind.check_prompts(ctx.root / policy, read_questions(ctx.root / DATA / "questions.jsonl"), where)
    record = SystemRecord(
        name=settings.system,
        seed=settings.seed,
        kind=settings.kind,
        policy=str(policy) if plays_policy else None,
        policy_sha256=weights_sha256(ctx.root / policy) if plays_policy else digest(settings.described),
        made_by=made_by if plays_policy else ctx.name,
        is_trained=False,
        **(_index(ctx) if plays_policy and settings.given is None else {}),
    )
    models = trained.read(_inputs(ctx))
    with replacing_folder(ctx.root / OUT / f"{settings.system}-{settings.seed}") as out:
        systems.write(out, record)
        if models:  # For the services of its evaluation.
            trained.write(out, models)


def train(ctx: Context[Settings], learning: Learning) -> None:
    """Load the start policy, run the loop, write policy, metrics, trajectories and summary."""
    from tasks.device import use_threads
    from tasks.model import load_tokenizer
    from tasks.train.loop import Trainer

    folder = _inputs(ctx)
    made_here = trained.read(folder)
    start = ctx.root / BASE / str(ctx.settings.seed) / "policy"
    if learning.start is not None:
        start = made_here[learning.start].checked(ctx.root)
    tokenizer = load_tokenizer(start)
    loaded = cast(Loaded, loads(ctx.settings, tokenizer))
    method, settings = loaded.method, learning.train
    use_threads(settings.num_threads)

    given = inputs.read(folder)
    num_validation = settings.validate_questions
    validation = choose(given.validation, sorted({question.split for question in given.validation}), num_validation)

    # The start policy's stage checked prompts with its own tokenizer. With another one, a prompt that is too long would
    # end the run in the middle.
    if learning.checks_prompts:
        questions = read_questions(ctx.root / DATA / "questions.jsonl")
        check_prompts(tokenizer, method.prompt, questions, method.grammar, learning.rollout.max_prompt_tokens)
    ctx.track.log_params(_used(learning))
    search = retrieval.open_retriever(ctx.root / INDEX, ctx.root / DATA / "corpus.jsonl")
    training = _chosen(given.training, search, learning)
    ctx.track_data("training", len(training))

    bar = ctx.bar(settings.num_steps, settings.max_generated_tokens, "step")
    with _models(ctx, start, learning, loaded) as models:
        resources = Resources(ctx.root, ctx.scratch, models.policy, tokenizer, settings.max_batch_tokens, made_here)
        with opened(method.services, resources) as services:
            searched = method.search.retriever(search, services)
            rollout, prompt, grammar = learning.rollout, method.prompt, method.grammar

            trainer = Trainer(
                conf=settings,
                method=method,
                policy=models.policy,
                critic=models.critic,
                generator=models.generator,
                player=Player(rollout, models.sampler, tokenizer, searched, grammar, prompt),
                validator=Player(rollout, models.generator, tokenizer, search, grammar, prompt),
                questions=training,
                validation=validation if num_validation else [],
                seed=ctx.settings.seed,
                scratch=ctx.scratch,
                log=bar.log,
                services=services,
                watch=Watch("validation"),
                models=flops.of_folder(start, learning.lora, has_critic=models.critic is not None),
            )
            trainer.run()
            bar.close()
        _publish(ctx, trainer, _used(learning), given.missing)


def _chosen(questions: list[Question], search: Retriever, learning: Learning) -> list[Question]:
    """The training questions that `train.questions` chooses.

    Raises:
        DataError: there are none.
    """
    if learning.train.questions == "all":
        return questions
    top_k = learning.rollout.top_k
    chosen = answered(questions, search, top_k)
    if not chosen:
        raise DataError(
            f"train.questions=found: for none of {len(questions)} training questions one of the first {top_k} passages "
            "holds an answer. Raise top_k, or set train.questions: all in conf/scale."
        )
    print(f"{len(chosen)} of {len(questions)} training questions find an answer, and are trained on", flush=True)
    return chosen


def _inputs(ctx: Context[Settings]) -> Path:
    """The folder that stage `inputs` made for this system and seed."""
    return ctx.root / INPUTS / f"{ctx.settings.system}-{ctx.settings.seed}"


def _used(learning: Learning) -> dict[str, Any]:
    """The settings that readers of the summary see."""
    method, _ = divided(learning.method)
    return {"train": conf.plain(learning.train), "rollout": conf.plain(learning.rollout), "method": method}


@dataclass(frozen=True)
class _Models:
    """The policy under training, its critic, its generator, and the generator of the training rollouts."""

    policy: Policy
    critic: Critic | None
    generator: Generator
    sampler: Generator


def training_of(seed: int, learning: Learning, method: Method) -> Training:
    """What an engine is told; adapters have a learning rate of their own where one is set."""
    settings, optimizer = learning.train, learning.train.policy
    if learning.lora.lr is not None:
        optimizer = replace(optimizer, lr=learning.lora.lr)
    return Training(
        policy=optimizer,
        critic=settings.critic if method.advantage.needs_values else None,
        lora=learning.lora,
        dtype=settings.dtype,
        keep_activations=settings.keep_activations,
        needs_reference=method.needs_reference,
        seed=seed,
        share_prefixes=settings.share_prefixes,
    )


@contextmanager
def _models(ctx: Context[Settings], start: Path, learning: Learning, loaded: Loaded) -> Iterator[_Models]:
    """The models of a run, freed when the block ends."""
    method, settings = loaded.method, learning.train
    training = training_of(ctx.settings.seed, learning, method)
    with ExitStack() as stack:
        policy, critic = stack.enter_context(loaded.engine.open(start, training))
        generator = sampler = loaded.generator.start(start, settings.dtype, policy)
        stack.callback(generator.shutdown)
        if method.sampler.from_start:
            sampler = loaded.generator.start(start, settings.dtype)
            stack.callback(sampler.shutdown)
        yield _Models(policy, critic, generator, sampler)


def _publish(ctx: Context[Settings], trainer: Trainer, used: dict[str, Any], missing: Mapping[str, int]) -> None:
    """Write policy, metrics, trajectories and summary of a run that has ended."""
    from tasks.model_files import weights_sha256

    name, seed = ctx.settings.system, ctx.settings.seed
    folder, progress = OUT / f"{name}-{seed}", trainer.progress
    with replacing_folder(ctx.root / folder) as out:
        trainer.export(out / "policy")
        policy_sha256 = weights_sha256(out / "policy")

        schema.write(out / "metrics.jsonl", (MetricRow(**row) for row in progress.history))
        rows = [row | {"policy": name} for row in trainer.trajectories()]
        write_jsonl(out / "trajectories.jsonl", rows)
        if variances := trainer.variances():
            write_jsonl(out / "variance.jsonl", variances)

        summary = {
            "method": name,
            "seed": seed,
            "steps": progress.step,
            "stopped": {"step": progress.step, "reason": progress.stopped} if progress.stopped else None,
            "selected_step": progress.step if progress.selected_step is None else progress.selected_step,
            "num_questions": len(trainer.questions),
            "questions_without": missing,
            "generated_tokens": progress.cost.generated,
            "prefill_tokens": progress.cost.prefilled,
            "searches": progress.cost.searches,
            "num_trajectories": progress.num_trajectories,
            "num_failed": progress.num_failed,
            "settings": used,
            "data_sha256": ctx.data_sha256,
            "policy_sha256": policy_sha256,
            "config_sha256": ctx.config_sha256,
        }
        ctx.measured.update(_measured(trainer))
        write_json(out / "summary.json", summary | work_of(progress.usage, ctx.measured))

        record = SystemRecord(
            name=name,
            seed=seed,
            kind=ctx.settings.kind,
            policy=str(folder / "policy"),
            policy_sha256=policy_sha256,
            made_by=ctx.name,
            is_trained=True,
            **_index(ctx),
        )
        systems.write(out, record)
    ctx.track_outcome(folder, rows)


def _index(ctx: Context[Settings]) -> dict[str, str]:
    """Which index the policy has learned to search."""
    manifest = retrieval.manifest.read(ctx.root / INDEX)
    return {
        "index_sha256": sha256(ctx.root / INDEX / retrieval.manifest.NAME),
        "corpus_sha256": manifest.corpus_sha256,
    }


def _measured(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Facts of this execution for the ledger: seconds by part, what was done in them, memory, the devices' limit."""
    from tasks.train.loop import memory

    progress = trainer.progress
    found: dict[str, dict[str, Any]] = {
        "step_seconds": {part: round(taken, 3) for part, taken in progress.seconds.items()},
        "work": asdict(progress.work),
        "memory": memory(trainer),
    }
    if isinstance(trainer.policy, Limited):  # Last: on a processor it is measured, with matrices of its own.
        found["limit"] = limits.together(trainer.policy.limits())
    return found


if __name__ == "__main__":
    main("train", body, Settings, *MATRIX)
