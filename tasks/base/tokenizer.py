"""A small byte-level BPE for the tiny policy, trained on the corpus it will read.

On a generated world training merges until every word is one token: a tiny model does not learn to copy names of many
pieces. On real text it stops at the vocabulary's size. Tags and the frames around documents are single tokens. The
class is the one that transformers loads for a Qwen2 folder, so that any tool that opens the folder splits text as
training did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

END, PAD = "<|endoftext|>", "<|pad|>"
LITERALS = (
    "<think>", " </think>", " <search>", " </search>", " <answer>", " </answer>",
    "\n\n<information>", "</information>\n\n", '")',
    *(f'Doc {i}(Title: "' for i in range(1, 11)),
)  # fmt: skip
NUM_SPECIAL = len(LITERALS) + 2
SMALLEST_VOCAB = 256 + NUM_SPECIAL + 16
"""Bytes, literals, end, padding and some words."""


def build_tokenizer(texts: Iterable[str], max_vocab: int, literals: Sequence[str] = LITERALS) -> Any:
    """A `Qwen2Tokenizer` of at most `max_vocab` tokens, in which each of `literals` is one.

    The same texts give the same tokenizer. Its smallest size is `SMALLEST_VOCAB` with the usual literals.
    """
    from tokenizers import AddedToken, pre_tokenizers, trainers

    from tasks.pretrained import Qwen2Tokenizer

    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Qwen2Tokenizer(vocab=alphabet, merges=[]).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab - len(literals) - 2, min_frequency=2, initial_alphabet=list(alphabet), show_progress=False
    )
    core.train_from_iterator(texts, trainer)

    vocab, merges = _model(core)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, unk_token=None, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in literals])
    return tokenizer


def _model(core: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    import json

    model = json.loads(core.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]
