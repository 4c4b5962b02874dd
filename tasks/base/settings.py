"""The settings of `conf/model/<name>.yaml` and of the `base` section of `conf/scale/<name>.yaml`. Loads no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from tasks.base.demonstrations import ImperfectConf
from tasks.base.fit import PhaseConf
from tasks.base.tokenizer import SMALLEST_VOCAB
from tasks.conf import Share, require
from tasks.model import Dtype, LoraConf
from tasks.model_source import Source


@dataclass(frozen=True)
class TinyConf:
    """Architecture of the policy made from random weights (Qwen2, tied embeddings).

    `initializer_range`: standard deviation of the random weights; 0.05 learns to copy in half the steps of 0.02.
    """

    hidden_size: Annotated[int, Field(ge=1, le=1 << 17)]  # One weight matrix of the largest has 69 GB.
    num_layers: PositiveInt
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    max_positions: PositiveInt
    max_vocab: Annotated[int, Field(ge=SMALLEST_VOCAB, description="bytes, tags and some words")]
    initializer_range: PositiveFloat

    def __post_init__(self) -> None:
        size = self.hidden_size // self.num_heads
        expected = f"an even number, 2 or more, in each of num_heads={self.num_heads}, whose sizes come in pairs"
        require(size >= 2 and size % 2 == 0, "hidden_size", self.hidden_size, expected)


@dataclass(frozen=True)
class PretrainedConf:
    """A model folder: configuration, safetensors weights, tokenizer.

    `source`: where it comes from if it is missing; null leaves it to you.
    """

    folder: str
    source: Source | None = None

    def __post_init__(self) -> None:
        is_below = bool(self.folder.strip()) and Path(self.folder).name not in ("", "..")
        require(is_below, "folder", self.folder, "the folder of a model, such as models/My-Model")


@dataclass(frozen=True)
class StartConf:
    """One file of `conf/start/`: the tiny policy of the run, taught the tags of another grammar.

    Attributes:
        prompt, grammar: of its demonstrations and of play: a file of `conf/prompt/`, and kind and settings.
        share: of the steps of the phase `wasteful`, which teach the tags; the phase `lazy` follows.
    """

    prompt: str
    grammar: dict[str, Any]
    share: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class ModelConf:
    """One file of `conf/model/`.

    Attributes:
        kind: `tiny` makes the policy from random weights, `pretrained` takes a model folder.
        prompt: a file of `conf/prompt/` in place of the method's; null keeps the method's.
        grammar: kind and settings in place of the method's, for a policy that knows only one grammar; null keeps it.
        lora: adapters during reinforcement learning.
        tiny, pretrained: the section named like `kind`.
        rollout: budgets of play that this model needs, such as `max_prompt_tokens`; laid over the scale's and over
            those of every method.
    """

    kind: Literal["tiny", "pretrained"]
    prompt: str | None
    lora: LoraConf
    grammar: dict[str, Any] | None = None
    tiny: TinyConf | None = None
    pretrained: PretrainedConf | None = None
    rollout: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, given in (("tiny", self.tiny), ("pretrained", self.pretrained)):
            is_needed = kind == self.kind
            expected = f"{'a' if is_needed else 'no'} section {kind!r} for kind {self.kind!r}"
            require((given is not None) == is_needed, kind, given, expected)


@dataclass(frozen=True)
class BaseConf:
    """How the tiny policy is taught before reinforcement learning: reading first, then imperfect behaviour.

    Attributes:
        num_threads: torch threads (part of the result).
        checkpoint_every: optimizer steps.
        max_batch_tokens: of one forward, padding included.
        max_questions: training questions that demonstrations are made from.
        recall: repeat shuffled token segments.
        read: clean one-hop demonstrations.
        wasteful: whole chains, each with a needless search; one-hop questions stay clean.
        lazy: mostly chains that stop early.
        wasteful_mixture, lazy_mixture: shares of the flaws in the demonstrations of these two phases.
    """

    num_threads: PositiveInt
    checkpoint_every: PositiveInt
    max_batch_tokens: PositiveInt
    max_questions: PositiveInt
    recall: PhaseConf
    read: PhaseConf
    wasteful: PhaseConf
    lazy: PhaseConf
    wasteful_mixture: ImperfectConf
    lazy_mixture: ImperfectConf


@dataclass(frozen=True)
class FormatConf:
    """How a pretrained model is taught the format of a search agent (`format` in conf/scale; null: as it comes).

    Attributes:
        num_threads: torch threads (part of the result).
        dtype: of forward and backward passes.
        checkpoint_every: optimizer steps.
        max_batch_tokens: of one forward, padding included.
        share_reading: read what demonstrations have in common at their beginning, such as instructions, once a forward.
        max_questions: training questions whose plans are tried.
        shortcut: share of the questions with a decomposition that are searched as they stand, in one search.
        repeat: share of the plans that repeat their last search.
        read: training before `fit`, on demonstrations in which each search shows only the passage that holds what it
            looked for. With one passage of three a demonstration has half the tokens, so as many seconds teach twice as
            many; null is none.
        fit: the training on demonstrations with all passages.
    """

    num_threads: PositiveInt
    dtype: Dtype
    checkpoint_every: PositiveInt
    max_batch_tokens: PositiveInt
    max_questions: PositiveInt
    shortcut: Share
    repeat: Share
    fit: PhaseConf
    read: PhaseConf | None = None
    share_reading: bool = False

    def __post_init__(self) -> None:
        if self.read is not None:
            require(self.read.stop_loss == 0, "read: stop_loss", self.read.stop_loss, "0: the phase has a fixed length")
