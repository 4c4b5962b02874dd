"""A chat model behind an OpenAI-compatible server: replies from a cache on the disk or over HTTP.

A reply is kept before anybody reads it, in a file named by a hash of address and request, written beside and renamed:
a second run asks nothing, and a killed one loses the requests in flight at most. What was asked and what it has cost
is counted in one file for all processes that share the folder, and the budget ends a run before it is exceeded. (Two
that ask the same at the same moment both pay for it.) The key comes from an environment variable and goes into one
header; wherever a server repeats it, it is cut out before anything is kept or shown.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import fcntl
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
from typing import Any, ClassVar
from urllib.parse import urlsplit

from tasks import store
from tasks.conf import require
from tasks.services import Messages, Refusal, Reply, Resources, Role, ServiceError
from tasks.store import DataError, Row, dump

CACHE = Path(".scratch/replies")
"""Replies of models, and what they cost; they stay, because they were paid for."""
WHERE = "the file of conf/service/"
_OWN_FIELDS = ("model", "messages", "stream", "n")
_AHEAD = 4  # Conversations under way or waiting, for each request in flight: a slow reply should not hold up others.
_PATH = "/chat/completions"
_PASSING = (408, 429)
_FATAL = (401, 402, 403, 404, 405)
_CONNECT_S = 10.0
_MAX_BYTES = 16 << 20
_SHOWN = 200
_CHARS_A_TOKEN = 4  # Where a server tells no usage.


class _RefusedError(Exception):
    """The server does not answer this request and will not; others it may."""


class _PassingError(Exception):
    """A failure that may pass; `retry_after_s` is what the server asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks the chat-completions protocol.

    Attributes:
        base_url: up to and without `/chat/completions`.
        model: as the server calls it.
        key_variable: the environment variable that holds the key; empty where the server wants none. The key itself
            stands in no file.
        request: further fields of the request, as the server calls them (temperature, max_tokens, response_format).
        max_in_flight: requests at once.
        timeout_s: for the whole body of an answer, and for each wait for its headers.
        retries: further tries of a request that met status 408, 429 or 5xx, no connection or no answer in time.
        backoff_s: pause before the first of them, doubled for each further one, times a random number in [0.5, 1].
        max_backoff_s: longest pause of our own; a server that asks for a longer one (Retry-After) gets it.
        max_retry_after_s: a server that asks for more than this ends the run.
        max_refused_in_a_row: requests that the server refuses (a status such as 400) one after another; more end it.
        max_requests: over all runs of this endpoint and model, further tries included.
        max_total_tokens: of prompts and replies, over all such runs. Replies in flight may exceed it.
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

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        plain = url.scheme in ("http", "https") and url.hostname and not (url.username or url.query or url.fragment)
        # Not shown: an address with a user name in it may hold a password.
        require(bool(plain), "base_url", "...", "http(s)://host/path without user name, query and fragment")
        require(bool(self.model), "model", self.model, "a name")
        is_name = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*|", self.key_variable)
        found = self.key_variable if is_name else "..."  # Not shown: it may be the key.
        require(bool(is_name), "key_variable", found, "the name of an environment variable, never a key")
        for field in _OWN_FIELDS:
            require(field not in self.request, "request", field, "fields that the service does not set itself")
        for name in ("max_in_flight", "max_requests", "max_total_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("retries", "max_refused_in_a_row", "max_retry_after_s"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("timeout_s", "backoff_s", "max_backoff_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[ChatEndpoint]:
        """The server itself is not ours to start: this opens connections and closes them."""
        with closing(ChatEndpoint(self, resources.root / CACHE)) as chat:
            yield chat
            print(
                f"{chat.address}: {chat.num_asked} requests sent, {chat.num_cached} replies from the cache", flush=True
            )


class _Batch:
    """The conversations of one call: after the first failure, or once stopped, nothing more is sent for them."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.error: ServiceError | None = None

    def stop(self, error: ServiceError | None = None) -> None:
        """What is in flight ends; whoever would send meets the first error given here."""
        self.error = self.error or error
        self.stopped.set()

    def check(self) -> None:
        """Raise the ServiceError of a batch that was stopped."""
        if self.stopped.is_set():
            raise ServiceError(str(self.error or "stopped: nothing more is sent"))


class ChatEndpoint:
    """See `tasks.services.Chat`; safe to share between threads, which together have `max_in_flight` requests under way.

    Attributes:
        num_asked: requests sent by this object, further tries included.
        num_cached: replies it found in the cache.
    """

    def __init__(self, conf: Endpoint, cache: Path) -> None:
        """Nothing is asked and no key is read yet; replies are kept in a folder of `cache`."""
        import httpx

        self.conf = conf
        self.address = conf.base_url.rstrip("/") + _PATH
        self.folder = cache / store.digest(self.address, conf.model)
        self.num_asked = self.num_cached = 0
        self._refused_in_a_row = 0
        self._lock = threading.Lock()
        try:
            httpx.URL(self.address)
        except httpx.InvalidURL as error:
            raise ServiceError(f"{WHERE}: base_url: not an address ({error}).") from None
        self._http = httpx.Client(timeout=httpx.Timeout(conf.timeout_s, connect=min(conf.timeout_s, _CONNECT_S)))
        self._request_error = httpx.RequestError
        self._pool = ThreadPoolExecutor(conf.max_in_flight, thread_name_prefix="chat")

    @property
    def model(self) -> str:
        """See `Chat`."""
        return self.conf.model

    def replies(self, conversations: Iterable[Messages]) -> Generator[Reply | Refusal, None, None]:
        """See `Chat`.

        Raises:
            ServiceError: the budget is spent, the key is missing, or the server cannot be used now.
        """
        batch = _Batch()
        waiting: deque[Future[Reply | Refusal]] = deque()
        try:
            for messages in conversations:
                waiting.append(self._pool.submit(self._answer, messages, batch))
                if len(waiting) >= _AHEAD * self.conf.max_in_flight:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            batch.stop()
            for future in waiting:
                future.cancel()
            wait(waiting)  # What is in flight is paid for: let it reach the cache.

    def _answer(self, messages: Messages, batch: _Batch) -> Reply | Refusal:
        try:
            return self._complete(messages, batch)
        except _RefusedError as error:
            return Refusal(str(error))
        except ServiceError as error:
            batch.stop(error)  # Before this thread takes the next conversation.
            raise

    def _complete(self, messages: Messages, batch: _Batch) -> Reply:
        """The reply to these messages.

        Raises:
            _RefusedError: the server refuses this request.
            ServiceError: as `replies`.
        """
        body = {**self.conf.request, "model": self.conf.model, "messages": list(messages)}
        path = self.folder / f"{hashlib.sha256(dump([self.address, body]).encode()).hexdigest()}.json"
        if (cached := _cached(path)) is not None:
            with self._lock:
                self.num_cached += 1
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
        """Wait for what is under way and close the connections."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[dict[str, int]]:
        """What all processes have spent, locked while the block runs and written when it ends well.

        Without a readable file it is what the replies in the folder have cost.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path, names = self.folder / "spent", ("max_requests", "max_total_tokens")
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                first, second = map(int, path.read_text(encoding="ascii").split())
            except (OSError, ValueError):
                replies = [reply for one in self.folder.glob("*.json") if (reply := _cached(one)) is not None]
                first, second = len(replies), sum(reply.tokens for reply in replies)
            spent = {names[0]: first, names[1]: second}
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
                f"in key_variable of {WHERE} (empty: the server wants none)."
            )
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ServiceError(f"environment variable {name}: found characters that a header cannot hold.")
        return key

    def _ask(self, content: bytes, key: str, batch: _Batch) -> Reply:
        """The reply after as many tries as are allowed."""
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
        """Count one request, unless that is more than the budget allows."""
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
        """One try.

        Raises:
            _PassingError: no connection, no complete answer in time, or a status that says so.
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
            told = f"status {status}: {_detail(answer, key)}"
            self._count_refusal(told)
            raise _RefusedError(told)
        return _reply(answer, len(content), key)

    def _send(self, content: bytes, key: str) -> tuple[int, Mapping[str, str], str]:
        """Status, headers and text of one answer, without the key."""
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        until, body = time.monotonic() + self.conf.timeout_s, bytearray()
        try:
            with self._http.stream("POST", self.address, content=content, headers=headers) as response:
                for block in response.iter_bytes():
                    body += block
                    if len(body) > _MAX_BYTES or time.monotonic() > until:
                        raise _PassingError(f"no answer of at most {_MAX_BYTES >> 20} MiB in {self.conf.timeout_s:g} s")
                text = bytes(body).decode("utf-8", "replace")
                return response.status_code, response.headers, _shown(text, key)
        except self._request_error as error:
            told = f"{type(error).__name__}: {error}".rstrip(": ")
            raise _PassingError(_shown(told, key)) from None

    def _count_refusal(self, told: str) -> None:
        with self._lock:
            self._refused_in_a_row += 1
            if self._refused_in_a_row > self.conf.max_refused_in_a_row:
                raise ServiceError(
                    f"{self.address}: {self._refused_in_a_row} requests in a row were refused, the last with "
                    f"{told}. Correct model or request in {WHERE}. {self._kept()}"
                )

    def _pause(self, number: int, error: _PassingError, batch: _Batch) -> None:
        conf = self.conf
        if error.retry_after_s > conf.max_retry_after_s:
            raise ServiceError(
                f"{self.address}: {error}: asks to wait {error.retry_after_s:.0f} s, more than max_retry_after_s="
                f"{conf.max_retry_after_s:g}. Run again later. {self._kept()}"
            ) from None
        own = min(conf.max_backoff_s, conf.backoff_s * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
        batch.stopped.wait(max(own, error.retry_after_s))

    def _kept(self) -> str:
        return f"Every finished reply is kept in .scratch ({self.folder.name}); a new run goes on from there."


def _cached(path: Path) -> Reply | None:
    """The reply in a file of the cache, None where there is no whole one."""
    try:
        row = store.read_json(path)
        reply = Reply(**row)
    except (DataError, OSError, TypeError, ValueError, RecursionError):  # The last two: digits or brackets without end.
        return None
    is_whole = isinstance(reply.content, str) and isinstance(reply.finish_reason, str)
    return reply if is_whole and type(reply.tokens) is int and reply.tokens >= 0 else None


def _reply(answer: str, num_sent: int, key: str) -> Reply:
    """The first choice of a chat completion.

    Raises:
        _PassingError: it is none.
    """
    try:
        tree: Any = json.loads(answer)
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
    """The text without the key, and without halves of surrogate pairs, which no file can hold."""
    text = text.replace(key, "[key]") if key else text
    return text.encode("utf-8", "replace").decode()


def _detail(answer: str, key: str) -> str:
    """What an error answer says, short."""
    try:
        tree: Row = json.loads(answer)
        found = tree["error"]
        return _shown(str(found["message"] if isinstance(found, dict) else found), key)[:_SHOWN]
    except (ValueError, RecursionError, LookupError, TypeError):
        return repr(answer[:_SHOWN])


def _seconds(header: str | None) -> float:
    """Retry-After in seconds from now: a number, or a date; 0 where there is none that can be read.

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
