"""Weights through memory: what another process reads is what was given, and nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.generate import WeightsError, checked, handover
from tasks.store import write_json

SHAPES = {"b": (3, 5), "a": (7,), "c": (2, 1, 4)}


def source(order: str = "abc") -> Iterator[tuple[str, torch.Tensor]]:
    """Weights in another order than `SHAPES`, one of them a transposed view."""
    values = {"a": torch.arange(7) / 3, "b": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).T}
    values["c"] = -torch.arange(8.0).reshape(2, 1, 4)
    return ((name, values[name]) for name in order)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_process_reads_what_was_given(dtype: torch.dtype) -> None:
    before = descriptors()
    with handover.staged(checked(source(), SHAPES), SHAPES, dtype) as path:
        code = (
            "import sys, hashlib; from safetensors import safe_open; f = safe_open(sys.argv[1], framework='pt');"
            "print(*(f'{n} {hashlib.sha256(f.get_tensor(n).float().numpy().tobytes()).hexdigest()}' for n in f.keys()))"
        )
        told = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout
        found = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in source())
    assert len(told.split()) == 6
    assert descriptors() == before
    assert not os.path.exists(path)  # noqa: PTH110


def test_shapes_of_a_folder(tmp_path: Path) -> None:
    weights = {name: tensor.contiguous() for name, tensor in source()}
    save_file({"a": weights["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": weights["b"], "c": weights["c"]}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    assert handover.stored_shapes(tmp_path) == SHAPES


def test_a_source_that_breaks_off_leaves_nothing() -> None:
    before = descriptors()
    with (
        pytest.raises(WeightsError, match="b is missing"),
        handover.staged(checked(source("ac"), SHAPES), SHAPES, torch.float32),
    ):
        raise AssertionError
    assert descriptors() == before
