"""Model folders: what is refused, and where each dtype is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.model import computes_in, export_folder, load_policy, load_tokenizer
from tasks.store import DataError
from tests.tiny import make_model, make_tokenizer


@pytest.mark.parametrize(
    ("gone", "what"),
    [
        ("config.json", "model configuration"),
        ("model.safetensors", "safetensors weights"),
        ("tokenizer*", "tokenizer"),
        ("*", "model configuration"),
    ],
)
def test_folders_that_are_no_policy(tmp_path: Path, gone: str, what: str) -> None:
    tokenizer = make_tokenizer()
    export_folder(make_model(tokenizer), tokenizer, tmp_path)
    for path in tmp_path.glob(gone):
        path.unlink()
    with pytest.raises(DataError, match=f"no {what} found"):
        load_policy(tmp_path)
    with pytest.raises(DataError, match="the model folder is missing"):
        load_policy(tmp_path / "absent")
    with pytest.raises(DataError, match=f"no {what} found"):
        load_tokenizer(tmp_path)


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    export_folder(make_model(tokenizer), tokenizer, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(DataError, match="transformers cannot load configuration and weights"):
        load_policy(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="transformers cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_auto_is_float32_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    found = [computes_in(dtype, cpu) for dtype in ("auto", "float32", "bfloat16")]
    assert found == [torch.float32, torch.float32, torch.bfloat16]
