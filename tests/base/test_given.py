"""A model folder that is taken as it comes becomes the start policy of each seed, in the dtype of its files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from tasks.base.settings import PretrainedConf
from tasks.model import export_folder
from tasks.runner import Context
from tasks.stages import base
from tests.tiny import make_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_copied_bit_for_bit_in_its_own_dtype(tmp_path: Path, tokenizer: Any, dtype: torch.dtype) -> None:
    export_folder(make_model(tokenizer).to(dtype), tokenizer, tmp_path / "models/given")
    settings = base.Settings(0, None, PretrainedConf("models/given"), None)
    made = SimpleNamespace(root=tmp_path, settings=settings, track_outcome=lambda folder, rows: None)
    base.body(cast("Context[base.Settings]", made))
    given, copied = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("models/given", "artifacts/base/0/policy")
    )
    assert {tensor.dtype for tensor in copied.values()} == {dtype}
    assert copied.keys() == given.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in given.items())
