"""How large a model is, read from its configuration and the headers of its files; no weight is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tasks import store
from tasks.base.settings import TinyConf
from tasks.model import LoraConf, stored_weights

CONFIG = "config.json"


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a causal LM that memory and disk depend on.

    Attributes:
        hidden, intermediate, layers, vocab: sizes as transformers names them.
        heads, kv_heads, head_dim: of its attention.
        is_tied: whether the output head is the embedding.
        num_weights: all of them, shared ones once.
        stored: bytes of its weights in files.
        positions: the longest text it was made for, in tokens; 0 where its configuration does not say.
    """

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    is_tied: bool
    num_weights: int = 0
    stored: int = 0
    positions: int = 0

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, which is that of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def decoder_weights(self) -> int:
        """Weights below the output head: those of a critic, but for its head of one row."""
        return self.num_weights - (0 if self.is_tied else self.vocab * self.hidden)

    def counted(self) -> int:
        """Weights of a decoder as Llama's and Qwen2's, without biases."""
        layer = self.hidden * (2 * self.query + 2 * self.keys + 3 * self.intermediate + 2)
        heads = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return heads + self.layers * layer + self.hidden

    def adapters(self, lora: LoraConf) -> int:
        """Weights of low-rank adapters on the layers that are named; 0 for rank 0."""
        shapes = {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }
        return self.layers * lora.rank * sum(sum(shapes.get(name, (0, 0))) for name in lora.targets)


def of_tiny(tiny: TinyConf) -> ModelSize:
    """The policy made from random weights, at most: its tokenizer may have fewer tokens."""
    head = tiny.hidden_size // tiny.num_heads
    size = ModelSize(
        tiny.hidden_size,
        tiny.intermediate_size,
        tiny.num_layers,
        tiny.max_vocab,
        tiny.num_heads,
        tiny.num_heads,
        head,
        is_tied=True,
    )
    return replace(size, num_weights=size.counted(), stored=4 * size.counted())


def of_folder(folder: Path) -> ModelSize | None:
    """The model of a folder; None where configuration or weights are missing, damaged or of an unknown kind.

    Whatever loads the folder says what is wrong with it.
    """
    try:
        config = store.read_json(folder / CONFIG)
        weights = stored_weights(folder)
        size = _of_config(config.get("text_config", config), has_head=any("lm_head" in name for name in weights))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError):
        return None
    if not weights:
        return None
    # A tied head that is stored beside the embedding is loaded once.
    count = sum(math.prod(shape) for name, (_, shape) in weights.items() if not (size.is_tied and "lm_head" in name))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return replace(size, num_weights=count, stored=stored)


def _of_config(config: Mapping[str, Any], has_head: bool) -> ModelSize:
    heads = int(config["num_attention_heads"])
    return ModelSize(
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        vocab=int(config["vocab_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        is_tied=bool(config.get("tie_word_embeddings", not has_head)),
        positions=int(config.get("max_position_embeddings") or 0),
    )
