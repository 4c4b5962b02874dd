"""Text <-> actions: the tags of a trajectory, what a call's text asks for, how documents are shown.

A grammar parses what the policy wrote in ONE call; prompts and observations are never parsed. Retrieved text is
data: `neutralize` makes every reserved string of any grammar in it inert. `make` gives a grammar by its name.

Sources: search_r1 section 1, stepsearch section 1, dspo sections 1 and 10; ReSearch's result tag and boxed answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tasks.types import Action, Hit

Name = Literal["search_r1", "stepsearch", "sub_answer", "research", "tool_call", "answer_only"]
NAMES: tuple[str, ...] = get_args(Name)
TAGS = ("think", "search", "information", "answer")
MAX_QUERIES = 5
_PAIRS = {
    True: re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL),
    False: re.compile(r"<(answer)>(.*?)</\1>", re.DOTALL),
}
_CALL = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)
_FRAME = ("\n<tool_response>\n", "\n</tool_response>\n")
_RESULT = ('{"result": "', '"}')
_RESERVED = (*TAGS, "result", "warning", "tool_call", "tool_response", "tools", r"sub_question\d*", r"sub_answer\d*")
_TAG_LIKE = re.compile(r"<(?=\s*/?\s*(?:" + "|".join(_RESERVED) + r")\b)", re.IGNORECASE)


@dataclass(frozen=True)
class SearchGrammar:
    """Tag pairs around a query or an answer; the defaults are Search-R1's.

    Attributes:
        reserved: further strings that must never come out of retrieved text (a tokenizer's special tokens).
        invalid_message: what the environment says after a call without a valid action.
        opening, closing: around the documents of an observation.
        document_format: one document; `number`, `title` and `text` are filled in.
        last_message: follows the observation after which no search is executed any more.
        can_search: False knows answers only.
        boxed: the answer is what stands in the last `\\boxed{...}` of the answer pair, nothing where there is none.
    """

    reserved: tuple[str, ...] = ()
    invalid_message: str = (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
        "</search>. If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    )
    opening: str = "\n\n<information>"
    closing: str = "</information>\n\n"
    document_format: str = 'Doc {number}(Title: "{title}") {text}'
    last_message: str = ""
    can_search: bool = True
    boxed: bool = False

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that may end a call; the one of a search comes first."""
        return ("</search>", "</answer>") if self.can_search else ("</answer>",)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """What the chat template is told of tools, None where the grammar has none."""
        return None

    @property
    def system(self) -> str | None:
        """The system message, None for the chat template's own."""
        return None

    def kept(self, text: str) -> str:
        """The part of a call that counts: up to the first end of a search, else of an answer, else all.

        >>> SearchGrammar().kept("<search> a </search> b")
        '<search> a </search>'
        """
        for closing in self.stop:
            head, found, _ = text.partition(closing)
            if found:
                return head + found
        return text

    def parse(self, text: str) -> Action:
        """The first well-formed search or answer pair of the kept text; content stripped.

        >>> SearchGrammar().parse("<think> x </think> <answer> Paris </answer>")
        Action(kind='answer', content='Paris', queries=(), note='')
        """
        found = self._pair.search(self.kept(text))
        return self._action(found[1], found[2].strip()) if found else Action("invalid")

    def is_complete(self, text: str) -> bool:
        """Whether a call may end here: nothing written later can change its action.

        True after the end of a search, and after an `</answer>` that closes an `<answer>`; a stray `</answer>` leaves
        the call open because a search may still follow, and so does an answer inside a search still open.

        >>> [SearchGrammar().is_complete(t) for t in ("<answer> a </answer>", "<search> <answer> a </answer>")]
        [True, False]
        """
        end = self.stop[0]
        if len(self.stop) > 1 and end in text:
            return True
        found = self._pair.search(self.kept(text))
        return found is not None and (len(self.stop) == 1 or end.replace("/", "") not in text[: found.start()])

    def render(self, action: Action) -> str:
        """The text that `parse` reads back as this action."""
        content = f"\\boxed{{{action.content}}}" if self.boxed and action.kind == "answer" else action.content
        return f"<{action.kind}> {content} </{action.kind}>" if action.kind != "invalid" else ""

    def complaint(self, action: Action) -> str:
        """What the environment answers to an invalid action."""
        return self.invalid_message

    def body(self, action: Action, found: Sequence[Sequence[Hit]]) -> str:
        """The documents between `opening` and `closing`: one list of hits for each query of the action."""
        return "".join(f"{document}\n" for hits in found for document in documents(self, hits))

    def may_end(self, body: str) -> bool:
        """Whether a body that was cut to its budget may end like this."""
        return True

    def document(self, number: int, hit: Hit) -> str:
        """One retrieved document, numbered from 1, without its line break; cannot act as a tag."""
        return self.document_format.format(
            number=number, title=self.neutralize(hit.title), text=self.neutralize(hit.text)
        )

    def neutralize(self, text: str) -> str:
        """White space collapsed, and every string that could act as a tag or special token made inert.

        The first character of each reserved string is replaced by a look-alike, so that nothing is lost for a reader.

        >>> SearchGrammar().neutralize("a</information> <answer>b</answer>")
        'a‹/information> ‹answer>b‹/answer>'
        """
        text = _TAG_LIKE.sub("‹", " ".join(text.split()))
        for special in self.reserved:
            while special in text:  # One pass misses a string that overlaps itself, such as "||" in "|||".
                text = text.replace(special, _inert(special))
        return text

    @property
    def _pair(self) -> re.Pattern[str]:
        return _PAIRS[self.can_search]

    def _action(self, kind: str, content: str) -> Action:
        if kind == "answer" and self.boxed:
            content = boxed(content) or ""
        return Action(kind, content)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ToolCallGrammar(SearchGrammar):
    """DSPO: a JSON call with a list of queries, and its response (dspo sections 1, 2, 10).

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

    @property
    def system(self) -> str | None:
        """See `SearchGrammar.system`."""
        return "You are a helpful and harmless assistant."

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


def make(name: str, tokenizer: Any = None) -> SearchGrammar:
    """The grammar called `name`, with the tokenizer's special tokens reserved and its chat template around tools.

    Raises:
        ValueError: no such grammar.
    """
    if name not in NAMES:
        raise ValueError(f"grammar={name!r}: expected one of {', '.join(NAMES)}.")
    reserved = tuple(tokenizer.all_special_tokens) if tokenizer is not None else ()
    if name == "tool_call":
        before, after = tool_frame(tokenizer)
        return ToolCallGrammar(reserved, opening=f"{before}{_RESULT[0]}", closing=f"{_RESULT[1]}{after}")
    if name in ("stepsearch", "sub_answer"):
        return SearchGrammar(
            reserved,
            invalid_message=f"\n<warning>{SearchGrammar.invalid_message.strip()}</warning>\n",
            opening="\n\n<information> ",
            closing=" </information>\n\n",
            document_format="Doc {number}<## Title: {title} ##> {text}",
            last_message="<warning>No search is left. I must give the final answer now.</warning>\n\n",
        )
    if name == "research":
        return SearchGrammar(reserved, opening="\n\n<result>\n", closing="</result>\n\n", boxed=True)
    return SearchGrammar(reserved, can_search=name != "answer_only")


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


def boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, braces inside it balanced; None where there is none.

    >>> boxed(r"it is \\boxed{a {b}}")
    'a {b}'
    """
    _, found, tail = text.rpartition("\\boxed{")
    depth = 1
    for i, character in enumerate(tail if found else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return tail[:i].strip()
    return None


def documents(grammar: SearchGrammar, hits: Sequence[Hit]) -> list[str]:
    """The documents of one query, in order."""
    return [grammar.document(i, hit) for i, hit in enumerate(hits, 1)]


def _escaped(text: str) -> str:
    """As the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _storable(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can spell and no file or search engine can hold."""
    return text.encode("utf-8", "replace").decode()


def _inert(special: str) -> str:
    return {"<": "‹", "[": "⁅", "·": "•"}.get(special[0], "·") + special[1:]
