"""StepSearch: Search-R1's tags, documents with marked titles, and warnings (arXiv:2505.15107).

Its variant with sub-answers writes further tags, which are no actions; they differ in the prompt alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.agent.grammar import INVALID, SearchGrammar


@dataclass(frozen=True)
class StepSearchGrammar(SearchGrammar):
    """See the module and `SearchGrammar`."""

    invalid_message: str = f"\n<warning>{INVALID.strip()}</warning>\n"
    opening: str = "\n\n<information> "
    closing: str = " </information>\n\n"
    document_format: str = "Doc {number}<## Title: {title} ##> {text}"
    last_message: str = "<warning>No search is left. I must give the final answer now.</warning>\n\n"


PART = StepSearchGrammar
