"""A chat model behind an OpenAI-compatible server: replies from a cache on the disk or over HTTP.

Every reply is stored before it is used, in a file whose name is a hash of address and request. So a second run sends no
request, and a killed run loses at most the requests in flight. Requests and tokens are counted in one file for all
processes that share the folder, and a run ends before it exceeds the budget. (Two processes that send the same request
at the same moment both pay for it.) The key comes from an environment variable and goes into one header. If a server
repeats it, it is cut out before anything is stored or shown.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import fcntl
import functools
import hashlib
import json
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlsplit

from tasks import loopback, store
from tasks.conf import require
from tasks.records.usage import Usage
from tasks.services import Messages, Refusal, Reply, Resources, Role, ServiceError
from tasks.services.recording import Recording, request_sha256
from tasks.store import DataError, Row, dump, sha256

if TYPE_CHECKING:
    import httpx

CACHE = Path(".scratch/replies")
"""Replies of models and the count of their costs. Nothing deletes them, because they were paid for."""
WHERE = "the file of conf/service/"
_DAY_S = 86_400.0
_OWN_FIELDS = ("model", "messages", "stream", "n")
# What the protocol allows; a server may refuse such a request or, worse, mend it.
_REQUEST: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (0, 1), "max_tokens": (1, 1 << 20), "max_completion_tokens": (1, 1 << 20),
}  # fmt: skip
_MOST_IN_FLIGHT = 1024  # Each has a thread and a connection.
# Conversations that wait or are in flight, per allowed request in flight, so that a slow reply does not hold up others.
_AHEAD = 4
_PATH = "/chat/completions"
_PASSING = (408, 429)
_FATAL = (401, 402, 403, 404, 405)
_CONNECT_S = 10.0
_MAX_BYTES = 16 << 20
_SHORTEST_SECRET = 6
_SHOWN = 200
_CHARS_A_TOKEN = 4  # An estimate for servers that report no usage.


class _RefusedError(Exception):
    """The server refuses this request for good; it may answer others."""


class _PassingError(Exception):
    """A failure that a later try may not meet; the server asked to wait `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks the chat-completions protocol.

    Attributes:
        base_url: the address without `/chat/completions`.
        model: the server's name of the model.
        key_variable: the environment variable that holds the key; empty if the server needs none. The key itself is in
            no file.
        request: further fields of the request, by the server's names (temperature, max_tokens, response_format).
        max_in_flight: most requests at the same time.
        timeout_s: for the whole body of an answer, and for each wait for its headers.
        retries: how often a request is repeated after status 408, 429 or 5xx, no connection or no answer in time.
        backoff_s: pause before the first repetition, doubled for each further one, times a random number in [0.5, 1].
        max_backoff_s: longest such pause; a server that asks for a longer one (Retry-After) gets it.
        max_retry_after_s: if a server asks for a longer pause than this, the run ends.
        max_refused_in_a_row: if the server refuses more requests than this in a row (a status such as 400), the run
            ends.
        max_requests: budget over all runs of this endpoint and model, repetitions included.
        max_total_tokens: budget of prompts and replies over all such runs; replies in flight may exceed it.
        recorded: a JSONL file, from the root of the clone: every reply is recorded there, and a request whose reply it
            holds is not sent. Empty: no recording.
        replayed_sha256: the hash of that file. Nothing is sent then, so that the run is repeated to the byte without
            the server; a request that the file lacks ends the run. Empty: ask the server.
    """

    role: ClassVar[Role] = "chat"
    needs_reference: ClassVar[bool] = False

    base_url: str
    model: str
    key_variable: str
    request: dict[str, Any]
    max_in_flight: int
    timeout_s: float
    retries: int
    backoff_s: float
    max_backoff_s: float
    max_retry_after_s: float
    max_refused_in_a_row: int
    max_requests: int
    max_total_tokens: int
    recorded: str = ""
    replayed_sha256: str = ""

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        is_plain = url.scheme in ("http", "https") and url.hostname and not (url.username or url.query or url.fragment)
        # The address is not shown, because one with a user name in it may hold a password.
        require(bool(is_plain), "base_url", "...", "http(s)://host/path without user name, query and fragment")
        require(bool(self.model), "model", self.model, "a name")
        is_name = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*|", self.key_variable)
        shown = self.key_variable if is_name else "..."  # It may be the key itself, pasted in the wrong place.
        require(bool(is_name), "key_variable", shown, "the name of an environment variable, never a key")

        is_hash = re.fullmatch(r"[0-9a-f]{64}|", self.replayed_sha256)
        require(bool(is_hash), "replayed_sha256", self.replayed_sha256, "64 hex digits, or empty to ask the server")
        require(bool(self.recorded or not self.replayed_sha256), "recorded", self.recorded, "the file to replay")

        for field in _OWN_FIELDS:
            require(field not in self.request, "request", field, "fields that the service does not set itself")
        for field, value in self.request.items():
            require(_is_json(value), f"request.{field}", value, "finite numbers")
            if value is not None and (bounds := _REQUEST.get(field)) is not None:
                require(_is_within(value, bounds), f"request.{field}", value, f"{bounds[0]} to {bounds[1]}")
        require(
            1 <= self.max_in_flight <= _MOST_IN_FLIGHT, "max_in_flight", self.max_in_flight, f"1 to {_MOST_IN_FLIGHT}"
        )
        for name in ("max_requests", "max_total_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(0 <= self.retries <= 100, "retries", self.retries, "0 to 100")
        require(self.max_refused_in_a_row >= 0, "max_refused_in_a_row", self.max_refused_in_a_row, "0 or more")
        require(0 <= self.max_retry_after_s <= _DAY_S, "max_retry_after_s", self.max_retry_after_s, f"0 to {_DAY_S}")
        for name in ("timeout_s", "backoff_s", "max_backoff_s"):
            require(0 < getattr(self, name) <= _DAY_S, name, getattr(self, name), f"above 0, at most {_DAY_S}")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ChatEndpoint]:
        """Open connections to the server and close them; starting the server is the user's task."""
        recording = Recording(resources.root / self.recorded, self.replayed_sha256) if self.recorded else None
        with closing(ChatEndpoint(self, resources.root / CACHE, recording)) as chat:
            yield chat
            print(
                f"{chat.address}: {chat.num_asked} requests sent, {chat.usage.hits} replies from the cache", flush=True
            )
        if recording is not None and not recording.is_replay:
            print(
                f"{self.recorded}: to repeat the run without the model, set replayed_sha256: {sha256(recording.path)}"
            )


def _is_json(value: object) -> bool:
    """Whether JSON can hold the value: it has no word for NaN and infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _is_within(value: object, bounds: tuple[float, float]) -> bool:
    """Whether the value is a number within bounds, and a whole one where they count something."""
    least, most = bounds
    is_number = type(value) is int or (type(value) is float and least == 0)
    return is_number and least <= float(cast(float, value)) <= most


class _Batch:
    """The conversations of one call; after a failure, or once stopped, no further request is sent for them.

    Attributes:
        request: fields of each of its requests, besides model and messages.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = request
        self.stopped = threading.Event()
        self.error: ValueError | None = None

    def stop(self, error: ValueError | None = None) -> None:
        """Send nothing more; threads that would send raise the first error that was given here."""
        self.error = self.error or error
        self.stopped.set()

    def check(self) -> None:
        """Raise the ServiceError of a batch that was stopped."""
        if self.stopped.is_set():
            raise ServiceError(str(self.error or "stopped: nothing more is sent"))


class ChatEndpoint:
    """See `tasks.services.Chat`. Threads may share it; together they have at most `max_in_flight` requests in flight.

    Attributes:
        num_asked: requests sent by this object, repetitions included.
        usage: see `tasks.records.usage`; hits are replies found in the cache.
    """

    def __init__(self, conf: Endpoint, cache: Path, recording: Recording | None = None) -> None:
        """Keep replies in a folder of `cache` and in `recording`; this sends no request and reads no key."""
        import httpx

        self.conf = conf
        self.address = conf.base_url.rstrip("/") + _PATH
        self.folder = cache / store.digest(self.address, conf.model)
        self.num_asked = 0
        self._recording = recording
        self.usage = Usage()
        self._refused_in_a_row = 0
        self._lock = threading.Lock()

        try:
            httpx.URL(self.address)
        except httpx.InvalidURL as error:
            raise ServiceError(f"{WHERE}: base_url: not an address ({error}).") from None

        self._http = _client(self.address, conf.timeout_s)
        self._request_error = httpx.RequestError
        self._pool = ThreadPoolExecutor(conf.max_in_flight, thread_name_prefix="chat")

    @property
    def model(self) -> str:
        """See `Chat`."""
        return self.conf.model

    def replies(
        self, conversations: Iterable[Messages], request: Mapping[str, Any] | None = None
    ) -> Generator[Reply | Refusal, None, None]:
        """See `Chat`.

        Raises:
            ServiceError: the budget is spent, the key is missing, or the server cannot be used now.
        """
        batch = _Batch({**self.conf.request, **(request or {})})
        waiting: deque[Future[Reply | Refusal]] = deque()
        try:
            for messages in conversations:
                waiting.append(self._pool.submit(self._answer, messages, batch))
                if len(waiting) >= _AHEAD * self.conf.max_in_flight:
                    yield self._counted(waiting.popleft())
            while waiting:
                yield self._counted(waiting.popleft())
        finally:
            batch.stop()
            for future in waiting:
                future.cancel()
            wait(waiting)  # Requests in flight are paid for, so their replies should reach the cache.

    def _counted(self, future: Future[Reply | Refusal]) -> Reply | Refusal:
        """The answer, waited for and counted by the caller's thread, because answers come in the order of requests."""
        started = time.monotonic()
        answer = future.result()
        tokens = answer.tokens if isinstance(answer, Reply) else 0
        with self._lock:  # Searches of several questions ask at the same time.
            self.usage.add(Usage(1, tokens, int(isinstance(answer, Refusal)), seconds=time.monotonic() - started))
        return answer

    def _answer(self, messages: Messages, batch: _Batch) -> Reply | Refusal:
        body = {**batch.request, "model": self.conf.model, "messages": list(messages)}
        try:
            return self._complete(body, batch) if self._recording is None else self._replayed(body, batch)
        except _RefusedError as error:
            return Refusal(str(error))
        except (ServiceError, DataError) as error:
            # Here, because this thread would send its next conversation before anybody reads the error.
            batch.stop(error)
            raise

    def _replayed(self, body: Row, batch: _Batch) -> Reply | Refusal:
        """The recorded answer to a request; a new one is recorded."""
        recording = self._recording
        assert recording is not None
        request = request_sha256(body)
        if (answer := recording.get(request)) is not None:
            with self._lock:
                self.usage.hits += 1
            return answer
        if recording.is_replay:
            raise ServiceError(
                f"{self.conf.recorded}: no reply to {str(body['messages'][-1])[-60:]!r}, expected one for every "
                f"request, because replayed_sha256 of {WHERE} is set. Take settings, data and seed of the recorded run,"
                " or empty replayed_sha256 to ask the server."
            )
        try:
            return recording.add(request, self._complete(body, batch))
        except _RefusedError as error:
            return recording.add(request, Refusal(str(error)))

    def _complete(self, body: Row, batch: _Batch) -> Reply:
        """The reply to this request.

        Raises:
            _RefusedError: the server refuses this request.
            ServiceError: as `replies`.
        """
        path = self.folder / f"{hashlib.sha256(dump([self.address, body]).encode()).hexdigest()}.json"
        if (cached := _cached(path)) is not None:
            with self._lock:
                self.usage.hits += 1
            return cached

        key = self._key()
        reply = self._ask(dump(body).encode(), key, batch)
        store.write_json(path, asdict(reply))

        with self._lock:
            self._refused_in_a_row = 0
            with self._ledger() as spent:
                spent["max_total_tokens"] += reply.tokens
        return reply

    def close(self) -> None:
        """Wait for the requests in flight and close the connections."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[dict[str, int]]:
        """The counts of all processes, locked inside the block and written if it ends without an error.

        If their file cannot be read, they are counted again from the replies in the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "spent"
        names = ("max_requests", "max_total_tokens")
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                num_requests, num_tokens = map(int, path.read_text(encoding="ascii").split())
            except (OSError, ValueError):
                replies = [reply for file in self.folder.glob("*.json") if (reply := _cached(file)) is not None]
                num_requests, num_tokens = len(replies), sum(reply.tokens for reply in replies)

            spent = {names[0]: num_requests, names[1]: num_tokens}
            yield spent

            new = path.with_suffix(".new")
            new.write_text(" ".join(str(spent[name]) for name in names), encoding="ascii")
            os.replace(new, path)

    def _key(self) -> str:
        name = self.conf.key_variable
        key = os.environ.get(name, "") if name else ""
        if name and not key:
            raise ServiceError(
                f"environment variable {name} is empty, expected the key of {self.address}. Set it, or name another "
                f"in key_variable of {WHERE} (empty if the server needs none)."
            )
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ServiceError(f"environment variable {name}: found characters that a header cannot hold.")
        return key

    def _ask(self, content: bytes, key: str, batch: _Batch) -> Reply:
        """The reply; the request is sent at most `retries + 1` times."""
        tries = self.conf.retries + 1
        for number in range(1, tries + 1):
            batch.check()
            self._reserve()
            try:
                return self._try(content, key)
            except _PassingError as error:
                if number == tries:
                    raise ServiceError(f"{self.address}: {error} ({tries} tries). {self._kept()}") from None
                self._pause(number, error, batch)
        raise AssertionError("unreachable")

    def _reserve(self) -> None:
        """Count one request, or raise the ServiceError of a spent budget."""
        conf = self.conf
        with self._lock:
            with self._ledger() as spent:
                for name, count in spent.items():
                    most = getattr(conf, name)
                    if count >= most:
                        raise ServiceError(
                            f"{self.address}: the budget is spent: {count:,} of {name}={most:,} of {WHERE}. "
                            f"Raise it to go on. {self._kept()}"
                        )
                spent["max_requests"] += 1
            self.num_asked += 1

    def _try(self, content: bytes, key: str) -> Reply:
        """Send the request once.

        Raises:
            _PassingError: no connection, no complete answer in time, or a status of a passing failure.
            _RefusedError, ServiceError: as `_complete`.
        """
        status, headers, answer = self._send(content, key)
        if status in _PASSING or status >= 500:
            raise _PassingError(f"status {status}: {_detail(answer, key)}", _seconds(headers.get("retry-after")))
        if status in _FATAL or 300 <= status < 400:
            raise ServiceError(
                f"{self.address}: status {status}: {_detail(answer, key)}. Correct base_url, model or the key in "
                f"{self.conf.key_variable or 'key_variable'}. {self._kept()}"
            )
        if status != 200:
            reason = f"status {status}: {_detail(answer, key)}"
            self._count_refusal(reason)
            raise _RefusedError(reason)
        return _reply(answer, len(content), key)

    def _send(self, content: bytes, key: str) -> tuple[int, Mapping[str, str], str]:
        """Status, headers and text of one answer, without the key."""
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        deadline = time.monotonic() + self.conf.timeout_s
        body = bytearray()
        try:
            with self._http.stream("POST", self.address, content=content, headers=headers) as response:
                for block in response.iter_bytes():
                    body += block
                    if len(body) > _MAX_BYTES or time.monotonic() > deadline:
                        raise _PassingError(f"no answer of at most {_MAX_BYTES >> 20} MiB in {self.conf.timeout_s:g} s")
                text = bytes(body).decode("utf-8", "replace")
                return response.status_code, response.headers, _shown(text, key)
        except self._request_error as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise _PassingError(_shown(reason, key)) from None

    def _count_refusal(self, reason: str) -> None:
        with self._lock:
            self._refused_in_a_row += 1
            if self._refused_in_a_row > self.conf.max_refused_in_a_row:
                raise ServiceError(
                    f"{self.address}: {self._refused_in_a_row} requests in a row were refused, the last with "
                    f"{reason}. Correct model or request in {WHERE}. {self._kept()}"
                )

    def _pause(self, number: int, error: _PassingError, batch: _Batch) -> None:
        conf = self.conf
        if error.retry_after_s > conf.max_retry_after_s:
            raise ServiceError(
                f"{self.address}: {error}: asks to wait {error.retry_after_s:.0f} s, more than max_retry_after_s="
                f"{conf.max_retry_after_s:g}. Run again later. {self._kept()}"
            ) from None
        backoff_s = min(conf.max_backoff_s, conf.backoff_s * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
        batch.stopped.wait(max(backoff_s, error.retry_after_s))

    def _kept(self) -> str:
        return f"Every finished reply is kept in .scratch ({self.folder.name}); a new run goes on from there."


def _client(address: str, timeout_s: float) -> httpx.Client:
    """What sends requests; a proxy of the environment is for servers elsewhere.

    Raises:
        ServiceError: the proxy is of a kind that httpx cannot use.
    """
    import httpx

    limits = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
    try:
        return httpx.Client(timeout=limits, trust_env=not loopback.is_here(address))
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ServiceError(
            f"{address}: the proxy of the environment (http_proxy, https_proxy, all_proxy) cannot be used: {error} "
            "Correct it, or name the server in no_proxy."
        ) from None


def _cached(path: Path) -> Reply | None:
    """The reply in a file of the cache, None if the file is missing or damaged."""
    try:
        row = store.read_json(path)
        reply = Reply(**row)
    # Also a number of thousands of digits, or too deep brackets.
    except (DataError, OSError, TypeError, ValueError, RecursionError):
        return None
    is_whole = isinstance(reply.content, str) and isinstance(reply.finish_reason, str)
    return reply if is_whole and type(reply.tokens) is int and reply.tokens >= 0 else None


def _reply(answer: str, num_sent: int, key: str) -> Reply:
    """The first choice of a chat completion.

    Raises:
        _PassingError: the answer is no chat completion.
    """
    try:
        tree: Any = store.loads(answer)
        choice = tree["choices"][0]
        content = choice["message"].get("content")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise _PassingError(f"not a chat completion: {answer[:_SHOWN]!r}") from None
    usage = tree.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    content = _shown(content, key) if isinstance(content, str) else ""
    if type(tokens) is not int or tokens < 0:
        tokens = -(-(num_sent + len(content)) // _CHARS_A_TOKEN)
    return Reply(content, _shown(str(choice.get("finish_reason"))[:_SHOWN], key), tokens)


def _shown(text: str, key: str) -> str:
    """The text without the key, however JSON spells it, and without halves of surrogate pairs, which no file can store.

    A word of less than six characters is no secret (local servers take any); it may be part of a reply.
    """
    if len(key) >= _SHORTEST_SECRET:
        text = _spellings(key).sub("[key]", text)
    return text.encode("utf-8", "replace").decode()


@functools.cache
def _spellings(key: str) -> re.Pattern[str]:
    """Each character of the key as it is, after a backslash, or as `\\u` and four hex digits."""
    return re.compile("".join(rf"(?:\\?{re.escape(one)}|\\u(?i:{ord(one):04x}))" for one in key))


def _detail(answer: str, key: str) -> str:
    """The message of an error answer, shortened."""
    try:
        tree: Row = json.loads(answer)
        error = tree["error"]
        return _shown(str(error["message"] if isinstance(error, dict) else error), key)[:_SHOWN]
    except (ValueError, RecursionError, LookupError, TypeError):
        return repr(answer[:_SHOWN])


def _seconds(header: str | None) -> float:
    """Retry-After, a number or a date, in seconds from now; 0 if it is missing or cannot be read.

    >>> _seconds("2"), _seconds(None), _seconds("soon")
    (2.0, 0.0, 0.0)
    """
    text = (header or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
        now = datetime.datetime.now(datetime.UTC if date.tzinfo else None)
        return max(0.0, (date - now).total_seconds())
    except (ValueError, OverflowError):
        return 0.0


PART = Endpoint
