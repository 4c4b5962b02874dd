"""Stage `augment`: sub-questions with reference queries for the questions of `splits`, into `artifacts/augment`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tasks import conf, retrieval, services, store
from tasks.augment import Writer
from tasks.augment.funnel import augment
from tasks.augment.openai import OpenAIWriter
from tasks.augment.records import HOPS, SUMMARY
from tasks.augment.rules import RulesWriter
from tasks.augment.settings import AugmentConf
from tasks.augment.sources import Source, is_lexical
from tasks.data.expectations import check
from tasks.data.records import read_questions
from tasks.retrieval import manifest as manifests
from tasks.runner import Context, run
from tasks.store import DataError, Row
from tasks.types import Question

DATA = Path("artifacts/data")
INDEX = Path("artifacts/index")
OUT = Path("artifacts/augment")
DOCS = Path(".scratch/data_docs")
OWN_INDEX = "index"


def body(ctx: Context) -> None:
    """Write `artifacts/augment/`: `hops.jsonl`, `rejected.jsonl` and `summary.json`."""
    settings = conf.load(AugmentConf, "augment", ctx.params.augment, root=ctx.root)
    sources = [_source(ctx, name) for name in settings.sources]
    total = _num_questions(ctx.root, settings)
    questions = ctx.progress(_questions(ctx.root, settings), total)
    with store.replacing_folder(ctx.root / OUT) as work:
        with _writer(ctx, settings) as (writer, name):
            counts = augment(questions, writer, sources, settings, work)
        summary = {
            **counts,
            "writer": name,
            "settings": conf.plain(settings),
            "data_sha256": ctx.data_sha256,
        }
        if not counts["hops"]["kept"]:
            summary["note"] = _nothing(counts, settings)
        else:
            _check(ctx.root, work)
        store.write_json(work / SUMMARY, summary)
    _tell(ctx, summary)


@contextlib.contextmanager
def _writer(ctx: Context, settings: AugmentConf) -> Iterator[tuple[Writer, str]]:
    """The writer and what it is called in the summary; a chat model is opened and closed."""
    if settings.chat is None or settings.prompt is None:
        yield RulesWriter(), settings.writer
        return
    kind = services.load("chat", settings.chat, ctx.root)
    with kind.opened(services.Resources(ctx.root, ctx.scratch)) as chat:
        yield OpenAIWriter(chat, settings.prompt, settings.num_queries), f"openai: {chat.model}"


def _questions(root: Path, settings: AugmentConf) -> Iterator[Question]:
    return (one for one in read_questions(root / DATA / "questions.jsonl") if one.split in settings.splits)


def _num_questions(root: Path, settings: AugmentConf) -> int:
    datasets = store.read_json(root / DATA / "manifest.json")["questions"].values()
    return sum(one["splits"].get(split, 0) for one in datasets for split in settings.splits)


def _source(ctx: Context, name: str) -> Source:
    """This run's own index, or one that is built for this stage from a file of `conf/retriever/`."""
    corpus = ctx.root / DATA / "corpus.jsonl"
    if name == OWN_INDEX:
        found = retrieval.open_retriever(ctx.root / INDEX, corpus)
        used = manifests.read(ctx.root / INDEX).settings
        return Source(name, found, is_lexical(retrieval.settings_of(used, str(INDEX))))
    settings = retrieval.load_settings(name, ctx.root)
    out, scratch = ctx.scratch / "index" / name, ctx.root / retrieval.SCRATCH
    return Source(name, retrieval.open_or_build(corpus, out, settings, scratch, ctx.progress), is_lexical(settings))


def _check(root: Path, work: Path) -> None:
    try:
        check("augmented", [work / HOPS], root / DOCS, corpus=root / DATA / "corpus.jsonl")
    except DataError as error:  # The file vanishes with the error, so its path would mislead.
        raise DataError(str(error).replace(f"{work}/", "new ").replace(f"{root}/", "")) from None


def _nothing(counts: Row, settings: AugmentConf) -> str:
    read, without = counts["questions"]["read"], counts["questions"]["without_decomposition"]
    splits = ", ".join(settings.splits)
    if read == without:
        return f"none of the {read} questions of split {splits} has a decomposition, so there is nothing to augment"
    return f"all {read - without} questions of split {splits} with a decomposition were rejected; see rejected.jsonl"


def _tell(ctx: Context, summary: Row) -> None:
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
    run("augment", body, clean=True)
