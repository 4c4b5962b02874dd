"""`python -m tasks.tool.chat_server`: chat with a trained policy by OpenAI's protocol; `make chat-server` is short.

Limits, key, options and exit status are those of the search server (`tasks.server`), and so are the guards against
pages of other servers and against headers without end. What an answer holds is said in `tasks.tool.chat_protocol`.
"""

from __future__ import annotations

import argparse
import sys

from tasks import program
from tasks.server.__main__ import address_of, api_key, parser, settings_of
from tasks.server.problems import error_object
from tasks.store import OutageError
from tasks.tool.ask import add_words, asker_of
from tasks.tool.script import one_line


def main(words: list[str] | None = None) -> int:
    """Read the command line and serve until SIGTERM or Ctrl-C; returns the exit status."""
    given = _parser().parse_args(words)
    try:
        _serve(given)
    except (ValueError, OutageError) as error:
        print(one_line(error), file=sys.stderr, flush=True)
        return 1
    return 0


def _serve(given: argparse.Namespace) -> None:
    from tasks.server.listening import Server, listening
    from tasks.tool.chat_app import Plays, make_app

    settings = settings_of(given)
    key = api_key(settings.host, given.without_key)
    with listening(settings) as listener, asker_of(given, given.corpus) as asker:
        plays = Plays(asker, given.max_waiting + 1, settings.max_requests)
        made = int(asker.policy.weights.stat().st_mtime)

        def stopping() -> None:
            plays.state = "stopping"

        server = Server(make_app(asker, plays, settings, key, made), settings, stopping, error_object)
        address = address_of(settings, listener)
        ready = f"ready: {asker.about}, at {address} (chat completions below /v1). Ctrl-C ends it."
        try:
            server.answer(listener, lambda: print(ready, flush=True))
        finally:
            plays.close()


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5):
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, expected a number of 0 to 99999")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    known = parser("python -m tasks.tool.chat_server", "Chat with a trained policy by OpenAI's protocol")
    add_words(known)
    known.add_argument("--max-waiting", type=_number, default=16, help="questions that may wait for their turn (16)")
    return known


if __name__ == "__main__":
    program.run(main)
