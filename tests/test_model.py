"""Model folders: what is refused, and where each dtype is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks import model
from tasks.model import computes_in, export_folder, load_policy, load_tokenizer, loaded
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


def test_too_little_memory_is_no_damage(tmp_path: Path) -> None:
    def load() -> None:
        raise RuntimeError("unable to mmap 538090408 bytes from file <model.safetensors>: Cannot allocate memory (12)")

    with pytest.raises(DataError, match=r"too little memory to load the weights: unable to mmap .* Free some and run"):
        loaded(tmp_path, "the weights", load)


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    export_folder(make_model(tokenizer), tokenizer, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(DataError, match="transformers cannot load configuration and weights"):
        load_policy(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="transformers cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_a_processor_without_bfloat16_computes_in_float32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = torch.device("cpu")
    for name, has_it in (("float32", False), ("bfloat16", True)):
        monkeypatch.setattr(model, "_cpu_has_bfloat16", lambda has_it=has_it: has_it)
        found = [str(computes_in(dtype, cpu)) for dtype in ("auto", "float32", "bfloat16")]
        assert found == [f"torch.{name}", "torch.float32", f"torch.{name}"]
    assert [record.getMessage() for record in caplog.records] == [
        "bfloat16 was asked for, but this cpu has no instructions for it: computing in float32."
    ]
