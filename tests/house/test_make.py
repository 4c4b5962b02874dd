"""The Makefile: what it installs and with which Python, what it lists, which variables it refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flows.settings import VARIABLES

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


def _make(*words: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(["make", *words], cwd=cwd, capture_output=True, text=True, env=environment | more)


def test_help_lists_every_target_and_every_setting() -> None:
    done = _make("--silent", "help")
    assert done.returncode == 0, done.stderr
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert [name for name in phony[1].split() if not re.search(rf"\b{name}\b", done.stdout)] == []
    listed = re.findall(r"^  ([A-Z_]+)=", done.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(VARIABLES)


@pytest.mark.parametrize("words", [["test", "METHOD=stepsearch"], ["serve", "SEEDS=0"], ["ui", "PORT_PREFCT=1"]])
def test_a_variable_that_a_target_does_not_have_is_refused(words: list[str]) -> None:
    done = _make("--dry-run", *words)
    assert done.returncode == 2
    assert f"{words[1].partition('=')[0]}: only run, smoke and compare take settings" in done.stderr


@pytest.mark.slow
def test_a_half_made_environment_is_made_anew_from_a_python_outside_of_it(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements", ignore=shutil.ignore_patterns(".made-from"))
    half = tmp_path / ".venv" / "bin"
    half.mkdir(parents=True)
    base = Path(os.path.realpath(sys.executable))
    for name in ("python3", "python3.11"):  # Without pyvenv.cfg this is a Python of its own, whatever it leads to.
        (half / name).symlink_to(base)
    (half / "half-installed").touch()
    done = _make("setup", cwd=tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert "No matching distribution found for uv" in done.stderr  # That is as far as it comes without a registry.
    home = re.search(r"^home = (.*)$", (tmp_path / ".venv/pyvenv.cfg").read_text(), re.MULTILINE)
    assert home is not None
    assert not Path(home[1]).is_relative_to(tmp_path)
    assert not (half / "half-installed").exists()
