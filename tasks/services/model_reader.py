"""A frozen model in this process that answers from evidence: any causal language model in a folder (R-Search)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import PositiveInt

from tasks.conf import require
from tasks.model import Dtype
from tasks.model_files import weights_sha256
from tasks.reader.reading import Habits, check_prompt, open_folder
from tasks.services import Resources, Role
from tasks.services.read_answers import KeptAnswers


@dataclass(frozen=True)
class ModelReader:
    """A given model.

    R-Search Eq. 4, Table 5 (arXiv 2506.04185; docs/methods/r_search.md)

    Attributes:
        folder: its folder, from the root of the clone.
        prompt: text with {question} and {evidence}, in the model's chat template where it has one.
        max_new_tokens: most tokens of an answer.
        window: most tokens of prompt and answer; longer evidence is cut at its end. Null takes the model's own.
        batch: pairs that are read at once.
        dtype: of its forward passes.
    """

    role: ClassVar[Role] = "reader"
    needs_reference: ClassVar[bool] = False

    folder: str
    prompt: str
    max_new_tokens: PositiveInt
    window: PositiveInt | None
    batch: PositiveInt
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        require(bool(self.folder.strip()), "folder", self.folder, "a model folder")
        check_prompt(self.prompt)
        expected = f"more than max_new_tokens={self.max_new_tokens}, or null"
        require(self.window is None or self.window > self.max_new_tokens, "window", self.window, expected)

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[KeptAnswers]:
        """Load the model; its memory is freed when nobody uses it any more."""
        folder = resources.root / Path(self.folder)
        reading = open_folder(folder, Habits(self.prompt, self.max_new_tokens), self.window, self.batch, self.dtype)
        yield KeptAnswers(reading, weights_sha256(folder), resources.scratch / "reader.jsonl")


PART = ModelReader
