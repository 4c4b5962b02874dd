"""DSPO: a search is a tool call, which is JSON with a list of queries; documents come as its response.

DSPO Section 3.1 (arXiv 2510.09255; docs/methods/dspo.md)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from tasks.agent.grammar import SearchGrammar, documents
from tasks.types import Action, Hit

MAX_QUERIES = 5
_CALL = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)
_FRAME = ("\n<tool_response>\n", "\n</tool_response>\n")
_RESULT = ('{"result": "', '"}')


@dataclass(frozen=True)
class ToolCallGrammar(SearchGrammar):
    """See the module and `SearchGrammar`.

    The response to a call that cannot be read says what is wrong with it. At most `MAX_QUERIES` queries of a call are
    searched, and the response says so. A bare string counts as a list of one query.
    """

    invalid_message: str = (
        "\nMy previous action is invalid. If I want to search, I should put a call of the function search between "
        "<tool_call> and </tool_call>. If I want to give the final answer, I should put the answer between <answer> "
        "and </answer>. Let me try again.\n"
    )
    opening: str = f"{_FRAME[0]}{_RESULT[0]}"
    closing: str = f"{_RESULT[1]}{_FRAME[1]}"
    document_format: str = 'Doc {number} (Title: "{title}")\n{text}'

    @property
    def stop(self) -> tuple[str, ...]:
        """See `SearchGrammar.stop`."""
        return ("</tool_call>", "</answer>")

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The only tool is the function `search`."""
        queries = {"type": "array", "items": {"type": "string"}, "description": "What to search for."}
        parameters = {"type": "object", "properties": {"query_list": queries}, "required": ["query_list"]}
        function = {"name": "search", "description": "Searches for passages.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def fitted(self, tokenizer: Any) -> Self:
        """Reserves the tokenizer's special tokens and frames responses as its chat template does."""
        before, after = tool_frame(tokenizer)
        return replace(super().fitted(tokenizer), opening=f"{before}{_RESULT[0]}", closing=f"{_RESULT[1]}{after}")

    def render(self, action: Action) -> str:
        """See `SearchGrammar.render`."""
        if action.kind != "search":
            return super().render(action)
        call = {"name": "search", "arguments": {"query_list": list(action.searches)}}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"

    def complaint(self, action: Action) -> str:
        """What is wrong with the call, framed as its response; without a call, the general message."""
        return f"{self.opening}{_escaped(action.note)}{self.closing}" if action.note else self.invalid_message

    def body(self, action: Action, hits: Sequence[Sequence[Hit]]) -> str:
        """The documents as the inside of a JSON string, with blank lines between them and dashes between queries."""
        blocks = ["\n\n".join(documents(self, of_query)) for of_query in hits]
        return _escaped("\n---\n".join([action.note, *blocks] if action.note else blocks))

    def may_end(self, body: str) -> bool:
        """False inside an escape sequence: it would swallow the quote that ends the JSON string."""
        tail = re.search(r"\\(u[0-9a-f]{0,3})?$", body)
        return tail is None or (len(body[: tail.start() + 1]) - len(body[: tail.start() + 1].rstrip("\\"))) % 2 == 0

    @property
    def _pair(self) -> re.Pattern[str]:
        return _CALL

    def _action(self, kind: str, content: str) -> Action:
        if kind == "answer":
            return Action("answer", content)

        try:
            call = json.loads(content)
        except (ValueError, RecursionError):
            return Action("invalid", note="Error: the call is not valid JSON.")
        if not isinstance(call, Mapping) or call.get("name") != "search":
            return Action("invalid", note='Error: expected an object whose "name" is "search".')

        arguments = call.get("arguments")
        queries = arguments.get("query_list") if isinstance(arguments, Mapping) else None
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            return Action("invalid", note='Error: expected "arguments" with "query_list", a list of texts, not empty.')

        note = f"Only the first {MAX_QUERIES} queries were searched." if len(queries) > MAX_QUERIES else ""
        searched = tuple(_storable(query).strip() for query in queries[:MAX_QUERIES])
        return Action("search", "; ".join(searched), searched, note)


def tool_frame(tokenizer: Any) -> tuple[str, str]:
    """Text before and after a tool's response in the conversation: tags, and the marks of the chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return _FRAME
    call, response = "~~call~~", "~~response~~"
    messages = [
        {"role": "user", "content": "~~question~~"},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": response},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, shown, after = text.partition(call)[2].partition(response)
    return (before, after) if shown and "<tool_response>" in before else _FRAME


def _escaped(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _storable(text: str) -> str:
    """The text without halves of surrogate pairs: JSON can write them, but no file or search engine can store them."""
    return text.encode("utf-8", "replace").decode()


PART = ToolCallGrammar
