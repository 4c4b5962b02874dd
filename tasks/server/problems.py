"""How a server words its refusals: as `{"detail": ...}`, or as error objects of OpenAI's protocol. Standard library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Problem = Callable[[int, str], Any]
"""`(status, message) -> body`, as data for JSON."""


def detail(status: int, message: str) -> dict[str, Any]:
    """What the search server and its relatives answer."""
    return {"detail": message}


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object.

    >>> error_object(404, "no such model", "model")["error"]["type"]
    'invalid_request_error'
    """
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
