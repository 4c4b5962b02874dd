"""The classes of transformers that this project uses, imported without libraries that it does not use.

Where scikit-learn and scipy are installed, transformers imports them beside every model and tokenizer: for one way of
assisted decoding and for the losses of object detection. Nobody here uses either, and every process that loads a model
would pay 1.8 s of processor time for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import other
from transformers import utils
from transformers.utils import logging

logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # One bar for each load of weights, between real ones.
other.is_deepspeed_available = lambda: False  # Saving a model would import DeepSpeed, which takes 2 s.


@contextmanager
def _without(*libraries: str) -> Iterator[None]:
    """What transformers imports within, it imports as if these libraries were not installed."""
    names = [f"is_{library}_available" for library in libraries]
    real = {name: getattr(utils, name) for name in names}
    try:
        for name in names:
            setattr(utils, name, lambda: False)
        yield
    finally:
        for name in names:
            setattr(utils, name, real[name])


with _without("sklearn", "scipy"):
    from transformers import AutoConfig as AutoConfig
    from transformers import AutoModelForCausalLM as AutoModelForCausalLM
    from transformers import AutoModelForSequenceClassification as AutoModelForSequenceClassification
    from transformers import AutoTokenizer as AutoTokenizer
    from transformers import Qwen2Config as Qwen2Config
    from transformers import Qwen2ForCausalLM as Qwen2ForCausalLM
    from transformers.cache_utils import Cache as Cache
    from transformers.modeling_layers import GradientCheckpointingLayer as GradientCheckpointingLayer
    from transformers.modeling_utils import AttentionInterface as AttentionInterface
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer as Qwen2Tokenizer
