"""One chat-completions endpoint: a reply for a request, from a cache on the disk or over HTTP.

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
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks import store
from tasks.augment import WriterError
from tasks.augment.settings import EndpointConf
from tasks.store import DataError, Row, dump

_PATH = "/chat/completions"
_PASSING = (408, 429)
_FATAL = (401, 402, 403, 404, 405)
_CONNECT_S = 10.0
_MAX_BYTES = 16 << 20
_SHOWN = 200
_CHARS_A_TOKEN = 4  # Where a server tells no usage.


@dataclass(frozen=True)
class Reply:
    """What a model wrote, why it stopped, and the tokens of prompt and reply together."""

    content: str
    finish_reason: str
    tokens: int


class RefusedError(Exception):
    """The server does not answer this request and will not; others it may."""


class _PassingError(Exception):
    """A failure that may pass; `retry_after_s` is what the server asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Endpoint:
    """Safe to share between threads; how many requests are under way is the caller's business.

    Attributes:
        num_asked: requests sent by this object, further tries included.
        num_cached: replies it found in the cache.
    """

    def __init__(self, conf: EndpointConf, cache: Path, where: str = "conf/augment/") -> None:
        """Nothing is asked and no key is read yet.

        `where`: the place of its settings, for messages.
        """
        import httpx

        self.conf, self.where = conf, where
        self.address = conf.base_url.rstrip("/") + _PATH
        self.folder = cache / store.digest(self.address, conf.model)
        self.num_asked = self.num_cached = 0
        self._refused_in_a_row = 0
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._error: WriterError | None = None
        try:
            httpx.URL(self.address)
        except httpx.InvalidURL as error:
            raise WriterError(f"conf/augment/: base_url: not an address ({error}).") from None
        self._http = httpx.Client(timeout=httpx.Timeout(conf.timeout_s, connect=min(conf.timeout_s, _CONNECT_S)))
        self._request_error = httpx.RequestError

    def complete(self, messages: list[dict[str, str]]) -> Reply:
        """The reply to these messages.

        Raises:
            RefusedError: the server refuses this request.
            WriterError: the budget is spent, the key is missing, or the server cannot be used now.
        """
        body = {**self.conf.request, "model": self.conf.model, "messages": messages}
        path = self.folder / f"{hashlib.sha256(dump([self.address, body]).encode()).hexdigest()}.json"
        if (cached := _cached(path)) is not None:
            with self._lock:
                self.num_cached += 1
            return cached
        key = self._key()
        reply = self._ask(dump(body).encode(), key)
        store.write_json(path, asdict(reply))
        with self._lock:
            self._refused_in_a_row = 0
            with self._ledger() as spent:
                spent["max_total_tokens"] += reply.tokens
        return reply

    def stop(self, error: WriterError | None = None) -> None:
        """Send nothing more: what is in flight ends, and whoever would send meets the first error given here."""
        with self._lock:
            self._error = self._error or error
        self._stopped.set()

    def close(self) -> None:
        """Close the connections."""
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
            raise WriterError(
                f"environment variable {name} is empty, expected the key of {self.address}. Set it, or name another "
                f"in key_variable of {self.where} (empty: the server wants none)."
            )
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            raise WriterError(f"environment variable {name}: found characters that a header cannot hold.")
        return key

    def _ask(self, content: bytes, key: str) -> Reply:
        """The reply after as many tries as are allowed."""
        tries = self.conf.retries + 1
        for number in range(1, tries + 1):
            self._reserve()
            try:
                return self._try(content, key)
            except _PassingError as error:
                if number == tries:
                    raise WriterError(f"{self.address}: {error} ({tries} tries). {self._kept()}") from None
                self._pause(number, error)
        raise AssertionError("unreachable")

    def _reserve(self) -> None:
        """Count one request, unless that is more than the budget allows."""
        conf = self.conf
        with self._lock:
            if self._stopped.is_set():
                raise WriterError(str(self._error or f"{self.address}: stopped. {self._kept()}"))
            with self._ledger() as spent:
                for name, count in spent.items():
                    most = getattr(conf, name)
                    if count >= most:
                        raise WriterError(
                            f"{self.address}: the budget is spent: {count:,} of {name}={most:,} of {self.where}. "
                            f"Raise it to go on. {self._kept()}"
                        )
                spent["max_requests"] += 1
            self.num_asked += 1

    def _try(self, content: bytes, key: str) -> Reply:
        """One try.

        Raises:
            _PassingError: no connection, no complete answer in time, or a status that says so.
            RefusedError, WriterError: as `complete`.
        """
        status, headers, answer = self._send(content, key)
        if status in _PASSING or status >= 500:
            raise _PassingError(f"status {status}: {_detail(answer, key)}", _seconds(headers.get("retry-after")))
        if status in _FATAL or 300 <= status < 400:
            raise WriterError(
                f"{self.address}: status {status}: {_detail(answer, key)}. Correct base_url, model or the key in "
                f"{self.conf.key_variable or 'key_variable'}. {self._kept()}"
            )
        if status != 200:
            told = f"status {status}: {_detail(answer, key)}"
            self._count_refusal(told)
            raise RefusedError(told)
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
                raise WriterError(
                    f"{self.address}: {self._refused_in_a_row} requests in a row were refused, the last with "
                    f"{told}. Correct model or request in {self.where}. {self._kept()}"
                )

    def _pause(self, number: int, error: _PassingError) -> None:
        conf = self.conf
        if error.retry_after_s > conf.max_retry_after_s:
            raise WriterError(
                f"{self.address}: {error}: asks to wait {error.retry_after_s:.0f} s, more than max_retry_after_s="
                f"{conf.max_retry_after_s:g}. Run again later. {self._kept()}"
            ) from None
        own = min(conf.max_backoff_s, conf.backoff_s * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
        self._stopped.wait(max(own, error.retry_after_s))

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
