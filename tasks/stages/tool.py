"""Stage `tool`: does a trained agent's evidence help another model? Its answers, into `artifacts/tool/<tool>-<seed>/`.

The agent searches for the held-out questions and writes evidence; a reader answers from it, and from a plain search. A
reader that this pipeline trains is that of the next seed, because the agent's own one has paid for the evidence.
R-Search Section 5.1 (arXiv 2506.04185; docs/methods/r_search.md)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks import parts, retrieval, services, trained
from tasks.data.records import read_questions
from tasks.data.sample import choose
from tasks.model import Dtype
from tasks.records import schema, systems
from tasks.records.read_answers import ANSWERS, SUMMARY
from tasks.records.usage import usages, work_of
from tasks.runner import Context, main
from tasks.store import replacing_folder, write_json
from tasks.systems import Named, build

if TYPE_CHECKING:
    from tasks.generate import Generator, GeneratorConf
    from tasks.plan import RunSettings
    from tasks.types import Question

MATRIX = ("tool", "seed")
DATA, INDEX, TRAINED = Path("artifacts/data"), Path("artifacts/index"), Path("artifacts/train")
OUT = Path("artifacts/tool")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        tool, seed: name of the system whose evidence is read, and its seed.
        playing: kind and settings with which it plays.
        reader: kind and settings of the service that answers.
        models: models of this pipeline that the service loads.
        reader_seed: their seed.
        generator: kind and settings of the generator, which writes the policy's text.
        retriever: settings of the backend that opens the index.
        splits: of the questions.
        max_questions: see `evaluate` in `params.yaml`.
        num_threads, dtype: of forward passes, as in training.
    """

    tool: str
    seed: int
    playing: dict[str, Any]
    reader: dict[str, Any]
    models: tuple[str, ...]
    reader_seed: int
    generator: dict[str, Any]
    retriever: dict[str, Any]
    splits: tuple[str, ...]
    max_questions: int
    num_threads: int
    dtype: Dtype


def settings(run: RunSettings, tool: str, seed: int) -> Settings:
    """The system with this run's generator, index and questions, and its reader with the next seed."""
    seeds, training = run.params.seeds, run.training()
    reader, models = run.tool_reader(tool)
    return Settings(
        tool=tool,
        seed=seed,
        playing=run.system(tool),
        reader=reader,
        models=models,
        reader_seed=seeds[(seeds.index(seed) + 1) % len(seeds)],
        generator=run.generator(),
        retriever=run.retriever(),
        splits=run.data.evaluate_splits,
        max_questions=run.evaluation.max_questions,
        num_threads=training.num_threads,
        dtype=training.dtype,
    )


@dataclass(frozen=True)
class Loaded:
    """The parts that the stage loads by kind.

    Attributes:
        system: settings with which the policy plays.
        reader: settings of the service that answers.
        generator: settings of the generator, which writes the policy's text.
        retriever: settings of the backend that opens the index.
    """

    system: Named
    reader: services.Kind
    generator: GeneratorConf
    retriever: Any


def loads(settings: Settings) -> Loaded:
    """Build what the settings name."""
    return Loaded(
        build(settings.playing, "playing"),
        cast("services.Kind", parts.make(services.ROOM, settings.reader, "reader")),
        cast("GeneratorConf", parts.make("generate", settings.generator, "generator")),
        retrieval.settings_of(settings.retriever, "retriever"),
    )


def body(ctx: Context[Settings]) -> None:
    """Collect what there is to read, let the reader answer, and write its answers."""
    from tasks.device import use_threads
    from tasks.tool.answers import answered

    settings, loaded = ctx.settings, loads(ctx.settings)
    item = f"{settings.tool}-{settings.seed}"
    use_threads(settings.num_threads)
    questions = choose(
        list(read_questions(ctx.root / DATA / "questions.jsonl")), settings.splits, settings.max_questions
    )
    policy_sha256, read = _read(ctx, loaded, questions)

    models = trained.find(ctx.root, settings.models, settings.reader_seed)
    resources = services.Resources(ctx.root, ctx.scratch, models=models)
    with services.opened({"reader": loaded.reader}, resources) as called:
        rows = answered(questions, read, called["reader"])
        used = work_of(usages(called), ctx.measured)

    hashes = {
        "data_sha256": ctx.data_sha256,
        "policy_sha256": policy_sha256,
        "config_sha256": ctx.config_sha256,
    }
    with replacing_folder(ctx.root / OUT / item) as out:
        schema.write(out / ANSWERS, rows)
        write_json(out / SUMMARY, {"num_questions": len(questions), **used, **hashes})


def _read(ctx: Context[Settings], loaded: Loaded, questions: list[Question]) -> tuple[str, dict[str, list[str]]]:
    """Hash of the policy, and what the reader gets for each question, by source."""
    from tasks.tool.agent import at_play
    from tasks.tool.answers import sources

    settings = ctx.settings
    record = systems.read(ctx.root / TRAINED / f"{settings.tool}-{settings.seed}")
    search = retrieval.open_retriever(ctx.root / INDEX, ctx.root / DATA / "corpus.jsonl")
    bar = ctx.bar(len(questions))

    policy = ctx.root / cast(str, record.policy)

    def start(folder: Path) -> Generator:
        return loaded.generator.start(folder, settings.dtype)

    with at_play(loaded.system.kind, policy, record.policy_sha256, search, start) as agent:
        return record.policy_sha256, sources(questions, agent, search, show=bar.show)


if __name__ == "__main__":
    main("tool", body, Settings, *MATRIX)
