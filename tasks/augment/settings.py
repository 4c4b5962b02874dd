"""Settings of the room, `conf/augment/*.yaml` and `conf/simulator/*.yaml`; `tasks.conf` fills them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from tasks.conf import require
from tasks.types import Split

PLACEHOLDERS = ("{question}", "{answer}", "{hops}", "{num_queries}")
DOCUMENT_PLACEHOLDERS = ("{query}", "{kind}", "{num_documents}")
_OWN_FIELDS = ("model", "messages", "stream", "n")


@dataclass(frozen=True)
class EndpointConf:
    """A server that speaks the chat-completions protocol.

    Attributes:
        base_url: up to and without `/chat/completions`.
        model: as the server calls it.
        key_variable: the environment variable that holds the key; empty where the server wants none. The key itself
            stands in no file.
        prompt: text with the placeholders of whoever asks.
        request: further fields of the request, as the server calls them (temperature, max_tokens, response_format).
        max_in_flight: requests at once.
        timeout_s: for the whole body of an answer, and for each wait for its headers.
        retries: further tries of a request that met status 408, 429 or 5xx, no connection or no answer in time.
        backoff_s: pause before the first of them, doubled for each further one, times a random number in [0.5, 1].
        max_backoff_s: longest pause of our own; a server that asks for a longer one (Retry-After) gets it.
        max_retry_after_s: a server that asks for more than this ends the run.
        max_refused_in_a_row: questions that the server refuses (a status such as 400) one after another; more end it.
        max_requests: over all runs of this endpoint and model, further tries included.
        max_total_tokens: of prompts and replies, over all such runs. Replies in flight may exceed it.
    """

    base_url: str
    model: str
    key_variable: str
    prompt: str
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
            require(field not in self.request, "request", field, "fields that are not set by the writer itself")
        for name in ("max_in_flight", "max_requests", "max_total_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("retries", "max_refused_in_a_row", "max_retry_after_s"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("timeout_s", "backoff_s", "max_backoff_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")


@dataclass(frozen=True)
class AugmentConf:
    """One file of `conf/augment/`.

    Attributes:
        writer: `rules` takes the decomposition as it is and makes queries by rules; `openai` asks a model.
        splits: whose questions are augmented.
        num_queries: N, queries a hop at most.
        sources: M of them: `index` is the index of this run, other names are those of `conf/retriever/`.
        top_k: hits asked of each source.
        validity: when a source's result is valid. `nonempty`: it has a hit, and one that shares a word with the query
            where the source ranks by words (such a source fills its list with hits of score 0). `answer`: one of the
            hits is the hop's support passage or holds the sub-answer.
        batch_size: questions whose queries are searched together.
        openai: of the writer with that name.
    """

    writer: Literal["rules", "openai"]
    splits: tuple[Split, ...]
    num_queries: int
    sources: tuple[str, ...]
    top_k: int
    validity: Literal["nonempty", "answer"]
    batch_size: int = 256
    openai: EndpointConf | None = None

    def __post_init__(self) -> None:
        for name in ("splits", "sources"):
            values = getattr(self, name)
            require(0 < len(values) == len(set(values)), name, values, "at least one name, and none twice")
        for name in ("num_queries", "top_k", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require((self.writer == "openai") == (self.openai is not None), "openai", self.openai is not None,
                "this section with writer: openai, and with no other")  # fmt: skip
        if self.openai is not None:
            check_prompt(self.openai, PLACEHOLDERS)


@dataclass(frozen=True)
class SimulatorConf:
    """`conf/simulator/endpoint.yaml`: the model that writes documents; its prompt has `DOCUMENT_PLACEHOLDERS`.

    Attributes:
        endpoint: where it is and what it may cost.
        useful, noisy: what stands for `{kind}`.
        attempts: requests for a query until one reply can be read.
    """

    endpoint: EndpointConf
    useful: str
    noisy: str
    attempts: int

    def __post_init__(self) -> None:
        require(self.attempts >= 1, "attempts", self.attempts, "at least 1")
        check_prompt(self.endpoint, DOCUMENT_PLACEHOLDERS)


def check_prompt(conf: EndpointConf, placeholders: tuple[str, ...]) -> None:
    """Raise the ValueError for a prompt that lacks one."""
    for placeholder in placeholders:
        require(placeholder in conf.prompt, "prompt", f"{conf.prompt[:40]}...", f"text with {placeholder}")
