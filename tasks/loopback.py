"""Keeps the proxies of the environment, which are meant for the internet, away from servers on this machine.

Importing `tasks` adds the names of this machine to `no_proxy`, which urllib, requests, aiohttp, httpx, websockets and
curl heed, and child processes inherit it. httpx does more than look at it: a client of httpx cannot even be made where
a proxy is of a kind that it does not know. So whoever makes one asks `is_here`, and programs that use Prefect, whose
clients cannot be told, call `set_aside`. A server elsewhere goes on using the proxy.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import re
from urllib.parse import urlsplit

NAMES = ("localhost", "127.0.0.1", "::1", "127.0.0.0/8")
KINDS = ("http", "https", "all", "ws", "wss")
ASIDE = "BREADCRUMB_PROXIES"
"""Variable with the proxies that were set aside, for the child processes that get them back."""


def spare() -> None:
    """Add this machine to `no_proxy` and `NO_PROXY` where a proxy is set, or one of both is.

    The lower case hides the upper one from most libraries, so each of both gets what the other one says. What httpx
    cannot read is left out, such as a network of IPv6: it makes no client then, and no other library here heeds it.
    """
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if not given and not _proxies():
        return
    names = [name.strip() for name in given.split(",")]
    if "*" in names:  # Nothing goes to a proxy. Most libraries want the star to stand alone.
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"
        return
    names = [re.sub(r"^\[(.*)\]$", r"\1", name) for name in names]  # httpx reads no brackets.
    readable = [name for name in names if _is_readable(name)]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys([*readable, *NAMES]))


def is_here(address: str) -> bool:
    """Whether a web address is one of this machine.

    >>> is_here("http://127.0.0.2:80/x"), is_here("http://[::1]:80"), is_here("localhost:80"), is_here("http://a.b")
    (True, True, True, False)
    """
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            return True
        number = ipaddress.ip_address(host)
    except ValueError:
        return False
    return number.is_loopback or number.is_unspecified


def set_aside() -> list[str]:
    """Remove the proxies that httpx cannot use from this process; returns their variables.

    `given_back` has them for child processes.
    """
    useless = {name: value for name, value in _proxies().items() if not _is_known(value)}
    if useless:
        os.environ[ASIDE] = json.dumps({**given_back(), **useless})
    for name in useless:
        del os.environ[name]
    return sorted(useless)


def given_back() -> dict[str, str]:
    """The proxies that `set_aside` has removed, by variable."""
    return dict(json.loads(os.environ.get(ASIDE) or "{}"))


def _proxies() -> dict[str, str]:
    names = [f"{kind}_proxy" for kind in KINDS]
    return {name: value for name, value in os.environ.items() if name.lower() in names and value}


def _is_readable(name: str) -> bool:
    """Whether an entry of `no_proxy` is a name, a part of one or an address, with a port or a network of IPv4."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(name))
    is_name = re.fullmatch(r"(?:https?://|all://)?[a-z0-9_.*-]+(?::\d{1,4})?", name, re.ASCII | re.IGNORECASE)
    return bool(is_name or re.fullmatch(r"\d{1,3}(?:\.\d{1,3}){3}/\d{1,2}", name, re.ASCII))


def _is_known(proxy: str) -> bool:
    """Whether httpx can make a client with this proxy: it knows the kind, and can read the address."""
    scheme = proxy.partition("://")[0].lower() if "://" in proxy else "http"
    try:
        parts = urlsplit(proxy if "://" in proxy else f"//{proxy}")
        if not parts.hostname or parts.port == 0:
            return False
    except ValueError:  # A port that is no number, half of a pair of brackets.
        return False
    is_socks = scheme in ("socks5", "socks5h")
    return scheme in ("http", "https") or (is_socks and importlib.util.find_spec("socksio") is not None)
