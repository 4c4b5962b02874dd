"""Stage `evaluate`: play the held-out questions with one system, into `artifacts/evaluate/<system>-<seed>/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks import parts, retrieval, services, trained
from tasks.data.records import read_questions
from tasks.data.sample import choose
from tasks.data.splits import counted, require_evaluated
from tasks.model import Dtype
from tasks.model_files import require_weights
from tasks.reached import divided
from tasks.records import schema, systems
from tasks.records.systems import SystemRecord
from tasks.records.usage import work_of
from tasks.runner import Context, main
from tasks.store import Row, replacing_folder, write_json
from tasks.systems import Named, Resources, build
from tasks.types import Question

if TYPE_CHECKING:
    from tasks.evaluate.play import Evaluation
    from tasks.generate import GeneratorConf
    from tasks.plan import RunSettings
    from tasks.records.scores import ScoreRow

MATRIX = ("system", "seed")
DATA, INDEX, TRAINED = Path("artifacts/data"), Path("artifacts/index"), Path("artifacts/train")
OUT = Path("artifacts/evaluate")
NUM_RECORDED = 60


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        system, seed: name of the system, and its seed.
        playing: kind, settings and services of the system.
        generator: kind and settings of the generator, which writes a policy's text.
        retriever: settings of the backend that opens the index.
        data, splits: file of `conf/data/`, and its splits for evaluation.
        max_questions, sampled, max_failed_share, top_k: see `evaluate` in `params.yaml`.
        num_threads, dtype: of forward passes, as in training.
    """

    system: str
    seed: int
    playing: dict[str, Any]
    generator: dict[str, Any]
    retriever: dict[str, Any]
    data: str
    splits: tuple[str, ...]
    max_questions: int
    sampled: bool
    max_failed_share: float
    top_k: int
    num_threads: int
    dtype: Dtype


def settings(run: RunSettings, system: str, seed: int) -> Settings:
    """One system with this run's generator, index and questions."""
    chosen, training = run.params.evaluate, run.training()
    return Settings(
        system=system,
        seed=seed,
        playing=run.system(system),
        generator=run.generator(),
        retriever=run.retriever(),
        data=run.params.data,
        splits=run.data.evaluate_splits,
        max_questions=run.evaluation.max_questions,
        sampled=run.evaluation.sampled,
        max_failed_share=chosen.max_failed_share,
        top_k=chosen.top_k,
        num_threads=training.num_threads,
        dtype=training.dtype,
    )


@dataclass(frozen=True)
class Loaded:
    """The parts that the stage loads by kind.

    Attributes:
        system: settings of the system and of the services it calls.
        generator: settings of the generator, which writes a policy's text.
        retriever: settings of the backend that opens the index.
    """

    system: Named
    generator: GeneratorConf
    retriever: Any


def loads(settings: Settings) -> Loaded:
    """Build what the settings name."""
    return Loaded(
        build(settings.playing, "playing"),
        cast("GeneratorConf", parts.make("generate", settings.generator, "generator")),
        retrieval.settings_of(settings.retriever, "retriever"),
    )


def body(ctx: Context[Settings]) -> None:
    """Greedy and sampled play with the system's budgets and the evaluation's top-k."""
    from tasks.device import use_threads

    settings = ctx.settings
    item = f"{settings.system}-{settings.seed}"
    record = systems.read(ctx.root / TRAINED / item)
    use_threads(settings.num_threads)
    questions = _questions(ctx)
    ctx.track.log_params(_used(settings))
    ctx.track.set_tags({"policy": settings.system, "seed": settings.seed})
    ctx.track_data("evaluation", len(questions))

    played = _play(ctx, record, questions)
    greedy = [row for row in played.scores if row.mode == "greedy"]
    ctx.log(0, {f"{name}_mean": mean for name, mean in _means(greedy).items()})

    with replacing_folder(ctx.root / OUT / item) as out:
        schema.write(out / "scores.jsonl", played.scores)
        schema.write(out / "trajectories.jsonl", played.trajectories)
        summary = _summary(ctx, record, len(questions)) | work_of(played.usage, ctx.measured)
        write_json(out / "summary.json", summary)
    ctx.track_outcome(OUT / item, [schema.plain(row) for row in played.trajectories])


def _means(rows: list[ScoreRow]) -> dict[str, float]:
    """The mean of each metric over the questions to which it applies; no mean where it applies to none."""
    means = {}
    for name in ("em", "f1", "subem", "answer_in_passage", "searches"):
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        if values:
            means[name] = sum(values) / len(values)
    return means


def _questions(ctx: Context[Settings]) -> list[Question]:
    """The questions of the splits that are evaluated, or a sample of them."""
    settings, path = ctx.settings, ctx.root / DATA / "questions.jsonl"
    questions = list(read_questions(path))
    require_evaluated(counted(question.split for question in questions), settings.splits, settings.data)
    return choose(questions, settings.splits, settings.max_questions)


def _play(ctx: Context[Settings], record: SystemRecord, questions: list[Question]) -> Evaluation:
    """Start the system with its services, let it play, and close everything."""
    from tasks.evaluate.play import evaluate

    settings, loaded = ctx.settings, loads(ctx.settings)
    retriever = retrieval.open_retriever(ctx.root / INDEX, ctx.root / DATA / "corpus.jsonl")
    bar = ctx.bar((2 if settings.sampled else 1) * len(questions))
    bar.show(0)  # Its clock starts now: the first chunk, too, has a line that says how long the rest takes.
    done = {"greedy": 0, "sampled": 0}

    def progress(mode: str, count: int, em: float) -> None:
        done[mode] = count
        bar.show(sum(done.values()), {"em": em} if mode == "greedy" else {})

    if record.policy is not None:
        require_weights(ctx.root / record.policy, record.policy_sha256)
    models = trained.read(ctx.root / TRAINED / f"{settings.system}-{settings.seed}")
    with services.opened(loaded.system.services, services.Resources(ctx.root, ctx.scratch, models=models)) as called:
        resources = Resources(
            policy=None if record.policy is None else ctx.root / record.policy,
            retriever=retriever,
            top_k=settings.top_k,
            start_generator=lambda policy: loaded.generator.start(policy, settings.dtype),
            services=called,
        )
        with loaded.system.kind.opened(resources) as playing:
            return evaluate(
                playing,
                questions,
                settings.sampled,
                settings.system,
                settings.seed,
                NUM_RECORDED,
                ctx.scratch,
                settings.max_failed_share,
                progress,
                called,
            )


def _used(settings: Settings) -> Row:
    """The settings that readers of the report see."""
    evaluate = {key: getattr(settings, key) for key in ("top_k", "max_questions", "sampled", "max_failed_share")}
    system, _ = divided(settings.playing)
    return {"evaluate": evaluate, "splits": list(settings.splits), "system": system}


def _summary(ctx: Context[Settings], record: SystemRecord, num_questions: int) -> Row:
    return {
        "policy": record.name,
        "seed": record.seed,
        "num_questions": num_questions,
        "data_sha256": ctx.data_sha256,
        "policy_sha256": record.policy_sha256,
        "config_sha256": ctx.config_sha256,
        "settings": _used(ctx.settings),
    }


if __name__ == "__main__":
    main("evaluate", body, Settings, *MATRIX)
