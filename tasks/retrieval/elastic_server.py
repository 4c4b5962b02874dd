"""One Elasticsearch cluster: its address and credentials, its version, and requests that are repeated in an outage.

Addresses and secrets come from the environment and are never shown, written or logged; a message names hosts
without credentials. This module knows nothing of passages or searches.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.retrieval import RetrievalError
from tasks.store import DataError

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

T = TypeVar("T")

URL = "ELASTICSEARCH_URL"
KEY = "ELASTICSEARCH_API_KEY"
CA_CERTS = "ELASTICSEARCH_CA_CERTS"
DEFAULT_URL = "http://127.0.0.1:9200"
CONNECTIONS = 32  # kept open to one host

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


class PassingError(RuntimeError):
    """A failure that may pass. A function given to `Cluster.ask` raises it to be called again."""


@dataclass(frozen=True)
class Access:
    """The address of a cluster and the credentials for it.

    Attributes:
        hosts: `scheme://name:port` each, without credentials: these may be shown.
        user: name and password, or None.
        api_key: encoded API key, or None.
        ca_certs: PEM file of the authority that signed the servers' certificates; None: the system's.
    """

    hosts: tuple[str, ...]
    user: tuple[str, str] | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    ca_certs: str | None = None


def access(environment: Mapping[str, str] = os.environ) -> Access:
    """What `ELASTICSEARCH_URL` (several hosts with commas between), `_API_KEY` and `_CA_CERTS` say.

    Raises:
        DataError: an address that is none, two kinds of credentials, or no such file. No secret is shown.
    """
    given = environment.get(URL) or DEFAULT_URL
    parts = [part.strip() for part in given.split(",") if part.strip()]
    found = [_address(part, number, given) for number, part in enumerate(parts, start=1)]
    users = {user for _, user in found if user is not None}
    api_key = environment.get(KEY) or None
    if not found or len(users) > 1 or (users and api_key):
        raise DataError(
            f"{URL}: found {len(found)} addresses with {len(users)} different users"
            f"{f' and an {KEY}' if api_key else ''}. Expected at least one address and one kind of credentials."
        )
    ca_certs = environment.get(CA_CERTS) or None
    if ca_certs is not None and not Path(ca_certs).is_file():
        raise DataError(f"{CA_CERTS}={ca_certs}: no such file. Name the PEM file of your certificate authority.")
    hosts = tuple(dict.fromkeys(host for host, _ in found))
    return Access(hosts, next(iter(users), None), api_key, ca_certs)


def _address(text: str, number: int, given: str) -> tuple[str, tuple[str, str] | None]:
    """Host without credentials, and the credentials; a password with a comma must not show up in a message."""
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urllib.parse.urlsplit(""), None

    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port is None
        or parts.query
        or parts.fragment
        or "@" in parts.path
    ):
        shown = "(not shown: it holds credentials)" if "@" in given else repr(text)
        raise DataError(
            f"{URL}: address {number} {shown}: expected scheme://host:port such as {DEFAULT_URL}, several with commas "
            "between. Write special characters of a password as %xx."
        )

    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    user = None
    if parts.username is not None:
        user = (urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or ""))
    return f"{parts.scheme}://{name}:{port}{parts.path.rstrip('/')}", user


class Cluster:
    """Requests to one cluster, repeated on another node or later after a failure that may pass."""

    def __init__(self, where: Access, request_timeout_s: float, retry_s: float) -> None:
        """Prepare a client; nothing is sent.

        Args:
            where: hosts and credentials.
            request_timeout_s: how long one request may take.
            retry_s: how long a request is made again before it counts as failed.
        """
        from elasticsearch import Elasticsearch

        self.hosts = ", ".join(where.hosts)
        self._num_hosts = len(where.hosts)
        self._retry_s = retry_s
        self._closed = threading.Event()
        tls: dict[str, Any] = {"ca_certs": where.ca_certs} if where.ca_certs and "https:" in self.hosts else {}
        # The client leaves a dead node out for a while; going on elsewhere and later is `ask`'s own loop.
        self._client = Elasticsearch(
            list(where.hosts), basic_auth=where.user, api_key=where.api_key,
            request_timeout=request_timeout_s, connections_per_node=CONNECTIONS, max_retries=0, **tls,
        )  # fmt: skip

    def close(self) -> None:
        """Repeat no failed request any more, in any thread."""
        self._closed.set()

    def ask(self, what: str, request: Callable[[Elasticsearch], T], timeout_s: float | None = None) -> T:
        """The result of `request(client)`.

        A lost connection, a timeout, a `PassingError` and the statuses 408, 429 and from 500 are tried again: at
        once while there is a host that was not tried, then after growing pauses.

        Args:
            what: what is asked for; a message begins with it.
            request: one call of the client; it must be safe to repeat.
            timeout_s: how long one request may take, where the usual time is too short.

        Raises:
            RetrievalError: the server refused, or kept failing for `retry_s`.
        """
        from elasticsearch import ApiError, TransportError

        client = self._client if timeout_s is None else self._client.options(request_timeout=timeout_s)
        until = time.monotonic() + self._retry_s
        for attempt in itertools.count():
            try:
                return request(client)
            except (ApiError, TransportError, PassingError) as error:
                if not _may_pass(error):
                    raise self._refused(what, error) from None
                reason = f"{type(error).__name__}: {describe(error)}"
            pause = _pause(attempt - self._num_hosts + 2)
            if self._closed.is_set() or (pause and time.monotonic() + pause > until):
                raise RetrievalError(
                    f"elasticsearch: {what} failed {attempt + 1} times, for {self._retry_s:g} s, at {self.hosts}. "
                    f"The last time: {reason}. Start the server or set {URL}."
                )
            self._closed.wait(pause)
        raise AssertionError("unreachable")

    def check_versions(self) -> None:
        """Compare the major versions of server and client.

        Raises:
            DataError: they differ; the message names the client to install.
            RetrievalError: no answer, or access refused.
        """
        # "*/*" instead of the client's own media type, which a server of another major version refuses.
        banner = self.ask("the first contact", lambda client: client.perform_request("GET", "/", headers=_ANY))
        try:
            server = str(banner.body["version"]["number"])
            major = int(server.partition(".")[0])
        except (TypeError, KeyError, ValueError):
            raise DataError(f"{URL}: what answers at {self.hosts} is not Elasticsearch. Correct the address.") from None
        client = client_version()
        if major != int(client.partition(".")[0]):
            pin = "elasticsearch>=8.19,<9" if major == 8 else f"elasticsearch>={major},<{major + 1}"
            raise DataError(
                f"elasticsearch: the server at {self.hosts} is version {server}, the installed Python client "
                f"{client}: their major versions must be equal. Install the client that fits: pip install '{pin}'"
            )

    def _refused(self, what: str, error: Exception) -> RetrievalError:
        status = getattr(getattr(error, "meta", None), "status", None)
        advice = ""
        if status in (401, 403):
            advice = f" Check {KEY} (not shown here) or the user in {URL}, and its privileges."
        elif type(error).__name__ == "UnsupportedProductError":
            advice = f" What answers there is no Elasticsearch, or one before 7.14. Correct {URL}."
        elif "media_type_header" in str(error):
            advice = (
                f" The Python client {client_version()} does not fit this server. "
                "For a server 8.x: pip install 'elasticsearch>=8.19,<9'"
            )
        elif type(error).__name__ == "TlsError":
            advice = f" Name your certificate authority in {CA_CERTS}."
        return RetrievalError(f"elasticsearch: {what} was refused by {self.hosts}: {describe(error)}.{advice}")


_ANY = {"accept": "*/*"}


def client_version() -> str:
    """Version of the installed client."""
    return importlib.metadata.version("elasticsearch")


def describe(error: object) -> str:
    """Type and reason of a failure, from an exception or from the `error` of an answer: one line, not endless."""
    body = getattr(error, "body", error)
    fault: Any = body.get("error") if isinstance(body, dict) else None
    if isinstance(fault, dict):
        cause = (fault.get("caused_by") or {}).get("reason")
        inner = [one.get("reason") for one in fault.get("root_cause") or [] if isinstance(one, dict)]
        reasons = dict.fromkeys(filter(None, [fault.get("type"), fault.get("reason"), *inner, cause]))
        fault = ": ".join(str(reason)[:200] for reason in reasons)
    fault = fault or getattr(error, "message", error)  # The text of a lost connection leaves its cause out.
    status = getattr(getattr(error, "meta", None), "status", None)
    return " ".join(f"{f'HTTP {status}: ' if status else ''}{fault}".split())[:500].rstrip(".")


def passes(status: int) -> bool:
    """Whether a request with this HTTP status may succeed later."""
    return status in (408, 429) or status >= 500


def _may_pass(error: Exception) -> bool:
    from elastic_transport import ApiError, ConnectionError, ConnectionTimeout, TlsError

    if isinstance(error, ApiError):
        return type(error).__name__ != "UnsupportedProductError" and passes(error.meta.status)
    if isinstance(error, TlsError):
        return "certificate" not in str(error.message).lower()
    return isinstance(error, ConnectionError | ConnectionTimeout | PassingError)


def _pause(failed_rounds: int) -> float:
    """Seconds before the next try: 0 while a host is untried, then doubled each time, with a random part."""
    if failed_rounds <= 0:
        return 0.0
    longest: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(failed_rounds - 1, 10))
    return longest * random.uniform(0.75, 1.0)
