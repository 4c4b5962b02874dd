"""Settings of the room, `conf/augment/*.yaml`; `tasks.conf` fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt

from tasks.conf import require
from tasks.services.replies import check_prompt
from tasks.types import Split

PLACEHOLDERS = ("{question}", "{answer}", "{hops}", "{num_queries}")


@dataclass(frozen=True)
class AugmentConf:
    """One file of `conf/augment/`.

    Attributes:
        writer: `rules` takes the decomposition and makes queries by rules; `openai` asks a model.
        splits: splits whose questions are augmented.
        num_queries: N, most queries per hop.
        sources: the M sources; `index` is the index of this run, other names are files of `conf/retriever/`.
        top_k: number of hits of each source.
        validity: when a source's result is valid. `nonempty`: it has a hit, and one that shares a word with the query
            where the source ranks by words (such a source fills its list with hits of score 0). `answer`: one of the
            hits is the hop's support passage or holds the sub-answer.
        batch_size: questions whose queries are searched together.
        chat: file of `conf/service/` that describes the model which `writer: openai` asks.
        prompt: the prompt of that model, with `PLACEHOLDERS`.
    """

    writer: Literal["rules", "openai"]
    splits: tuple[Split, ...]
    num_queries: PositiveInt
    sources: tuple[str, ...]
    top_k: PositiveInt
    validity: Literal["nonempty", "answer"]
    batch_size: PositiveInt = 256
    chat: str | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        for name in ("splits", "sources"):
            values = getattr(self, name)
            require(0 < len(values) == len(set(values)), name, values, "at least one name, and none twice")
        for name in ("chat", "prompt"):
            is_given = getattr(self, name) is not None
            expected = "a value with writer: openai, and none with another writer"
            require((self.writer == "openai") == is_given, name, getattr(self, name), expected)
        if self.prompt is not None:
            check_prompt(self.prompt, PLACEHOLDERS)
