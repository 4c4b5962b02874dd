"""Stage `augment`: sub-questions with reference queries for the questions of `splits`, into `artifacts/augment`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import conf, parts, retrieval, services, store
from tasks.augment import Writer
from tasks.augment.funnel import augment
from tasks.augment.openai import OpenAIWriter
from tasks.augment.records import HOPS, SUMMARY
from tasks.augment.rules import RulesWriter
from tasks.augment.settings import AugmentConf
from tasks.augment.sources import Source, is_lexical
from tasks.data.expectations import check
from tasks.data.records import read_questions
from tasks.records.usage import usages, work_of
from tasks.runner import Context, main
from tasks.services import Chat
from tasks.store import DataError, Row
from tasks.types import Question

if TYPE_CHECKING:
    from tasks.plan import RunSettings

DATA = Path("artifacts/data")
INDEX = Path("artifacts/index")
OUT = Path("artifacts/augment")
DOCS = Path(".scratch/data_docs")
OWN_INDEX = "index"


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        augment: the writer, the questions and the search sources.
        retrievers: name of a source -> backend and its settings.
        chat: the service of the model that writes; None if rules write.
    """

    augment: AugmentConf
    retrievers: dict[str, dict[str, Any]]
    chat: dict[str, Any] | None


def settings(run: RunSettings) -> Settings:
    """The file of `conf/augment/`, and the retrievers and the service that it names."""
    chosen = run.load(AugmentConf, "augment", run.params.augment)
    names = {name: "" if name == OWN_INDEX else name for name in chosen.sources}
    retrievers = {name: run.retriever(file) for name, file in names.items()}
    return Settings(chosen, retrievers, None if chosen.chat is None else run.service("chat", chosen.chat))


@dataclass(frozen=True)
class Loaded:
    """The parts that the stage loads by kind: the backend of each source, by name, and the model that writes."""

    retrievers: dict[str, Any]
    chat: services.Kind | None


def loads(settings: Settings) -> Loaded:
    """Build what the settings name."""
    retrievers = {name: retrieval.settings_of(tree, f"sources: {name}") for name, tree in settings.retrievers.items()}
    return Loaded(retrievers, None if settings.chat is None else parts.make(services.ROOM, settings.chat, "chat"))


def body(ctx: Context[Settings]) -> None:
    """Write `artifacts/augment/`: `hops.jsonl`, `rejected.jsonl` and `summary.json`."""
    settings, loaded = ctx.settings.augment, loads(ctx.settings)
    sources = [_source(ctx, name, backend) for name, backend in loaded.retrievers.items()]
    total = _num_questions(ctx.root, settings)
    questions = ctx.progress(_questions(ctx.root, settings), total)

    with store.replacing_folder(ctx.root / OUT) as work:
        with _writer(ctx, loaded.chat) as (writer, name, called):
            counts = augment(questions, writer, sources, settings, work)
        summary = {
            **counts,
            **work_of(usages(called), ctx.measured),
            "writer": name,
            "settings": conf.plain(settings),
            "data_sha256": ctx.data_sha256,
        }
        if not counts["hops"]["kept"]:
            summary["note"] = _why_empty(counts, settings)
        else:
            _check(ctx.root, work)
        store.write_json(work / SUMMARY, summary)
    _report(ctx, summary)


@contextlib.contextmanager
def _writer(ctx: Context[Settings], chat: services.Kind | None) -> Iterator[tuple[Writer, str, dict[str, Chat]]]:
    """The writer, its name in the summary, and the chat model that it asks, which is closed when the block ends."""
    settings = ctx.settings.augment
    if chat is None or settings.prompt is None:
        yield RulesWriter(), settings.writer, {}
        return
    with chat.opened(services.Resources(ctx.root, ctx.scratch)) as model:
        writer = OpenAIWriter(model, settings.prompt, settings.num_queries)
        yield writer, f"openai: {model.model}", {"chat": model}


def _questions(root: Path, settings: AugmentConf) -> Iterator[Question]:
    questions = read_questions(root / DATA / "questions.jsonl")
    return (question for question in questions if question.split in settings.splits)


def _num_questions(root: Path, settings: AugmentConf) -> int:
    datasets = store.read_json(root / DATA / "manifest.json")["questions"].values()
    return sum(dataset["splits"].get(split, 0) for dataset in datasets for split in settings.splits)


def _source(ctx: Context[Settings], name: str, settings: Any) -> Source:
    """The index of this run, or one that this stage builds with the settings of another retriever."""
    corpus = ctx.root / DATA / "corpus.jsonl"
    if name == OWN_INDEX:
        return Source(name, retrieval.open_retriever(ctx.root / INDEX, corpus), is_lexical(settings))
    out, scratch = ctx.scratch / "index" / name, ctx.root / retrieval.SCRATCH
    return Source(name, retrieval.open_or_build(corpus, out, settings, scratch, ctx.progress), is_lexical(settings))


def _check(root: Path, work: Path) -> None:
    try:
        check("augmented", [work / HOPS], root / DOCS, corpus=root / DATA / "corpus.jsonl")
    except DataError as error:  # The working folder is deleted with the error, so its path would mislead.
        raise DataError(str(error).replace(f"{work}/", "new ").replace(f"{root}/", "")) from None


def _why_empty(counts: Row, settings: AugmentConf) -> str:
    read, without = counts["questions"]["read"], counts["questions"]["without_decomposition"]
    splits = ", ".join(settings.splits)
    if read == without:
        return f"none of the {read} questions of split {splits} has a decomposition, so there is nothing to augment"
    return f"all {read - without} questions of split {splits} with a decomposition were rejected; see rejected.jsonl"


def _report(ctx: Context[Settings], summary: Row) -> None:
    questions, hops, queries = (summary[name] for name in ("questions", "hops", "queries"))
    ctx.track_data("augment", questions["read"])
    named = {f"questions_{name}": value for name, value in questions.items() if name != "rejected"}
    named |= {f"rejected_{name}": value for name, value in questions["rejected"].items()}
    named |= {f"hops_{name}": value for name, value in hops.items()}
    named |= {f"queries_{name}": value for name, value in queries.items() if name != "valid"}
    named |= {f"valid_{name}": value for name, value in queries["valid"].items()}

    ctx.log(0, {name: float(value) for name, value in named.items()})
    if "note" in summary:
        print(f"note: {summary['note']}", flush=True)
    print(
        f"{questions['kept']} of {questions['read']} questions kept, {hops['kept']} sub-questions, "
        f"{queries['kept']} of {queries['checked']} queries kept ({queries['mean_a_hop']:.2f} a sub-question)",
        flush=True,
    )


if __name__ == "__main__":
    main("augment", body, Settings, clean=True)
