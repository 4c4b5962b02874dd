"""No search: the policy answers at once (R1, supervised fine-tuning). Documents are never shown.

DeepSeek-R1 Table 1 (arXiv 2501.12948; docs/methods/r1.md)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.agent.grammar import SearchGrammar


@dataclass(frozen=True)
class AnswerOnlyGrammar(SearchGrammar):
    """See the module and `SearchGrammar`."""

    opening: str = ""
    closing: str = ""
    document_format: str = "{text}"
    can_search: ClassVar[bool] = False


PART = AnswerOnlyGrammar
