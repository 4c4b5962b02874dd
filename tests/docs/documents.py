"""The documents of the repository, and what they name: commands, paths, links."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(r"([A-Z_]+=\S+ )*(make|python|dvc|docker|curl|git|cp) \S")
"""How a span of code begins that is a command; variables may stand before it."""


@dataclass(frozen=True)
class Document:
    """One Markdown file; `path` is seen from the root."""

    path: Path
    text: str

    @property
    def prose(self) -> str:
        """The text without blocks of code and without comments."""
        return re.sub(r"<!--.*?-->", "", FENCE.sub("", self.text), flags=re.DOTALL)

    @property
    def spans(self) -> list[str]:
        """What stands between single back-ticks."""
        return SPAN.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """What a link may name behind `#`, as GitHub makes it of headings."""
        titles = HEADING.findall(FENCE.sub("", self.text))
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    def blocks(self, language: str) -> list[str]:
        """Blocks of code in this language."""
        return [dedent(body) for found, body in FENCE.findall(self.text) if found == language]

    def commands(self) -> Iterator[str]:
        """Every command: the lines of `bash` blocks, and spans that begin as `COMMAND` says."""
        for block in self.blocks("bash"):
            yield from (line for text in block.splitlines() if (line := re.sub(r"(^|\s+)#.*", "", text).strip()))
        yield from (span for span in self.spans if COMMAND.match(span))


def documents() -> list[Document]:
    """Every Markdown file that git tracks, but for the log and the changelog, which tell of the past."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "*.md"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = sorted(Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file())
    past = {Path("CHANGELOG.md"), Path("notebooks/LOG.md")}
    return [Document(path, (ROOT / path).read_text(encoding="utf-8")) for path in paths if path not in past]
