"""What a play looks like as lines of text, for a terminal and for the thoughts of a chat.

Passages and models may hold anything, so control characters, escape sequences and signs that turn the direction of
writing come out as their code points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.tool.live import Complained, Event, Found, Part, Wrote
from tasks.types import Hit

_JOINERS = "\u200c\u200d"  # Some scripts need them, and they move nothing.
_MAX_SHOWN = 160
_COLOURS: dict[str, str] = {
    "thought": "\x1b[2m", "search": "\x1b[36m", "evidence": "\x1b[35m", "answer": "\x1b[1;32m", "passage": "\x1b[2;36m"
}  # fmt: skip
_PLAIN = "\x1b[0m"


def harmless(text: str) -> str:
    r"""The text with spaces for its white space, in which no character can move a cursor or hide another.

    >>> print(harmless("a\x1b[2J\nb\u202e"))
    a\x1b[2J b\u202e
    """
    return "".join(_harmless(character) for character in text)


def one_line(error: Exception) -> str:
    """A message for a terminal."""
    return f"error: {harmless(' '.join(str(error).split()))}"


def _harmless(character: str) -> str:
    if character.isspace():
        return " "
    if character.isprintable() or character in _JOINERS:
        return character
    return character.encode("unicode_escape").decode("ascii")


def shortened(text: str, most: int = _MAX_SHOWN) -> str:
    """One harmless line of at most `most` characters of the text, and three dots where more has been cut off."""
    words = " ".join(text[: 4 * most].split())
    line = harmless(words[:most].rstrip())
    return line if len(words) <= most and len(text) <= 4 * most else f"{line}..."


@dataclass
class Script:
    """Turns events into text, piece by piece; what it gives is to be joined without anything between.

    Attributes:
        has_colours: for a terminal that shows them.
        shows: the parts of a call that are shown.
        answer: what has been written as the answer since the last search.
    """

    has_colours: bool = False
    shows: tuple[Part, ...] = ("thought", "search", "evidence", "answer")
    answer: str = ""
    _open: Part | None = None
    _gap: str = ""

    def text(self, event: Event) -> str:
        """What to show of an event; may be empty."""
        if isinstance(event, Wrote):
            self.answer += event.text if event.part == "answer" else ""
            return self._wrote(event) if event.part in self.shows else ""
        self.answer = ""
        if isinstance(event, Complained):
            return f"{self.end()}(neither a search nor an answer)\n"
        assert isinstance(event, Found)
        lines = []
        for query, hits in zip(event.queries, event.hits, strict=True):
            lines += [f"  {shortened(query)}"] if len(event.queries) > 1 else []  # The only one has just been written.
            lines += _lines(hits)
        return self.end() + "".join(f"{self._coloured('passage', line)}\n" for line in lines)

    def _wrote(self, piece: Wrote) -> str:
        """The piece behind the name of its part; white space around a part is left out."""
        text = harmless(piece.text)
        start = ""
        if piece.part != self._open:
            text = text.lstrip()
            if not text:
                return ""
            start = f"{self.end()}{piece.part}: "
            self._open = piece.part
        else:
            text = self._gap + text
        kept = text.rstrip()
        self._gap = text[len(kept) :]
        return start + (self._coloured(piece.part, kept) if kept else "")

    def end(self) -> str:
        """The end of the line that is open, if one is."""
        is_open, self._open, self._gap = self._open is not None, None, ""
        return "\n" if is_open else ""

    def _coloured(self, name: str, text: str) -> str:
        return f"{_COLOURS[name]}{text}{_PLAIN}" if self.has_colours else text


def _lines(hits: Sequence[Hit]) -> list[str]:
    lines = [f"  [{rank}] {shortened(hit.title, 60)}: {shortened(hit.text)}" for rank, hit in enumerate(hits, 1)]
    return lines or ["  nothing"]
