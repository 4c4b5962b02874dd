"""The grammars, one file for each kind; see `tasks.agent.grammar` for what they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks import parts
from tasks.agent.grammar import SearchGrammar


def make(tree: Mapping[str, Any], tokenizer: Any, where: str) -> SearchGrammar:
    """The grammar that settings describe, fitted to a tokenizer; None leaves it without special tokens.

    Raises:
        ValueError: unknown kind or wrong settings; starts with `where`, the file and key.
    """
    grammar: SearchGrammar = parts.make("agent.grammars", tree, where)
    return grammar if tokenizer is None else grammar.fitted(tokenizer)
