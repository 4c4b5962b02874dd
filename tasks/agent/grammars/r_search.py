"""R-Search: documents in observation tags, no thought tags, and the evidence before the answer, in the same call.

Evidence is what the policy wrote: it is parsed by rewards (`tasks.rewards.blocks`), ends no call and is trained.
R-Search Table 1, Section 3.2.3 (arXiv 2506.04185; docs/methods/r_search.md)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.agent.grammar import SearchGrammar
from tasks.types import Action

EVIDENCE = "original_evidence"


@dataclass(frozen=True)
class RSearchGrammar(SearchGrammar):
    """See the module and `SearchGrammar`.

    Attributes:
        evidence: whether demonstrations write evidence; the variant without evidence shows none.
    """

    opening: str = "\n\n<observation>"
    closing: str = "</observation>\n\n"
    document_format: str = '(Title: "{title}") {text}'
    evidence: bool = True
    literals: ClassVar[tuple[str, ...]] = (
        "\n\n<observation>", "</observation>\n\n", '(Title: "', f" <{EVIDENCE}>", f" </{EVIDENCE}>"
    )  # fmt: skip

    @property
    def shows_evidence(self) -> bool:
        """See `SearchGrammar.shows_evidence`."""
        return self.evidence

    def call(self, thought: str, action: Action, evidence: str = "") -> str:
        """See `SearchGrammar.call`; a thought is free text."""
        block = f" <{EVIDENCE}> {evidence} </{EVIDENCE}>" if self.evidence and evidence else ""
        return f" {thought}{block} {self.render(action)}"


PART = RSearchGrammar
