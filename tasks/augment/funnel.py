"""The augmentation: write hops, check them, drop repeated queries, keep queries that enough sources answer.

Questions are processed in batches, so memory does not grow with their number. The result of every check is counted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasks.augment import Rejection, Writer, Written
from tasks.augment.coherence import fault
from tasks.augment.records import HOPS, REJECTED, hops_row, rejected_row
from tasks.augment.settings import AugmentConf
from tasks.augment.sources import Probe, Source, majority
from tasks.store import Row, dump, replacing
from tasks.text import normalize
from tasks.types import Hop, Question


@dataclass
class _Counts:
    """Counts of questions and queries by result."""

    questions: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    hops: Counter[str] = field(default_factory=Counter)
    queries: Counter[str] = field(default_factory=Counter)
    valid: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def rows(self, sources: Sequence[Source]) -> Row:
        """As in `summary.json`."""
        kept = self.queries["kept"]
        names = ("written", "blank", "duplicate", "surplus", "checked", "too_few_sources", "kept")
        return {
            "questions": {
                **{name: self.questions[name] for name in ("read", "without_decomposition", "written", "kept")},
                "rejected": dict(sorted(self.rejected.items())),
            },
            "hops": {name: self.hops[name] for name in ("kept", "without_query")},
            "queries": {
                **{name: self.queries[name] for name in names},
                "valid": {source.name: self.valid[source.name] for source in sources},
                "mean_a_hop": round(kept / self.hops["kept"], 6) if self.hops["kept"] else 0.0,
            },
            "writer_tokens": self.tokens,
        }


def augment(
    questions: Iterable[Question], writer: Writer, sources: Sequence[Source], conf: AugmentConf, out: Path
) -> Row:
    """Write `hops.jsonl` and `rejected.jsonl` to folder `out`, in the order of the questions.

    A question without a decomposition is only counted.

    Returns:
        All counts: `questions`, `hops`, `queries` and `writer_tokens`.

    Raises:
        ServiceError: the writer cannot go on.
        RetrievalError: a search failed.
    """
    counts = _Counts()
    with ExitStack() as stack:
        hops_file = stack.enter_context(replacing(out / HOPS))
        rejected_file = stack.enter_context(replacing(out / REJECTED))
        written = stack.enter_context(closing(writer.write(_decomposed(questions, counts))))
        while batch := list(itertools.islice(written, conf.batch_size)):
            for question, hops, rejections in _filtered(batch, sources, conf, counts):
                if hops:
                    hops_file.write(dump(hops_row(question.id, hops)).encode() + b"\n")
                for rejection in rejections:
                    rejected_file.write(dump(rejected_row(question.id, rejection)).encode() + b"\n")
    return counts.rows(sources)


def _decomposed(questions: Iterable[Question], counts: _Counts) -> Iterator[Question]:
    for question in questions:
        counts.questions["read"] += 1
        if question.decomposition:
            yield question
        else:
            counts.questions["without_decomposition"] += 1


def _filtered(
    batch: Sequence[Written], sources: Sequence[Source], conf: AugmentConf, counts: _Counts
) -> Iterator[tuple[Question, tuple[Hop, ...], list[Rejection]]]:
    """Each question of the batch with its kept hops (none if it was rejected) and its rejections."""
    checked = [_checked(one, conf.num_queries, counts) for one in batch]
    probes = [Probe(query, hop) for hops, _ in checked for hop in hops for query in hop.queries]
    votes = iter(_votes(probes, sources, conf, counts))
    for one, (hops, rejections) in zip(batch, checked, strict=True):
        kept = []
        for number, hop in enumerate(hops, 1):
            queries = []
            for query in hop.queries:
                found = next(votes)
                if len(found) >= majority(len(sources)):
                    queries.append(query)
                    continue
                counts.queries["too_few_sources"] += 1
                names = f" ({', '.join(found)})" if found else ""
                detail = f"valid in {len(found)} of {len(sources)} sources{names}, expected {majority(len(sources))}"
                rejections.append(Rejection("search", "too_few_sources", detail, number, query))
            counts.queries["kept"] += len(queries)
            counts.hops.update(kept=1, without_query=not queries)
            kept.append(replace(hop, queries=tuple(queries)))
        yield one.question, tuple(kept), rejections


def _checked(one: Written, num_queries: int, counts: _Counts) -> tuple[tuple[Hop, ...], list[Rejection]]:
    """The hops with different queries, at most `num_queries` each; no hops if the question is rejected."""
    counts.tokens += one.tokens
    counts.questions["written"] += one.rejection is None
    rejection = one.rejection or fault(one.question, one.hops)
    if rejection is not None:
        counts.rejected[rejection.reason] += 1
        return (), [rejection]
    counts.questions["kept"] += 1
    hops, rejections = [], []
    for number, hop in enumerate(one.hops, 1):
        queries: dict[str, str] = {}
        for query in hop.queries:
            key = normalize(query)
            reason = _unwanted(key, queries, num_queries)
            if reason is None:
                queries[key] = " ".join(query.split())
            else:
                rejections.append(Rejection("query", reason, "", number, query))
            counts.queries.update({"written": 1, reason or "checked": 1})
        hops.append(replace(hop, queries=tuple(queries.values())))
    return tuple(hops), rejections


def _unwanted(key: str, queries: dict[str, str], num_queries: int) -> str | None:
    """Why a query is not searched, None if it is."""
    if not key:
        return "blank"
    if key in queries:
        return "duplicate"
    return "surplus" if len(queries) >= num_queries else None


def _votes(probes: Sequence[Probe], sources: Sequence[Source], conf: AugmentConf, counts: _Counts) -> list[list[str]]:
    """For each probe, the names of the sources in which it is valid."""
    votes: list[list[str]] = [[] for _ in probes]
    for source in sources:
        for names, is_valid in zip(votes, source.valid(probes, conf.top_k, conf.validity), strict=True):
            if is_valid:
                names.append(source.name)
                counts.valid[source.name] += 1
    return votes
