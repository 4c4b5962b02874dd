"""How large a model is, from its configuration and the shapes of its weights; none is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tasks.base.settings import TinyConf
from tasks.model import LoraConf, outline
from tasks.store import DataError


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

    def weights_below(self, limit: int) -> int:
        """Weights in tensors of less than this many numbers: norms, biases, small matrices."""
        matrices = [
            (self.hidden * self.query, 2 * self.layers),
            (self.hidden * self.keys, 2 * self.layers),
            (self.hidden * self.intermediate, 3 * self.layers),
            (self.vocab * self.hidden, 1 if self.is_tied else 2),
        ]
        return self.num_weights - sum(size * count for size, count in matrices if size >= limit)

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


def of_folder(folder: Path) -> ModelSize:
    """The model of a folder that transformers can open.

    Raises:
        DataError: as `tasks.model.outline`; or it has no attention.
    """
    model, *_ = outline(folder)
    config = model.config.get_text_config()
    try:
        heads, hidden, layers = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    except AttributeError as error:
        raise DataError(
            f"{folder}: the configuration of {type(model).__name__} has no {error.name}. Expected a decoder with "
            "attention, such as Qwen2 or Llama."
        ) from None
    return ModelSize(
        hidden=hidden,
        intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
        layers=layers,
        vocab=config.vocab_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        is_tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        num_weights=sum(weight.numel() for weight in model.parameters()),
        stored=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        positions=getattr(config, "max_position_embeddings", None) or 0,
    )
