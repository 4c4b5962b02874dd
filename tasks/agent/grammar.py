"""Reads actions from text and renders them: the tags of a trajectory, and the frames around documents.

A grammar parses what the policy wrote in one call; prompts and observations are never parsed. Retrieved text is data:
`neutralize` makes every reserved string in it inert, those of other grammars included. Each kind of grammar is a file
of `tasks/agent/grammars/`; this file holds what they share.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from tasks.conf import require
from tasks.types import Action, Hit

_FIELDS = ("number", "title", "text")
TAGS = ("think", "search", "information", "answer")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
_PAIRS = {
    True: re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL),
    False: re.compile(r"<(answer)>(.*?)</\1>", re.DOTALL),
}
_RESERVED = (
    *TAGS, "result", "warning", "tool_call", "tool_response", "tools", "observation", "original_evidence",
    r"sub_question\d*", r"sub_answer\d*",
)  # fmt: skip


_CONTROL = re.compile(
    r"<[|｜][^<>‹\s]{1,60}>|<\w{1,40}[|｜]>"  # ChatML, Llama 3, Qwen, Phi, DeepSeek, Cohere, Gemma 4.
    r"|</?(?:s|unk|pad|bos|eos|mask|sop|eop|start_of_turn|end_of_turn|start_of_image|end_of_image|seed:\w{1,20})>"
    r"|<</?SYS>>|\[\|\w{1,40}\|\]"  # Llama 2, EXAONE.
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID|THINK|CLS|SEP|MASK"
    r"|gMASK|sMASK|PAD|UNK|BOS|EOS)\]"  # Mistral, GLM, BERT.
)
"""Strings between which the templates of chat models put turns."""


@dataclass(frozen=True)
class SearchGrammar:
    """Tag pairs around a query or an answer; each kind adds how documents are rendered.

    Attributes:
        reserved: further strings that retrieved text must not contain (the tokens that were added to a tokenizer:
            special ones, tags, and pieces of the frame around a document).
        invalid_message: observation after a call without a valid action.
        opening, closing: text before and after the documents of an observation.
        document_format: template of one document, with `number`, `title` and `text`.
        last_message: added to the observation of the last search that is executed.
        can_search: False: only answers are read, no searches.
        tags: further tags of this grammar (regular expressions), which retrieved text must not contain either.
        literals: further strings that the tiny policy's tokenizer makes one token each.
    """

    reserved: tuple[str, ...] = ()
    invalid_message: str = INVALID
    opening: str = field(kw_only=True)
    closing: str = field(kw_only=True)
    document_format: str = field(kw_only=True)
    last_message: str = ""
    can_search: ClassVar[bool] = True
    tags: ClassVar[tuple[str, ...]] = ()
    literals: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        require(_shows_text(self.document_format), "document_format", self.document_format,
                "a template with {text} that may have {number} and {title}, and no other braces")  # fmt: skip
        require("" not in self.reserved, "reserved", self.reserved, "texts that are not empty")

    def fitted(self, tokenizer: Any) -> Self:
        """This grammar for one tokenizer, whose special and added tokens it reserves.

        An added token is cut out of a text wherever its string stands.
        """
        added = sorted(token for token in tokenizer.get_added_vocab() if token.strip())
        return replace(self, reserved=tuple(dict.fromkeys((*self.reserved, *tokenizer.all_special_tokens, *added))))

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that may end a call; the one of a search comes first."""
        return ("</search>", "</answer>") if self.can_search else ("</answer>",)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Descriptions of tools for the chat template, None where the grammar has no tools."""
        return None

    def kept(self, text: str) -> str:
        """The text of a call up to the first end of a search, else up to the first end of an answer, else all of it.

        >>> from tasks.agent.grammars.search_r1 import SearchR1Grammar
        >>> SearchR1Grammar().kept("<search> a </search> b")
        '<search> a </search>'
        """
        for closing in self.stop:
            head, end, _ = text.partition(closing)
            if end:
                return head + end
        return text

    def parse(self, text: str) -> Action:
        """The first well-formed search or answer pair of the kept text; content stripped.

        >>> from tasks.agent.grammars.search_r1 import SearchR1Grammar
        >>> SearchR1Grammar().parse("<think> x </think> <answer> Paris </answer>")
        Action(kind='answer', content='Paris', queries=(), note='')
        """
        pair = self._pair.search(self.kept(text))
        return self._action(pair[1], pair[2].strip()) if pair else Action("invalid")

    def is_complete(self, text: str) -> bool:
        """Whether a call may end here, because no later text could change its action.

        True after the end of a search, and after an `</answer>` that closes an `<answer>`. A stray `</answer>` leaves
        the call open, because a search may still follow; so does an answer inside a search that is still open.

        >>> from tasks.agent.grammars.search_r1 import SearchR1Grammar
        >>> [SearchR1Grammar().is_complete(t) for t in ("<answer> a </answer>", "<search> <answer> a </answer>")]
        [True, False]
        """
        end = self.stop[0]
        if len(self.stop) > 1 and end in text:
            return True
        pair = self._pair.search(self.kept(text))
        return pair is not None and (len(self.stop) == 1 or end.replace("/", "") not in text[: pair.start()])

    def render(self, action: Action) -> str:
        """The text that `parse` reads back as this action."""
        return f"<{action.kind}> {action.content} </{action.kind}>" if action.kind != "invalid" else ""

    @property
    def shows_evidence(self) -> bool:
        """Whether a demonstration copies what it has read before it answers."""
        return False

    def call(self, thought: str, action: Action, evidence: str = "") -> str:
        """The text of a whole call of a demonstration: a thought, evidence where the grammar has it, the action."""
        return f"<think> {thought} </think> {self.render(action)}"

    def complaint(self, action: Action) -> str:
        """The observation after an invalid action."""
        return self.invalid_message

    def body(self, action: Action, hits: Sequence[Sequence[Hit]]) -> str:
        """The documents between `opening` and `closing`; `hits` has one list for each query of the action."""
        return "".join(f"{document}\n" for of_query in hits for document in documents(self, of_query))

    def may_end(self, body: str) -> bool:
        """Whether a body that was cut to its token budget may end with this text."""
        return True

    def document(self, number: int, hit: Hit) -> str:
        """One retrieved document, numbered from 1, without its line break; nothing in it can act as a tag."""
        return self.document_format.format(
            number=number, title=self.neutralize(hit.title), text=self.neutralize(hit.text)
        )

    def neutralize(self, text: str) -> str:
        """The text with white space collapsed, in which no string can act as a tag, special token or next document.

        The first character of each reserved string is replaced by a look-alike, so that the text stays readable.

        >>> from tasks.agent.grammars.search_r1 import SearchR1Grammar
        >>> SearchR1Grammar().neutralize("a</information> <answer>b</answer>")
        'a‹/information> ‹answer>b‹/answer>'
        """
        text = " ".join(text.split())
        for special in self.reserved:
            while special in text:  # One pass misses a string that overlaps itself, such as "||" in "|||".
                text = text.replace(special, _inert(special))
        text = inert_tokens(text)
        if (frame := _frame_of(self.document_format)) is not None:
            text = frame.sub(lambda found: _inert(found[0]), text)
        # Tags come last: a look-alike may end a word, and so make a tag of what was none before.
        return _tag_like(self.tags).sub("‹", text)

    @property
    def _pair(self) -> re.Pattern[str]:
        return _PAIRS[self.can_search]

    def _action(self, kind: str, content: str) -> Action:
        return Action(kind, content)  # type: ignore[arg-type]


def inert_tokens(text: str) -> str:
    """The text without what chat models know as the beginning or end of a turn, whichever model will read it.

    Whoever sends text of a corpus or of a policy to a server does not know its tokenizer, and some servers read such
    strings in the content of a message as what they are for their own templates.

    >>> inert_tokens("x<|im_end|><|im_start|>system [/INST]</s> a < b | c > d [1]")
    'x‹|im_end|>‹|im_start|>system ⁅/INST]‹/s> a < b | c > d [1]'
    """
    return _CONTROL.sub(lambda found: _inert(found[0]), text)


def documents(grammar: SearchGrammar, hits: Sequence[Hit]) -> list[str]:
    """The documents of one query, in order."""
    return [grammar.document(i, hit) for i, hit in enumerate(hits, 1)]


def _shows_text(template: str) -> bool:
    """Whether a template of documents can be filled, and shows their text."""
    try:
        fields = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError:  # A single brace.
        return False
    return ("text", "", None) in fields and all(one[0] in _FIELDS and one[1:] == ("", None) for one in fields)


@functools.cache
def _frame_of(template: str) -> re.Pattern[str] | None:
    """Matches what a template of documents writes before a title or a text, None if that is no word.

    A passage with `Doc 2(Title: "` in it would look like two documents.
    """
    pattern, words = "", ""
    for literal, name, *_ in string.Formatter().parse(template):
        pattern += r"\s*".join(map(re.escape, re.split(r"\s+", literal)))
        words += literal
        if name != "number":
            break
        pattern += r"\s*\d+\s*"
    return re.compile(pattern) if re.search(r"[^\W\d_]{3}", words) else None


@functools.cache
def _tag_like(further: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the first character of a reserved tag, with any white space inside the tag."""
    return re.compile(r"<(?=\s*/?\s*(?:" + "|".join((*_RESERVED, *further)) + r")\b)", re.IGNORECASE)


def _inert(special: str) -> str:
    return {"<": "‹", "[": "⁅", "·": "•", '"': "”", "D": "Ｄ"}.get(special[0], "·") + special[1:]
