"""Which requirements `make` installs: those of the machine, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("nvidia_smi", "given", "wanted"),
    [
        ("echo 'GPU 0: some card (UUID: GPU-1)'; echo 'GPU 1: some card (UUID: GPU-2)'", [], "gpu.txt 2"),
        ("echo 'No devices were found'; exit 6", [], "cpu.txt 0"),
        ("exit 127", [], "cpu.txt 0"),
        ("echo 'GPU 0: some card (UUID: GPU-1)'", ["REQUIREMENTS=requirements/cpu.txt"], "cpu.txt 1"),
    ],
)
def test_requirements_follow_the_machine(tmp_path: Path, nvidia_smi: str, given: list[str], wanted: str) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    command.chmod(0o755)
    show = ["--eval", "show: ; @echo $(REQUIREMENTS) $(or $(GPUS),0)", "show"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--silent", *given, *show], cwd=ROOT, capture_output=True, text=True,
        env=environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.stdout.strip() == f"requirements/{wanted}", done.stderr
