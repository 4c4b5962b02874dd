"""What is a question at all, before any policy is asked: a command refuses what is none before a model is loaded."""

from __future__ import annotations

from tasks.store import DataError


class QuestionError(DataError):
    """This is no question that the policy can take; `is_too_long` says whether a shorter one would be."""

    def __init__(self, message: str, is_too_long: bool = False) -> None:
        super().__init__(message)
        self.is_too_long = is_too_long


def require_text(text: str) -> None:
    """Refuse what is no question, whoever is asked.

    Raises:
        QuestionError: the text is blank or is no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QuestionError(
            f"question: found half of a surrogate pair, or a byte that is no UTF-8, at character {error.start}, "
            "expected text."
        ) from None
    if not text.strip():
        raise QuestionError("question: found nothing, expected a question about what the index holds.")
