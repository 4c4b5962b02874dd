"""`python -m tasks.tool`: serve a trained agent's evidence until SIGTERM or Ctrl-C; `make evidence-server` is short.

Protocol, limits, key and exit status are those of the search server (`tasks.server`): a query is a question, and its
hits are the evidence that the agent wrote and the passages that it read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks import program, store
from tasks.retrieval import Retriever
from tasks.server.__main__ import parser, serve
from tasks.server.settings import Settings
from tasks.tool.ask import ANY_INDEX


def main(words: list[str] | None = None) -> int:
    """Read the command line and serve; returns the exit status."""
    known = parser("python -m tasks.tool", __doc__ or "")
    known.add_argument("--policy", type=Path, required=True, help="what a run trained: artifacts/train/r_search-0")
    known.add_argument("--generator", default="plain", help="file of conf/generator that writes its text (plain)")
    known.add_argument("--any-index", action="store_true", help=ANY_INDEX)
    return serve(known.parse_args(words), _service)


def _service(given: argparse.Namespace, settings: Settings, changed: Callable[[Any], None]) -> Any:
    from tasks.server.app import SearchService
    from tasks.tool.agent import opened
    from tasks.tool.retriever import EvidenceRetriever

    class EvidenceService(SearchService):
        """The search server with an agent in front of its index."""

        def load(self) -> tuple[Retriever, dict[str, Any]]:
            """See `SearchService`; answers are kept by the hash of policy, settings and index together."""
            index, served = super().load()
            folder = None if given.any_index else given.index
            self._stack = contextlib.ExitStack()
            self._agent = agent = self._stack.enter_context(opened(given.policy, index, given.generator, index=folder))
            identity = {"backend": "evidence", "index_sha256": store.digest(served["index_sha256"], agent.identity)}
            return EvidenceRetriever(agent, served["num_passages"]), {**served, **identity}

        async def admit(self, queries: Sequence[str]) -> None:
            """See `SearchService`."""
            await asyncio.to_thread(self._agent.check, queries)

    return EvidenceService(given.index, settings, given.corpus, changed)


if __name__ == "__main__":
    program.run(main)
