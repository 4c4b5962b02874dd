"""The grammars, one file for each kind; see `tasks.agent.grammar` for what they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks import parts
from tasks.agent.grammar import SearchGrammar


def make(tree: Mapping[str, Any], tokenizer: Any, where: str) -> SearchGrammar:
    """The grammar that settings describe, for one tokenizer; None leaves its special tokens out.

    Raises:
        ValueError: unknown kind or settings; `where` says in which file and key.
    """
    grammar: SearchGrammar = parts.make("agent.grammars", tree, where)
    return grammar if tokenizer is None else grammar.fitted(tokenizer)
