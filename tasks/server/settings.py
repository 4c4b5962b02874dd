"""Settings of the search server (`conf/server/<name>.yaml`): where it listens, how it batches, what it refuses."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tasks.conf import require, shown
from tasks.server.origins import name_of

LAST_PORT = 65_535


def port(text: str) -> int:
    """A port on a command line; an `argparse` type.

    >>> port("8000")
    8000
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= LAST_PORT):
        raise argparse.ArgumentTypeError(f"found {text[:80]!r}, expected 0 (takes a free one) to {LAST_PORT}")
    return int(text)


def _host(name: str) -> str:
    if name_of(name) != name:
        raise ValueError(f"found {shown(name)}, expected a name without port, such as node7.example.")
    return name


@dataclass(frozen=True)
class Settings:
    """Every bound of the server. A request over a limit is refused with the status in parentheses.

    Attributes:
        host: address to listen on; one that others can reach needs a key (see `tasks.server.__main__`).
        names: further names by which others call this server, where `host` lets them in; another name in a request's
            Host header is refused (403), as `tasks.server.origins` says.
        port: 0 takes a free one.
        num_threads: threads of one search in the index; more than one help if a search takes milliseconds.
        encoder_threads: threads of a sentence encoder; 0 takes as many as there are processors for this process.
        max_batch: queries of one search; concurrent requests are merged up to here.
        max_wait_ms: how long an idle server with several clients waits for further queries; a busy one batches anyway.
        cache_folder: answers on disk, kept over restarts.
        cache_bytes: size of that folder; the oldest answers go first, 0 keeps none anywhere.
        cache_memory_bytes: answers kept in memory besides; those unused longest go first, 0 keeps none there.
        default_top_k: hits a query when the request gives no `topk`.
        max_top_k: largest `topk` (422).
        max_queries: queries in a request (422).
        max_query_chars: characters of a query (422).
        max_answer_bytes: size of an answer (422), about twice the passages in it.
        max_hits: `topk` times queries in a request (422): what one answer may hold.
        max_body_bytes: size of a request's body (413).
        max_requests: requests in work at once (503 with Retry-After).
        max_queue: queries waiting for the search at once (503 with Retry-After).
        max_connections: open connections; one more is closed at once.
        read_timeout_s: from a request's first byte to its last header, and again to the last of its body (408).
        request_timeout_s: from a request's last byte to its answer (504).
        write_timeout_s: how long a client may leave an answer unread before the connection is cut.
        keep_alive_s: how long an idle connection stays open.
        stop_timeout_s: how long requests in work may take to end after SIGTERM.
    """

    host: Annotated[str, Field(min_length=1, description="an address such as 127.0.0.1")] = "127.0.0.1"
    names: tuple[Annotated[str, AfterValidator(_host)], ...] = ()
    port: Annotated[int, Field(ge=0, le=LAST_PORT)] = 8000
    num_threads: PositiveInt = 1
    encoder_threads: NonNegativeInt = 0
    max_batch: PositiveInt = 64
    max_wait_ms: NonNegativeFloat = 1.0
    cache_folder: str = ".scratch/search-cache"
    cache_bytes: NonNegativeInt = 1 << 30
    cache_memory_bytes: NonNegativeInt = 64 << 20
    default_top_k: PositiveInt = 3
    max_top_k: PositiveInt = 1000
    max_queries: PositiveInt = 4096
    max_query_chars: PositiveInt = 16_384
    max_hits: PositiveInt = 20_480
    max_answer_bytes: PositiveInt = 64 << 20
    max_body_bytes: PositiveInt = 4 << 20
    max_requests: PositiveInt = 512
    max_queue: PositiveInt = 16_384
    max_connections: PositiveInt = 2048
    read_timeout_s: PositiveFloat = 10.0
    request_timeout_s: PositiveFloat = 60.0
    write_timeout_s: PositiveFloat = 30.0
    keep_alive_s: PositiveInt = 75
    stop_timeout_s: PositiveInt = 20

    def __post_init__(self) -> None:
        require(self.default_top_k <= self.max_top_k, "default_top_k", self.default_top_k, f"at most {self.max_top_k}")
        require(self.max_top_k <= self.max_hits, "max_top_k", self.max_top_k, f"at most max_hits={self.max_hits}")
        require(self.max_queries <= self.max_queue, "max_queries", self.max_queries, f"at most {self.max_queue}")
