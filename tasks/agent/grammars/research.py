"""ReSearch: documents in result tags, the answer in a box.

ReSearch Section 2 (arXiv 2503.19470; docs/methods/research.md)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.agent.grammar import SearchGrammar
from tasks.types import Action


@dataclass(frozen=True)
class ResearchGrammar(SearchGrammar):
    """The answer is the content of the last `\\boxed{...}` in the answer pair, and empty without a box."""

    opening: str = "\n\n<result>\n"
    closing: str = "</result>\n\n"
    document_format: str = 'Doc {number}(Title: "{title}") {text}'

    def render(self, action: Action) -> str:
        """See `SearchGrammar.render`."""
        if action.kind != "answer":
            return super().render(action)
        return super().render(replace(action, content=f"\\boxed{{{action.content}}}"))

    def _action(self, kind: str, content: str) -> Action:
        return super()._action(kind, (boxed(content) or "") if kind == "answer" else content)


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, with balanced braces inside; None without a box.

    >>> boxed(r"it is \\boxed{a {b}}")
    'a {b}'
    """
    _, opening, tail = text.rpartition("\\boxed{")
    depth = 1
    for i, character in enumerate(tail if opening else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return tail[:i].strip()
    return None


PART = ResearchGrammar
