"""Requests and answers of OpenAI's chat completions, as far as a policy that answers one question can give them.

The last message of the user is the question; earlier messages are not read. What the policy thinks, searches and finds
comes as `reasoning_content`, its answer as `content`. Every field of a request is read, ignored or refused: play is
greedy and has the budgets of training, so settings of sampling and lengths are ignored; a request for something that a
policy cannot give at all is refused, and so is a field that no list below has, because it may be a misspelt one.
"""

from __future__ import annotations

import difflib
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks import conf, store
from tasks.server.problems import error_object
from tasks.tool.asking import Played

_FINISH = {"answered": "stop", "open": "length", "overflow": "length"}
_READ = ("model", "messages", "stream", "stream_options")
_IGNORED = (
    # Of sampling and lengths, also as other servers than OpenAI's know it.
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "repeat_penalty", "logit_bias", "max_tokens", "max_completion_tokens", "min_tokens", "stop",
    "reasoning_effort", "verbosity",
    # They change no answer.
    "user", "safety_identifier", "metadata", "store", "service_tier", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
}
"""Field -> the only values that can be served."""
_MAX_NAME = 80
_OF_STREAMS = ("include_usage", "include_obfuscation")


class ApiError(Exception):
    """A request that is answered with OpenAI's error object.

    Attributes:
        status: of the answer.
        headers: of the answer, besides those of its content.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self._param, self._code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def tree(self) -> dict[str, Any]:
        """The error object."""
        return error_object(self.status, str(self), self._param, self._code)


@dataclass(frozen=True)
class ChatRequest:
    """What a request asks for."""

    question: str
    streams: bool
    includes_usage: bool


def parsed(body: bytes, model: str) -> ChatRequest:
    """The request in a body.

    Args:
        body: of a request.
        model: the only one that is served.

    Raises:
        ApiError: 400 if this is no request, 404 if it names another model.
    """
    try:
        tree = store.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"body: no JSON ({error}), expected a JSON object.") from None
    if not isinstance(tree, dict):
        raise ApiError(400, f"body: found {_kind(tree)}, expected a JSON object.")
    _check_model(tree.get("model"), model)
    _check_fields(tree, "", (*_READ, *_ONLY, *_IGNORED))
    for name, values in _ONLY.items():
        if not any(type(tree.get(name)) is type(value) and tree.get(name) == value for value in values):
            expected = " or ".join([*map(repr, values[1:]), "nothing"])
            raise ApiError(400, f"{name}: found {conf.shown(tree[name])}, expected {expected}.", name)

    streams = _flag(tree.get("stream"), "stream")
    options = tree.get("stream_options")
    if not isinstance(options, dict | None):
        raise ApiError(400, f"stream_options: found {_kind(options)}, expected an object.", "stream_options")
    _check_fields(options or {}, "stream_options.", _OF_STREAMS)
    includes_usage = _flag((options or {}).get("include_usage"), "stream_options.include_usage")
    return ChatRequest(_question(tree.get("messages")), streams, includes_usage)


def _check_fields(tree: Mapping[str, Any], above: str, known: Sequence[str]) -> None:
    """Refuse a field that nothing here is said of; it may be a misspelt one."""
    for name in tree:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {above}{close[0]}?" if close else " Leave it out."
            raise ApiError(
                400, f"{above}{conf.shown(name)[1:-1]}: unknown field.{hint}", name[:_MAX_NAME], "unknown_parameter"
            )


def _check_model(found: Any, model: str) -> None:
    if not isinstance(found, str):
        raise ApiError(400, f"model: found {_kind(found)}, expected {model!r}.", "model")
    if found != model:
        raise unknown_model(found, model)


def unknown_model(found: str, model: str) -> ApiError:
    """The error about a model that is not served."""
    message = f"model: found {conf.shown(found)}, expected {model!r}, the only one here."
    return ApiError(404, message, "model", "model_not_found")


def _flag(found: Any, name: str) -> bool:
    if not isinstance(found, bool | None):
        raise ApiError(400, f"{name}: found {conf.shown(found)}, expected true or false.", name)
    return bool(found)


def _question(messages: Any) -> str:
    """The text of the last message of the user."""
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else _kind(messages)
        raise ApiError(400, f"messages: found {found}, expected a list with a message of the user.", "messages")
    for number, message in reversed(list(enumerate(messages))):
        if not isinstance(message, dict):
            raise ApiError(400, f"messages[{number}]: found {_kind(message)}, expected an object.", "messages")
        if message.get("role") == "user":
            return _text(message.get("content"), f"messages[{number}].content")
    raise ApiError(400, "messages: found no message whose role is 'user', expected the question in one.", "messages")


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place}: found {_kind(content)}, expected text.", "messages")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            found = part.get("type") if isinstance(part, dict) else _kind(part)
            raise ApiError(400, f"{place}: found a part of type {conf.shown(found)}, expected text.", "messages")
    return "\n".join(part["text"] for part in content)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


@dataclass(frozen=True)
class Completion:
    """The answer to one request, whole or in chunks."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, played: Played, thoughts: str, answer: str) -> dict[str, Any]:
        """The object of a request that does not stream."""
        message = {"role": "assistant", "content": answer, "reasoning_content": thoughts, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[played.episode.status]}
        return self._object("chat.completion", [choice]) | {"usage": usage(played)}

    def chunk(self, finish_reason: str | None = None, **delta: str) -> dict[str, Any]:
        """One chunk of a stream."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._object("chat.completion.chunk", [choice])

    def last(self, played: Played, answer: str, includes_usage: bool) -> list[dict[str, Any]]:
        """The chunks of the answer, word by word, and those that end the stream.

        An answer is known when its closing tag is written, so it does not come while it is written.
        """
        chunks = [self.chunk(content=word) for word in re.findall(r"\s*\S+|\s+\Z", answer)]
        chunks.append(self.chunk(_FINISH[played.episode.status]))
        if includes_usage:
            chunks.append(self._object("chat.completion.chunk", []) | {"usage": usage(played)})
        return chunks

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": choices}


def usage(played: Played) -> dict[str, int]:
    """Tokens that the policy read (prompt and observations) and wrote."""
    read, written = played.episode.cost.prefill_tokens, played.episode.cost.generated_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
