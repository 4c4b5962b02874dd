"""Reranking by a cross-encoder, which reads query and passage together and scores how well they fit. No downloads.

The model is a folder that transformers loads for sequence classification with one label, such as the
cross-encoders of sentence-transformers; weights are read from safetensors alone, so that no file runs code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from tasks.retrieval.encoders import folder_sha256
from tasks.store import DataError
from tasks.types import Hit


@dataclass(frozen=True)
class RerankConf:
    """Section `reranker` of `conf/retriever/*.yaml`.

    Attributes:
        model: folder of the cross-encoder; empty: no reranking.
        depth: number of first hits that are put into a new order; the others keep theirs behind them.
        batch_size: pairs in one pass of the model.
        max_tokens: cut a pair after so many tokens, the longer text first.
        device: where the model runs; it is a setting, because it changes the last bits of the scores.
    """

    model: str = ""
    depth: PositiveInt = 20
    batch_size: PositiveInt = 16
    max_tokens: Annotated[int, Field(ge=8)] = 256
    device: Literal["cpu", "cuda"] = "cpu"


class CrossEncoder:
    """Scores pairs of a query and a passage, the passage as title, line break, text.

    Attributes:
        sha256: identifies weights, tokenizer and configuration.
    """

    def __init__(self, conf: RerankConf) -> None:
        """Load the model and check it.

        Raises:
            DataError: no such folder, no safetensors, weights missing in it, or not one label.
        """
        folder = Path(conf.model)
        if not folder.is_dir():
            raise DataError(f"reranker={conf.model!r}: no such folder. Name a folder with a cross-encoder, or ''.")
        if not any(folder.glob("*.safetensors")):
            raise DataError(f"{folder}: no safetensors weights here. Save the model with safe_serialization=True.")
        self.sha256 = folder_sha256(folder)
        self._conf = conf
        self._tokenizer, self._model = _load(folder, conf.device)
        positions = getattr(self._model.config, "max_position_embeddings", None) or conf.max_tokens
        if conf.max_tokens > positions:
            raise DataError(
                f"{folder}: the model reads {positions} tokens, but max_tokens={conf.max_tokens}. Lower max_tokens."
            )

    def scores(self, query: str, hits: Sequence[Hit]) -> list[float]:
        """The sigmoid of the model's one output for each hit, in (0, 1), higher is better.

        One query at a time, so that its scores do not depend on the other queries.
        """
        import torch

        found: list[float] = []
        for start in range(0, len(hits), self._conf.batch_size):
            texts = [f"{hit.title}\n{hit.text}" for hit in hits[start : start + self._conf.batch_size]]
            pairs = self._tokenizer(
                [query] * len(texts),
                texts,
                truncation="longest_first",
                max_length=self._conf.max_tokens,
                padding=True,
                return_tensors="pt",
            )
            with torch.inference_mode():
                logits = self._model(**pairs.to(self._conf.device)).logits[:, 0]  # [batch]
            # float64: in float32 every logit above 17 would be 1.
            found += torch.sigmoid(logits.double()).tolist()
        return found


def _load(folder: Path, device: str) -> tuple[Any, Any]:
    from tasks.pretrained import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder}: transformers cannot load the cross-encoder ({reason}).") from None
    if loaded["missing_keys"]:  # transformers would fill them with random numbers.
        missing = ", ".join(sorted(loaded["missing_keys"])[:3])
        raise DataError(f"{folder}: the weights lack {missing}. Name a model trained to classify pairs of texts.")
    if model.config.num_labels != 1:
        raise DataError(f"{folder}: found {model.config.num_labels} labels, expected a cross-encoder with one.")
    return tokenizer, model.float().eval().to(device)
