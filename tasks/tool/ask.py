"""`python -m tasks.tool.ask`: a trained policy answers questions before your eyes; `make ask` is the short way.

With `--question` it plays that one. Without, it reads a question a line, until the end of the input. What it thinks,
searches, finds and answers goes to standard output while it comes about, and after each question a line of what it
cost. Exit status: 0, or 1 after an error, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import program
from tasks.conf import ROOT
from tasks.store import OutageError
from tasks.tool.questions import require_text
from tasks.tool.script import Script, harmless, one_line

if TYPE_CHECKING:
    from tasks.tool.asking import Asker

ANY_INDEX = "play the policy also over an index that it was not trained over"
_PROMPT = "question> "
_INTERRUPTED = 130  # As shells report SIGINT.


def main(words: list[str] | None = None) -> int:
    """Answer what the command line asks; returns the exit status."""
    given = _parser().parse_args(words)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        if given.question is not None:
            require_text(given.question)  # Before a model is loaded, which takes seconds or minutes.
        with contextlib.ExitStack() as stack:
            with contextlib.redirect_stdout(sys.stderr):  # What loading prints is no part of a play.
                asker = stack.enter_context(asker_of(given))
            print(asker.about, file=sys.stderr, flush=True)
            return _answer(asker, given.question)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, OutageError) as error:
        return _tell(error)


@contextlib.contextmanager
def asker_of(given: argparse.Namespace, corpus: Path | None = None) -> Iterator[Asker]:
    """The asker of a command line that has the words of `add_words`; see `search_opened` for the corpus.

    Raises:
        ValueError: an unknown policy, retriever or generator, or a missing index.
        OutageError: the search engine is down.
    """
    from tasks.tool import policies

    policy = policies.find(given.policy)  # Before libraries load, which takes seconds.
    from tasks.tool.asking import opened, search_opened

    with (
        search_opened(given.index, given.retriever, corpus=corpus, policy=None if given.any_index else policy) as (
            search,
            about,
        ),
        opened(policy, search, about, given.generator) as asker,
    ):
        yield asker


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the words that name a policy and its search engine."""
    parser.add_argument("--policy", required=True, help="name or folder of a policy: search_r1_grpo-0, base-0")
    parser.add_argument("--retriever", help="file of conf/retriever, if its index is not the one of --index")
    parser.add_argument("--generator", default="plain", help="file of conf/generator that writes its text (plain)")
    parser.add_argument("--any-index", action="store_true", help=ANY_INDEX)


def _answer(asker: Asker, question: str | None) -> int:
    """Play the question, or those of standard input; the status of the last error, 0 without one."""
    if question is not None:
        _play(asker, question)
        return 0
    status = 0
    for line in _lines():
        try:
            if line.strip():
                _play(asker, line)
        except (ValueError, OutageError) as error:
            status = _tell(error)
    return 0 if sys.stdin.isatty() else status


def _lines() -> Iterator[str]:
    """The lines of standard input; somebody who types them is asked for each."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  # Lines that are typed can be edited and called back.

    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            print(file=sys.stderr)
            return


def _play(asker: Asker, text: str) -> None:
    """Play one question, and show it while it is played.

    Raises:
        QuestionError: no question that the policy can take.
        RetrievalError: a search failed.
    """
    from tasks.retrieval import RetrievalError

    asked = asker.checked(text.strip("\r\n"))
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
    script = Script(has_colours=is_terminal)

    played = asker.ask(asked, lambda event: print(script.text(event), end="", flush=True))
    print(script.end(), end="")
    if played.episode.status == "failed":
        raise RetrievalError(played.outcome)
    # The answer stands there already, unless the grammar reads another one from what was written, or none.
    if played.episode.answer != script.answer.strip():
        print(played.outcome or f"answer: {harmless(played.episode.answer or '')}")
    print(f"({played.cost})", flush=True)


def _tell(error: Exception) -> int:
    print(one_line(error), file=sys.stderr, flush=True)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tasks.tool.ask", description="A trained policy answers questions.")
    parser.add_argument("--question", help="without it, a question is read from each line of standard input")
    add_words(parser)
    parser.add_argument("--index", type=Path, default=ROOT / "artifacts/index", help="folder of the index")
    return parser


if __name__ == "__main__":
    program.run(main)
