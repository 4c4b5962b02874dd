"""What a device could do: GPUs by name, a processor by a product that takes no random numbers, several together."""

from __future__ import annotations

import pytest
import torch

from tasks import limits
from tasks.limits import Limit


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA L4", "bfloat16", 121),
    ],
)
def test_peaks_of_gpus_by_name(name: str, dtype: str, tera: float) -> None:
    found = limits.of_gpu(name, dtype)
    assert found.flop_per_s == tera * 1e12
    assert found.device == f"{name}, {dtype}"


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "Tesla T4", ""]
)
def test_a_part_of_a_gpu_or_another_one_has_no_limit_and_says_so(name: str) -> None:
    found = limits.of_gpu(name, "bfloat16")
    assert found.flop_per_s is None
    assert found.source == f"{name} is not in the table of tasks/limits.py"


def test_a_processor_is_measured_and_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    found = limits.of(torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.flop_per_s is not None
    assert 1e9 < found.flop_per_s < 1e15
    threads = torch.get_num_threads()
    assert found.device == f"processor, {threads} {'thread' if threads == 1 else 'threads'}, float32"


def test_devices_together() -> None:
    a, b, unknown = Limit("a", 2e12, "sheet"), Limit("b", 3e12, "measured"), Limit("c", None, "c is not in the table")
    assert limits.together([a, a, b]) == {"device": "2 x a; b", "flop_per_s": 7e12, "source": "sheet; measured"}
    assert limits.together([a, unknown]) == {
        "device": "a; c", "flop_per_s": None, "source": "c is not in the table",
    }  # fmt: skip
