"""How many floating-point operations a decoder needs to learn from tokens, counted from the shapes of its weights.

A multiplication with an addition is two operations. A token that is read costs, for each weight of a matrix, 2 forward
and 4 backward, 2 for the gradient of the input and 2 for that of the weight: 6 N (Kaplan et al. 2020, section 2.1).
Attention adds 12 L H Q for each pair of a token and one that it attends to, for L layers of H heads of width Q
(Chowdhery et al. 2022, PaLM, appendix B). docs/cluster.md names both papers by their numbers.

Three things are counted more closely than there, each of which gives fewer operations: a pair counts only where a
token attends to the other, which is about half of PaLM's; the output head counts for the tokens that are predicted; a
weight that adapters leave as it is has no gradient.

Only what the model needs is counted (model FLOPs): activations that are computed again in the backward pass, norms,
the softmax, the loss and the optimizer are not. Of a mixture of experts all experts would be counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.model import LoraConf, outline


@dataclass(frozen=True)
class Read:
    """What a model reads in updates.

    Attributes:
        positions: tokens; what is read once for several samples counts once, padding does not.
        pairs: of a token and one that it attends to, itself among them.
        predicted: tokens whose log-probability is computed.
    """

    positions: int
    pairs: int
    predicted: int


@dataclass(frozen=True)
class Decoder:
    """The weights of a model in matrices, and what its attention multiplies.

    Attributes:
        body: weights with which every position is multiplied.
        trained: those of them that have a gradient.
        head: weights with which each predicted token is multiplied.
        trained_head: those of them that have a gradient.
        attention: layers x heads x width of a head.
    """

    body: int
    trained: int
    head: int
    trained_head: int
    attention: int

    def flop(self, read: Read) -> float:
        """Operations of the forward and the backward pass over what is read.

        >>> Decoder(body=10, trained=10, head=5, trained_head=5, attention=2).flop(Read(3, 6, 1))
        354.0
        """
        body = read.positions * (4 * self.body + 2 * self.trained)
        head = read.predicted * (4 * self.head + 2 * self.trained_head)
        return float(body + head + 12 * self.attention * read.pairs)


@dataclass(frozen=True)
class Trained:
    """The models that learn; `critic` is None where there is none."""

    policy: Decoder
    critic: Decoder | None = None

    def flop(self, read: Read) -> float:
        """Operations of an update of both; the critic's head is part of its body."""
        return sum(model.flop(read) for model in (self.policy, self.critic) if model is not None)


def of_folder(folder: Path, lora: LoraConf, has_critic: bool) -> Trained:
    """The policy that begins with the model of a folder, and the critic that is made from it.

    Raises:
        DataError: as `tasks.model.outline`.
    """
    model, *_ = outline(folder)
    return Trained(policy_of(model, lora), critic_of(model) if has_critic else None)


def policy_of(model: Any, lora: LoraConf) -> Decoder:
    """A causal LM without adapters, to which these are added; rank 0 trains all weights."""
    decoder, head = model.get_decoder(), model.get_output_embeddings().weight.numel()
    body = sum(_matrices(decoder))
    if not lora.rank:
        return Decoder(body, body, head, head, _attention(model))
    adapters = sum(lora.rank * (outputs + inputs) for outputs, inputs in _adapted(decoder, lora))
    return Decoder(body + adapters, adapters, head, 0, _attention(model))


def critic_of(model: Any) -> Decoder:
    """A copy of the model's decoder with a head of one row; all weights are trained."""
    body = sum(_matrices(model.get_decoder())) + model.config.get_text_config().hidden_size
    return Decoder(body, body, 0, 0, _attention(model))


def _matrices(decoder: Any) -> Iterator[int]:
    """Sizes of the weights that are multiplied; an embedding is looked up."""
    from torch import nn

    for module in decoder.modules():
        if not isinstance(module, nn.Embedding):
            yield from (weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)


def _adapted(decoder: Any, lora: LoraConf) -> Iterator[tuple[int, int]]:
    """Outputs and inputs of the linear layers that get adapters."""
    from torch import nn

    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.targets:
            yield module.out_features, module.in_features


def _attention(model: Any) -> int:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers * heads * width)
