"""StepSearch: Search-R1's tags, documents with marked titles, and warnings.

The variant with sub-answers differs in its prompt alone: the policy writes further tags, which are no actions.
StepSearch Section 2.2 (arXiv 2505.15107; docs/methods/stepsearch.md)
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
