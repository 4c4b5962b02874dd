"""`python -m tasks.tool.measure`: does a trained agent's evidence help another model? `make measure-tool` is short.

The same model reads, for the same held-out questions, the agent's evidence and the passages of a plain search for the
question, and its answers are scored. Differences are paired by question. The stage `tool` measures it in a run.
R-Search Section 5.1 (arXiv 2506.04185; docs/methods/r_search.md)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tasks import conf, program, store
from tasks.data.records import read_questions
from tasks.data.sample import choose
from tasks.reader.reading import Habits, open_folder
from tasks.tool.agent import open_search, opened
from tasks.tool.answers import COUNTS, answered, sources
from tasks.tool.ask import ANY_INDEX
from tasks.tool.gains import gains, markdown

_TABLE_5 = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages: {evidence}\n\nQuestion: {question}\n\nAnswer:"
)


def main(words: list[str] | None = None) -> int:
    """Measure, print the table and write it; returns the exit status."""
    given = _parser().parse_args(words)
    try:
        questions = choose(list(read_questions(given.questions)), (given.split,), given.max_questions)
        search = open_search(given.index, given.corpus)
        index = None if given.any_index else given.index
        with opened(given.policy, search, given.generator, index=index) as agent:
            read = sources(questions, agent, search, given.passages)
        habits = None if (given.reader / "reading.json").is_file() else Habits(_TABLE_5, 64)
        reading = open_folder(given.reader, habits, None, given.batch)
        found = gains([answered(questions, read, reading)])
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
    parser.add_argument("--index", type=Path, default=conf.ROOT / "artifacts/index")
    parser.add_argument("--corpus", type=Path, help="refuse an index that was built from another corpus")
    parser.add_argument("--any-index", action="store_true", help=ANY_INDEX)
    parser.add_argument("--questions", type=Path, default=conf.ROOT / "artifacts/data/questions.jsonl")
    parser.add_argument("--split", default="test", help="split of the questions (test)")
    parser.add_argument("--max-questions", type=int, default=0, help="0 takes all")
    parser.add_argument("--passages", type=int, nargs="+", default=COUNTS, help="of the plain searches (1 3 5)")
    parser.add_argument("--generator", default="plain", help="file of conf/generator that writes the agent's text")
    parser.add_argument("--batch", type=int, default=64, help="pairs that are read at once")
    parser.add_argument("--out", type=Path, help="also write the rows there, as JSON")
    return parser


if __name__ == "__main__":
    program.run(main)
