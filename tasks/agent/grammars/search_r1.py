"""Search-R1: queries in search tags, documents in information tags.

Search-R1 Table 1 (arXiv 2503.09516; docs/methods/search_r1.md)
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.agent.grammar import SearchGrammar


@dataclass(frozen=True)
class SearchR1Grammar(SearchGrammar):
    """See the module and `SearchGrammar`."""

    opening: str = "\n\n<information>"
    closing: str = "</information>\n\n"
    document_format: str = 'Doc {number}(Title: "{title}") {text}'


PART = SearchR1Grammar
