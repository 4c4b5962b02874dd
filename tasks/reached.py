"""What settings say of how a remote model is reached and what it may cost: no result depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADDRESS = "base_url"
"""Settings with this key are those of a remote model."""
REACHED_BY = (
    ADDRESS, "key_variable", "max_in_flight", "timeout_s", "retries", "backoff_s", "max_backoff_s", "max_retry_after_s",
    "max_refused_in_a_row", "max_requests", "max_total_tokens",
)  # fmt: skip
"""Keys of such settings that say how the model is reached and what it may cost, not what it is asked."""


def divided(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings without the keys `REACHED_BY` of remote models, and these keys by their dotted place.

    >>> divided({"seed": 0, "chat": {"base_url": "http://a", "model": "b", "retries": 2}})
    ({'seed': 0, 'chat': {'model': 'b'}}, {'chat': {'base_url': 'http://a', 'retries': 2}})
    """
    servers: dict[str, dict[str, Any]] = {}

    def without(node: Any, place: tuple[str, ...]) -> Any:
        if not isinstance(node, Mapping):
            return node
        if ADDRESS in node:
            servers[".".join(place)] = {key: node[key] for key in REACHED_BY if key in node}
            node = {key: value for key, value in node.items() if key not in REACHED_BY}
        return {key: without(value, (*place, key)) for key, value in node.items()}

    return without(settings, ()), servers
