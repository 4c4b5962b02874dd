"""`python -m tasks.tool.measure`: does a trained agent's evidence help another model? `make measure-tool` is short.

The same model reads, for the same held-out questions, the agent's evidence and the passages of a plain search for the
question, and its answers are scored. Differences are paired by question.
R-Search Section 5.1 (arXiv 2506.04185; docs/methods/r_search.md)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks import conf, store, text
from tasks.data.records import read_questions
from tasks.data.sample import choose
from tasks.evaluate.statistics import Interval, bootstrap_means
from tasks.reader.reading import Habits, Reading, open_folder
from tasks.retrieval import Retriever
from tasks.tool.agent import EvidenceAgent, open_search, opened
from tasks.types import Question

EVIDENCE = "agent's evidence"
PASSAGES_READ = "passages that the agent read"
_TABLE_5 = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages: {evidence}\n\nQuestion: {question}\n\nAnswer:"
)


@dataclass(frozen=True)
class Row:
    """One source of what is read, over all questions or those with so many hops.

    Attributes:
        source: what was read.
        hops: of the questions; `all` for all.
        em, f1: of the reader's answers.
        em_gain: exact match minus that of the best plain search, paired by question; None for that search itself.
    """

    source: str
    hops: str
    em: Interval
    f1: Interval
    em_gain: Interval | None


def plain(count: int) -> str:
    """Name of a plain search with so many passages."""
    return f"plain search, {count} passage{'s' if count > 1 else ''}"


def sources(
    questions: Sequence[Question], agent: EvidenceAgent, search: Retriever, counts: Sequence[int]
) -> dict[str, list[str]]:
    """What the reader gets to read for each question, by source."""
    asked = [question.question for question in questions]
    found = agent.find(asked)
    most = search.search(asked, max(counts))
    read = {plain(count): [_joined(hits[:count]) for hits in most] for count in counts}
    return read | {
        EVIDENCE: [one.evidence for one in found],
        PASSAGES_READ: [_joined(one.passages) for one in found],
    }


def _joined(hits: Sequence[Any]) -> str:
    return " ".join(hit.text for hit in hits)


def scores(questions: Sequence[Question], read: Mapping[str, Sequence[str]], reading: Reading) -> dict[str, Any]:
    """Exact match and F1 [Q, 2] of the reader's answers, by source; without anything to read there is no answer."""
    tables = {}
    for source, texts in read.items():
        pairs = [(question.question, one) for question, one in zip(questions, texts, strict=True)]
        answers = dict(zip(pairs, reading.answers(pairs), strict=True))
        replies = [answers[pair] if pair[1] else None for pair in pairs]
        tables[source] = np.array(
            [
                [text.exact_match(reply, question.answers), text.f1(reply, question.answers)]
                for question, reply in zip(questions, replies, strict=True)
            ]
        )
    return tables


def rows(questions: Sequence[Question], tables: Mapping[str, Any]) -> list[Row]:
    """Means with intervals, of all questions and by hops."""
    rivals = [source for source in tables if source.startswith("plain")]
    best = max(rivals, key=lambda source: float(tables[source][:, 0].mean()))
    hops = np.array([question.hops for question in questions])
    parts = {"all": hops > 0} | {str(count): hops == count for count in sorted(set(hops.tolist()))}
    found = []
    for name, chosen in parts.items():
        for source, table in tables.items():
            columns = np.column_stack([table[chosen], table[chosen, 0] - tables[best][chosen, 0]])
            em, f1, gain = bootstrap_means(columns, bounds=[(0, 1), (0, 1), (-1, 1)])
            found.append(Row(source, name, em, f1, None if source == best else gain))
    return found


def markdown(found: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = [
        "| what the model reads | hops | questions | EM | F1 | EM against the best plain search |",
        "|---|---|---:|---|---|---|",
    ]
    for row in found:
        cells = [_shown(one) for one in (row.em, row.f1, row.em_gain)]
        lines.append(f"| {row.source} | {row.hops} | {row.em.num_questions} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(one: Interval | None) -> str:
    return "-" if one is None else f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]"


def main(words: list[str] | None = None) -> int:
    """Measure, print the table and write it; returns the exit status."""
    given = _parser().parse_args(words)
    try:
        questions = choose(list(read_questions(given.questions)), (given.split,), given.max_questions)
        search = open_search(given.index, given.corpus)
        with opened(given.policy, search, given.generator) as agent:
            read = sources(questions, agent, search, given.passages)
        habits = None if (given.reader / "reading.json").is_file() else Habits(_TABLE_5, 64)
        reading = open_folder(given.reader, habits, None, given.batch)
        found = rows(questions, scores(questions, read, reading))
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    print(markdown(found), flush=True)
    if given.out is not None:
        store.write_json(given.out, [conf.plain(row) for row in found])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tasks.tool.measure", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--policy", type=Path, required=True, help="what a run trained: artifacts/train/r_search-0")
    parser.add_argument(
        "--reader", type=Path, required=True, help="model folder, such as artifacts/models/tiny_llama-1"
    )
    parser.add_argument("--index", type=Path, default=Path("artifacts/index"))
    parser.add_argument("--corpus", type=Path, help="refuse an index that was built from another corpus")
    parser.add_argument("--questions", type=Path, default=Path("artifacts/data/questions.jsonl"))
    parser.add_argument("--split", default="test", help="split of the questions (test)")
    parser.add_argument("--max-questions", type=int, default=0, help="0 takes all")
    parser.add_argument("--passages", type=int, nargs="+", default=[1, 3, 5], help="of the plain searches (1 3 5)")
    parser.add_argument("--generator", default="plain", help="file of conf/generator that writes the agent's text")
    parser.add_argument("--batch", type=int, default=64, help="pairs that are read at once")
    parser.add_argument("--out", type=Path, help="also write the rows there, as JSON")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
