"""DSPO: a search is a tool call, JSON with a list of queries, and documents are its response."""

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

    A call that cannot be read is answered by what is wrong with it. At most `MAX_QUERIES` queries of a call are
    asked, and the response says so. A bare string counts as a list of one.
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
        """The one function there is."""
        queries = {"type": "array", "items": {"type": "string"}, "description": "What to search for."}
        parameters = {"type": "object", "properties": {"query_list": queries}, "required": ["query_list"]}
        function = {"name": "search", "description": "Searches for passages.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def fitted(self, tokenizer: Any) -> Self:
        """Its special tokens are reserved, and the response stands where its chat template puts it."""
        before, after = tool_frame(tokenizer)
        return replace(super().fitted(tokenizer), opening=f"{before}{_RESULT[0]}", closing=f"{_RESULT[1]}{after}")

    def render(self, action: Action) -> str:
        """See `SearchGrammar.render`."""
        if action.kind != "search":
            return super().render(action)
        call = {"name": "search", "arguments": {"query_list": list(action.searches)}}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"

    def complaint(self, action: Action) -> str:
        """What is wrong with a call, as its response; the general message where there was no call."""
        return f"{self.opening}{_escaped(action.note)}{self.closing}" if action.note else self.invalid_message

    def body(self, action: Action, found: Sequence[Sequence[Hit]]) -> str:
        """The inside of a JSON string: blank lines between documents, dashes between queries."""
        shown = ["\n\n".join(documents(self, hits)) for hits in found]
        return _escaped("\n---\n".join([*([action.note] * bool(action.note)), *shown]))

    def may_end(self, body: str) -> bool:
        """Not inside an escape sequence: what follows is the end of a JSON string."""
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
        asked = tuple(_storable(query).strip() for query in queries[:MAX_QUERIES])
        return Action("search", "; ".join(asked), asked, note)


def tool_frame(tokenizer: Any) -> tuple[str, str]:
    """What stands before and after a tool's response in the conversation: tags, and the chat template's own marks."""
    if not getattr(tokenizer, "chat_template", None):
        return _FRAME
    call, response = "~~call~~", "~~response~~"
    messages = [
        {"role": "user", "content": "~~question~~"},
        {"role": "assistant", "content": call},
        {"role": "tool", "content": response},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, found, after = text.partition(call)[2].partition(response)
    return (before, after) if found and "<tool_response>" in before else _FRAME


def _escaped(text: str) -> str:
    """As the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _storable(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can spell and no file or search engine can hold."""
    return text.encode("utf-8", "replace").decode()


PART = ToolCallGrammar
