"""Search over HTTP: the client of `tasks.server`, and with `protocol: search_r1` of Search-R1's retrieval server.

An index of this backend is only a manifest, which names the index that the server had when the manifest was made.
Opening it asks the server again and refuses another corpus or another index. Address and key of the server do not
belong to a result, so they come from the environment: SEARCH_SERVER_URL and SEARCH_SERVER_API_KEY.

A failed search is repeated with growing random pauses. After several failures in a row a circuit breaker lets searches
fail at once for a while, so that an outage costs seconds and not hours. An incomplete answer is an error, never an
empty result.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from tasks import conf, store
from tasks.data.records import split_contents
from tasks.retrieval import Progress, QueryError, RetrievalError, check_request
from tasks.retrieval.manifest import NAME, Built, Manifest
from tasks.retrieval.passages import count_passages
from tasks.store import DataError
from tasks.text import composed, spelled
from tasks.types import Hit

T = TypeVar("T")

URL = "SEARCH_SERVER_URL"
KEY_VARIABLE = "SEARCH_SERVER_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
PROTOCOL = 1
"""Version of the protocol between `tasks.server` and this client; `/health` contains it."""
INDEX_HEADER = "x-index-sha256"
"""The header of an answer of `tasks.server` with the hash of its index."""

_OUTAGE = (408, 429, 502, 503, 504)
_OF_QUERIES = (400, 413, 422)
_CONNECT_S = 10.0
_SHOWN = 200
_PROBE = "capital city"


@dataclass(frozen=True)
class Settings:
    """`conf/retriever/*.yaml` with `backend: remote`.

    Attributes:
        protocol: `breadcrumb` reads from `/health` what is served and checks it. `search_r1` is for servers without
            `/health`: only the shape of answers is checked, and every query must have `top_k` hits.
        batch_size: queries in one request.
        max_in_flight: requests at once.
        timeout_s: for a whole answer; a connection gets at most 10 s of it.
        retries: how often a failed request is repeated.
        backoff_s: pause before the first repetition, doubled for each further one, times a random number in [0.5, 1].
        max_backoff_s: longest pause, even if the server asks for a longer one.
        breaker_failures: number of failures in a row, over all requests, after which searches fail at once.
        breaker_cool_down_s: how long searches fail at once; then one request is tried again.
        max_response_bytes: size of one answer.
    """

    backend: Literal["remote"]
    protocol: Literal["breadcrumb", "search_r1"] = "breadcrumb"
    batch_size: PositiveInt = 64
    max_in_flight: PositiveInt = 4
    timeout_s: PositiveFloat = 70.0
    retries: NonNegativeInt = 4
    backoff_s: PositiveFloat = 0.5
    max_backoff_s: PositiveFloat = 10.0
    breaker_failures: PositiveInt = 10
    breaker_cool_down_s: PositiveFloat = 15.0
    max_response_bytes: PositiveInt = 64 << 20


@dataclass(frozen=True)
class Served:
    """The index that a server says it serves, and the limits of a request; None where it does not say."""

    num_passages: int
    backend: str | None = None
    index_sha256: str | None = None
    corpus_sha256: str | None = None
    max_queries: int | None = None
    max_hits: int | None = None
    max_top_k: int | None = None


def contents(title: str, text: str) -> str:
    r"""A passage as Search-R1 writes it.

    >>> contents("Bern", "A city.")
    '"Bern"\nA city.'
    """
    return f'"{title}"\n{text}'


def build(
    corpus: Path, corpus_sha256: str, out: Path, settings: Settings, scratch: Path | None, progress: Progress
) -> Built:
    """Record which index the server serves; see `tasks.retrieval.build`.

    Raises:
        DataError: no server there, or one that serves another corpus.
    """
    served = _served(Client(settings), corpus_sha256, count_passages(corpus))
    details = {"protocol": settings.protocol, "served_backend": served.backend, "index_sha256": served.index_sha256}
    return Built(served.num_passages, details)


def open_index(index_dir: Path, manifest: Manifest, num_threads: int = 1) -> RemoteRetriever:
    """Open a folder that `build` filled; `num_threads` is ignored, because the server searches.

    Raises:
        DataError: no server there, or one that serves another corpus or another index.
    """
    settings = conf.fill(Settings, manifest.settings, str(index_dir / NAME))
    client = Client(settings)
    served = _served(client, manifest.corpus_sha256, manifest.num_passages)
    if served.index_sha256 != manifest.details.get("index_sha256"):
        raise DataError(
            f"{client.address}: serves index {str(served.index_sha256)[:12]}, {index_dir / NAME} was made when it "
            f"served {str(manifest.details.get('index_sha256'))[:12]}. Serve that index, or take this one: "
            "dvc repro --force --single-item index, then dvc repro."
        )
    client.index_sha256 = served.index_sha256
    return RemoteRetriever(client, served)


class RemoteRetriever:
    """Searches on a server; see `tasks.retrieval.Retriever`. Threads may share it."""

    def __init__(self, client: Client, served: Served) -> None:
        self._client, self._served = client, served
        self._threads = ThreadPoolExecutor(client.settings.max_in_flight, thread_name_prefix="search")

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query, with the scores of the server's backend."""
        check_request(queries, top_k)
        count, size = min(top_k, self._served.num_passages), self._client.settings.batch_size
        if count > (most := self._served.max_top_k or count):
            raise ValueError(f"top_k={top_k}: the server gives at most {most} hits (its max_top_k). Ask for less.")
        size = min(size, self._served.max_queries or size, max(1, (self._served.max_hits or size * count) // count))
        parts = [queries[start : start + size] for start in range(0, len(queries), size)]
        run = map if len(parts) < 2 else self._threads.map
        return [hits for found in run(lambda part: self._ask(part, count), parts) for hits in found]

    def _ask(self, queries: list[str], count: int) -> list[list[Hit]]:
        request = {"queries": [composed(query) for query in queries], "topk": count, "return_scores": True}
        return self._client.call("POST", "/retrieve", request, lambda tree: self._hits(tree, len(queries), count))

    def _hits(self, tree: Any, num_queries: int, count: int) -> list[list[Hit]]:
        results = tree.get("result") if isinstance(tree, dict) else None
        if not isinstance(results, list) or len(results) != num_queries:
            found = f"{len(results)} results" if isinstance(results, list) else f"{type(results).__name__}"
            raise ValueError(f"result: found {found}, expected a list of {num_queries}")
        with_titles = self._client.settings.protocol == "breadcrumb"
        for place, hits in enumerate(results):
            if not isinstance(hits, list) or len(hits) != count:
                found = f"{len(hits)} hits" if isinstance(hits, list) else f"{type(hits).__name__}"
                raise ValueError(f"result[{place}]: found {found}, expected a list of {count}")
        found_hits = [
            [_hit(one, with_titles, f"result[{i}][{j}]") for j, one in enumerate(hits)]
            for i, hits in enumerate(results)
        ]
        # Other servers may repeat passages or sort otherwise.
        for place, hits in enumerate(found_hits if with_titles else []):
            if len({hit.passage_id for hit in hits}) != count:
                raise ValueError(f"result[{place}]: found a passage twice, expected {count} passages")
            if any(one.score < other.score for one, other in itertools.pairwise(hits)):
                raise ValueError(f"result[{place}]: found a better hit after a worse one, expected the best first")
        return found_hits


def _hit(one: Any, with_titles: bool, place: str) -> Hit:
    """One hit of an answer.

    Raises:
        ValueError: a field is missing or of another type, or the score is no finite number.
    """
    document = one.get("document") if isinstance(one, dict) else None
    if not isinstance(document, dict):
        raise ValueError(f"{place}: found no document, expected an object with document and score")
    score = one.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError(f"{place}.score: found {score!r:.40}, expected a finite number")
    whole = ""
    if with_titles:
        name, title, text = (_text(document.get(name), f"{place}.document.{name}") for name in ("id", "title", "text"))
    else:
        whole = _text(document.get("contents"), f"{place}.document.contents")
        name = document.get("id", store.digest(whole))  # Search-R1's BM25 server gives no ids.
        name = _text(str(name) if isinstance(name, int) else name, f"{place}.document.id")
        title, text = split_contents(spelled(whole))
    if not (text if with_titles else whole).strip():
        raise ValueError(f"{place}: found a passage without text, expected a whole one")
    return Hit(passage_id=name, score=float(score), title=title, text=text)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: found {type(value).__name__}, expected text")
    if any("\ud800" <= one <= "\udfff" for one in value):
        raise ValueError(f"{place}: found half of a surrogate pair, expected text")
    return value


def _served(client: Client, corpus_sha256: str, num_passages: int) -> Served:
    """The index of the server, after a check that it has this corpus.

    Raises:
        DataError: no server there, or one that serves another corpus.
    """
    try:
        is_ours = client.settings.protocol == "breadcrumb"
        served = client.call("GET", "/health", None, _health) if is_ours else Served(num_passages)
        RemoteRetriever(client, served).search([_PROBE], 1)  # A missing key fails here instead of in the first step.
        if not is_ours:
            return served
    except RetrievalError as error:
        raise DataError(f"{error} {_ADVICE}") from None
    if (served.corpus_sha256, served.num_passages) != (corpus_sha256, num_passages):
        raise DataError(
            f"{client.address}: serves a corpus of {served.num_passages} passages with sha256 "
            f"{str(served.corpus_sha256)[:12]}, expected {num_passages} and {corpus_sha256[:12]}. "
            "Serve an index of this corpus."
        )
    return served


_ADVICE = f"Start one (make search-server), or name it in {URL}; protocol: search_r1 is for servers without /health."


def _health(tree: Any) -> Served:
    if not isinstance(tree, dict) or tree.get("protocol") != PROTOCOL:
        found = tree.get("protocol") if isinstance(tree, dict) else type(tree).__name__
        raise ValueError(f"protocol: found {found!r:.40}, expected {PROTOCOL}")
    names = ("num_passages", "backend", "index_sha256", "corpus_sha256", "max_queries", "max_hits", "max_top_k")
    values: list[Any] = [tree.get(name) for name in names]
    if [type(value) for value in values] != [int, str, str, str, int, int, int]:
        raise ValueError(f"expected {', '.join(names)} as numbers and text, found {values!r:.{_SHOWN}}")
    return Served(*values)


@dataclass
class Breaker:
    """A circuit breaker: after `failures` in a row it allows one call per `cool_down_s`, until a call succeeds."""

    failures: int
    cool_down_s: float
    clock: Callable[[], float] = time.monotonic
    _in_a_row: int = 0
    _next_trial: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def allow(self) -> bool:
        """Whether a call may be made now."""
        with self._lock:
            if self._in_a_row < self.failures:
                return True
            if self.clock() < self._next_trial:
                return False
            self._next_trial = self.clock() + self.cool_down_s  # Other calls wait for the result of this one.
            return True

    def record(self, success: bool) -> None:
        """Record whether a call succeeded."""
        with self._lock:
            self._in_a_row = 0 if success else self._in_a_row + 1
            if self._in_a_row >= self.failures:
                self._next_trial = self.clock() + self.cool_down_s


class _OutageError(Exception):
    """A failure that a later try may not meet; the server asked to wait `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Client:
    """HTTP calls to one server with retries and a circuit breaker; threads may share it.

    Attributes:
        address: of the server, without user name, password and query.
        index_sha256: hash of the index whose answers are accepted; None accepts those of any index.
    """

    def __init__(self, settings: Settings, sleep: Callable[[float], None] = time.sleep) -> None:
        """Read address and key from the environment; this sends no request.

        Raises:
            ValueError: the address or the key cannot be used.
        """
        import httpx

        from tasks.retrieval.deadline import Deadline, DeadlineTransport

        url, key = os.environ.get(URL) or DEFAULT_URL, os.environ.get(KEY_VARIABLE, "")
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{URL}: not an address ({error}). Expected something like {DEFAULT_URL}.") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"{URL}: expected an address that begins with http:// or https://, such as {DEFAULT_URL}.")
        if key and not (key.isascii() and key.isprintable()):
            raise ValueError(f"{KEY_VARIABLE}: found characters that a header cannot hold, expected printable ASCII.")
        self.settings = settings
        parsed = parsed.copy_with(
            path=parsed.path.rstrip("/").removesuffix("/retrieve") + "/"
        )  # Search-R1's search_url.
        self.address = str(parsed.copy_with(username=None, password=None, query=None, fragment=None)).rstrip("/")
        self.index_sha256: str | None = None
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_cool_down_s)
        self._sleep = sleep
        self._transport_error = httpx.TransportError
        self._deadline = Deadline()
        context = ssl.create_default_context() if parsed.scheme == "https" else None
        self._http = httpx.Client(
            base_url=parsed,
            headers={"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})},
            timeout=httpx.Timeout(settings.timeout_s, connect=min(settings.timeout_s, _CONNECT_S)),
            transport=DeadlineTransport(self._deadline, context, settings.max_in_flight),
            trust_env=False,  # A proxy that the shell has set must not stand between trainer and search server.
        )

    def call(self, method: str, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """Send one request, repeated until it is answered, and `read` the JSON of the answer.

        Raises:
            RetrievalError: no complete answer after all tries, a refusal, an answer that `read` refuses
                (by a ValueError), or an open circuit breaker.
        """
        content = None if body is None else json.dumps(body).encode()
        attempts = self.settings.retries + 1
        for attempt in range(1, attempts + 1):
            if not self.breaker.allow():
                raise RetrievalError(
                    f"{self.address}: not asked: {self.settings.breaker_failures} tries in a row have failed; asked "
                    f"again at most every {self.settings.breaker_cool_down_s:g} s."
                )
            try:
                status, answer = self._send(method, path, content)
                if status >= 400:
                    self.breaker.record(status < 500)  # 4xx proves that the server is up; do not trip the breaker.
                    kind = QueryError if status in _OF_QUERIES else RetrievalError
                    raise kind(f"{self.address}{path}: refused with status {status}: {_detail(answer)}.")
                result = read(json.loads(answer))
            except _OutageError as error:
                self.breaker.record(False)
                if attempt == attempts:
                    raise RetrievalError(f"{self.address}{path}: {error} ({attempts} tries).") from None
                self._pause(attempt, error.retry_after_s)
            except (ValueError, OverflowError, RecursionError) as error:
                self.breaker.record(False)
                raise RetrievalError(f"{self.address}{path}: not a usable answer: {error}.") from None
            else:
                self.breaker.record(True)
                return result
        raise AssertionError("unreachable")

    def _send(self, method: str, path: str, content: bytes | None) -> tuple[int, bytes]:
        """Send the request once; returns status and body.

        Raises:
            _OutageError: no connection, no answer in time, or a status of an outage.
            ValueError: the body is larger than allowed, or the server redirects.
        """
        headers = {} if content is None else {"content-type": "application/json"}
        limit = self.settings.max_response_bytes
        self._deadline.until = time.monotonic() + self.settings.timeout_s

        try:
            with self._http.stream(method, path, content=content, headers=headers) as response:
                if 300 <= response.status_code < 400:
                    raise ValueError(f"found a redirection (status {response.status_code}), expected an answer")
                body = bytearray()
                for block in response.iter_raw():
                    body += block
                    if len(body) > limit:
                        raise ValueError(f"found more than {limit} bytes, expected at most max_response_bytes")

                self._check_index(response.headers.get(INDEX_HEADER), response.status_code == 200)
                if response.status_code in _OUTAGE:
                    reason = f"status {response.status_code}: {_detail(bytes(body))}"
                    raise _OutageError(reason, _seconds(response.headers.get("retry-after")))
                return response.status_code, bytes(body)
        except self._transport_error as error:
            if time.monotonic() >= self._deadline.until:
                raise _OutageError(f"the answer took longer than {self.settings.timeout_s:g} s") from None
            raise _OutageError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None

    def _check_index(self, served: str | None, is_answer: bool) -> None:
        """Refuse what another index has found, and hits of which nobody says what has found them."""
        if self.index_sha256 is None or (served is None and not is_answer) or served == self.index_sha256:
            return
        found = f"index {served[:12]}" if served else f"no header {INDEX_HEADER}"
        raise ValueError(f"found {found}, expected index {self.index_sha256[:12]} as at the start")

    def _pause(self, attempt: int, asked_s: float) -> None:
        longest = self.settings.max_backoff_s
        backoff_s = min(longest, self.settings.backoff_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        self._sleep(max(backoff_s, min(asked_s, longest)))


def _detail(answer: bytes) -> str:
    try:
        tree = json.loads(answer)
    except (ValueError, RecursionError):
        return ascii(answer[:_SHOWN].decode("utf-8", "replace"))
    return str(tree["detail"] if isinstance(tree, dict) and "detail" in tree else tree)[:_SHOWN]


def _seconds(header: str | None) -> float:
    """Retry-After in seconds; 0 if it is missing or a date, and then the client's own pause is taken."""
    return float(header) if header is not None and header.isascii() and header.isdecimal() and len(header) < 7 else 0.0
