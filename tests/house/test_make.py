"""The Makefile: what it installs and with which Python, what it lists, which variables it refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.params.edit import VARIABLES
from tests import shipped

ROOT = Path(__file__).parents[2]
FURTHER = ("STUDY", "MODEL", "INDEX", "POLICY", "READER", "PORT", "QUESTION", "METHOD", "FILE", "ARGS")
"""Variables that are no settings and that a recipe reads."""


def _make(*words: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    # `make test` exports its own default of POLICY, another one than that of `make ask`, and its LONG and ARGS.
    ours = ("MAKE", "POLICY", "LONG", "ARGS")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return subprocess.run(["make", *words], cwd=cwd, capture_output=True, text=True, env=environment | more)


def test_long_tests_run_where_they_are_asked_for() -> None:
    short, long = _make("-n", "test", "LONG=0").stdout, _make("-n", "test", "LONG=1").stdout
    assert '-m "not long"' in short
    assert "make test LONG=1" in short
    assert "pytest" in long
    assert "not long" not in long


def test_help_lists_every_target_and_every_setting() -> None:
    done = _make("--silent", "help")
    assert done.returncode == 0, done.stderr
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert [name for name in phony[1].split() if not re.search(rf"\b{name}\b", done.stdout)] == []
    listed = re.findall(r"^  ([A-Z_]+)=", done.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(VARIABLES)
    assert re.search(r"^  evidence-server +POLICY INDEX PORT PARTS ARGS$", done.stdout, re.MULTILINE)
    assert re.search(r"^  ui +PORT_PREFECT PORT_MLFLOW$", done.stdout, re.MULTILINE)
    recipes = re.findall(r"^([a-z-]+):[^=\n]*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target, recipe in recipes:
        used = set(re.findall(r"\$\$\{?([A-Z_]+)\b", recipe.replace("$(RUN_WITH_ARGS)", "$$ARGS"))) & set(FURTHER)
        told = re.search(rf"^  {target} +([A-Z_ ]+)$", done.stdout, re.MULTILINE)
        assert used <= set(told[1].split() if told else ()), target


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("test METHOD=stepsearch", "METHOD: test has no such variable. Did you mean METHODS, which only run, smoke"),
        ("report SEED=0", "SEED: report has no such variable. Did you mean SEEDS, which only run, smoke and compare"),
        ("serve SEEDS=0", "SEEDS: serve has no such variable. Did you mean SEEDS, which only run, smoke and compare"),
        ("ui PORT_PREFCT=1", "PORT_PREFCT: ui has no such variable. Did you mean PORT_PREFECT? See `make help`"),
        ("search-server INDX=a", "INDX: search-server has no such variable. Did you mean INDEX?"),
        ("search-server POLICY=a", "POLICY: search-server has no such variable. See `make help`"),
        ("evidence-server POLICYS=a PORT=1", "POLICYS: evidence-server has no such variable. Did you mean POLICY?"),
        ("ask QUESTON=a", "QUESTON: ask has no such variable. Did you mean QUESTION? See `make help`"),
        ("measure-tool PORT=1", "PORT: measure-tool has no such variable. Did you mean PARTS?"),
        ("lint x'=1", "found a variable whose name has other characters than letters, digits and _"),
        ("run x;y=1", "found a variable whose name has other characters than letters, digits and _"),
        ("run train.num_steps=5", 'A setting of conf/ stands in SET, such as SET="train.num_steps=5"'),
        ("smoke rollout.top_k=2", 'A setting of conf/ stands in SET, such as SET="train.num_steps=5"'),
        ("compare train.policy.lr=1", 'A setting of conf/ stands in SET, such as SET="train.num_steps=5"'),
        ("run VENV=.venv;b", "VENV: expected one word without characters that mean something to a shell"),
    ],
)  # fmt: skip
def test_a_variable_that_a_target_does_not_have_is_refused(words: str, told: str) -> None:
    done = _make("--dry-run", *words.split())
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trian", "error: make has no target 'trian'. Did you mean make run? See `make help`"),
        ("setpu", "make has no target 'setpu'. Did you mean make setup?"),
        ("benchretrieval", "make has no target 'benchretrieval'. Did you mean make bench-retrieval?"),
        ("help xyzzy", "make has no target 'xyzzy'. See `make help`"),
        (f"$(touch{'$'}{{IFS}}ran_by_a_shell)", "make has no target '$(touch"),
    ],
)
def test_a_target_that_there_is_not_is_answered_with_the_nearest(words: str, told: str) -> None:
    done = _make(*words.split())
    assert done.returncode == 2
    assert told in done.stderr
    assert not (ROOT / "ran_by_a_shell").exists()


# What is handed on ----------------------------------------------------------------------------------------------------

TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
MODULES = (
    "flows.reproduce", "flows.ui", "flows.serve", "tasks.identity", "tasks.server.__main__", "tasks.tool.__main__",
    "tasks.tool.mcp_server", "tasks.tool.measure", "tasks.tool.ask", "tasks.tool.chat_server", "tasks.score",
    "tasks.runner.runs", "pytest", "tests.benchmarks.bench_slate",
    "tests.benchmarks.bench_server", "tests.benchmarks.bench_retrieval",
    "tests.benchmarks.bench_trl", "tests.benchmarks.bench_model",
)  # fmt: skip
STAMPS = tuple(f".venv/.made-from-{name}.txt" for name in ("run", "test", "bench"))
SETTINGS = ("DATA", "METHODS", "NOT_KNOWN", "PARTS", "SET")
FILE = "ran_by_a_shell"
ATTACKS = (
    f"it's \"; touch {FILE}; ' ; touch {FILE}; $(touch {FILE}) `touch {FILE}` && touch {FILE} #",
    f"$(shell touch {FILE})",
    f"$$(shell touch {FILE})$$(touch {FILE})",
    f"x\ntouch {FILE}\n",
    f"*;touch${{IFS}}{FILE}",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose Makefile starts modules that print their words and their environment."""
    root = tmp_path_factory.mktemp("told")
    for module in MODULES:
        path = root / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TELL if module != "tasks.identity" else "")
    for name in ("Makefile", "params.yaml"):
        shutil.copy(ROOT / name, root)
    (root / "requirements").mkdir()
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").symlink_to(sys.executable)
    for name in ("ruff", "mypy"):
        (root / ".venv/bin" / name).symlink_to("/bin/true")
    for stamp in STAMPS:
        (root / stamp).touch()
    return root


def _handed_on(root: Path, target: str, *given: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of the last module that a target starts."""
    old = (f"--old-file={stamp}" for stamp in STAMPS)
    words = ("--silent", *old, target, *given)
    done = _make(*words, cwd=root, **environment)
    assert done.returncode == 0, done.stderr
    last, variables = json.loads(done.stdout.splitlines()[-1])
    return last, variables


def test_settings_are_handed_on_and_nothing_of_makes_own(told: Path) -> None:
    given = ("SEEDS=0,1", "DATA=my folder", "PARALLEL=3", "SEDES=1", "SCALE=")
    words, _ = _handed_on(told, "run", *given, MODEL="of the environment", STUDY="of the environment")
    assert sorted(words[1::2]) == ["3", "DATA=my folder", "SEDES=1", "SEEDS=0,1"]
    assert sorted(words[::2]) == ["--max-parallel", "--set", "--set", "--set"]
    assert _handed_on(told, "smoke")[0] == ["--set", "scale=smoke", "--set", "data=smoke"]
    assert _handed_on(told, "smoke", "DATA=a b")[0][-2:] == ["--set", "DATA=a b"]
    assert _handed_on(told, "compare")[0] == ["--compare", "main", "--set", "scale=laptop"]
    assert _handed_on(told, "compare", "SCALE=smoke", "STUDY=b")[0] == ["--compare", "b", "--set", "SCALE=smoke"]
    for target in ("run", "smoke", "compare"):
        plain = _handed_on(told, target, KEEP="1")[0]  # Of the environment: a setting is none.
        assert "--keep" not in plain
        assert _handed_on(told, target, "KEEP=1")[0] == [*plain, "--keep"]
        assert _handed_on(told, target, "KEEP=0")[0] == plain
    refused = _make("run", "KEEP=yes", cwd=told)
    assert "KEEP: expected 1, which writes the settings of this run into params.yaml" in refused.stderr
    assert _handed_on(told, "search-server")[0] == ["--index", "artifacts/index"]
    asked = ["--policy", "search_r1_grpo-0", "--index", "artifacts/index"]
    assert _handed_on(told, "ask")[0] == _handed_on(told, "chat-server")[0] == asked
    assert _handed_on(told, "ask", "QUESTION=")[0] == [*asked, "--question="], "an empty one is refused, not left out"
    assert _handed_on(told, "ask", "RETRIEVER=bm25", "QUESTION=-x y?")[0] == [
        *asked, "--retriever", "bm25", "--question=-x y?"
    ]  # fmt: skip
    assert _handed_on(told, "bench")[0] == _handed_on(told, "bench", "MODEL=")[0] == []
    assert _handed_on(told, "bench", "MODEL=a b", "ARGS=--quick")[0] == ["--model=a b", "--quick"]
    assert _handed_on(told, "evidence-server")[0][1] == "artifacts/train/r_search-0"
    assert _handed_on(told, "test", "ARGS=-k 'a or b' -x", "PYTEST=-n 0", "LONG=1")[0] == [
        "-n", "0", "-k", "a or b", "-x"
    ]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    ("target", "names", "expected"),
    [
        ("run", " ".join(SETTINGS), [word for name in SETTINGS for word in ("--set", f"{name}={{}}")]),
        ("smoke", "SEEDS", ["--set", "SEEDS={}"]),
        ("score", "METHOD FILE PARTS", ["--method", "{}", "--file", "{}"]),
        ("runs", "REMOVE KEEP_LAST", ["--remove={}", "--keep-last={}"]),
        ("run", "PARALLEL", ["--max-parallel", "{}"]),
        ("smoke", "RUN_NAME", ["--set", "scale=smoke", "--set", "data=smoke", "--name={}"]),
        ("compare", "STUDY", ["--compare", "{}", "--set", "scale=laptop"]),
        ("search-server", "INDEX", ["--index", "{}"]),
        ("search-server", "PORT", ["--port", "{}"]),
        ("evidence-server", "POLICY", ["--policy", "{}", "--index", "artifacts/index"]),
        ("mcp-server", "PORT", ["--port", "{}"]),
        ("ask", "QUESTION", ["--index", "artifacts/index", "--question={}"]),
        ("ask", "POLICY", ["--policy", "{}", "--index", "artifacts/index"]),
        ("chat-server", "RETRIEVER", ["--retriever", "{}"]),
        ("bench", "MODEL", ["--model={}"]),
        ("measure-tool", "READER", ["--reader", "{}", "--index", "artifacts/index"]),
        ("ui", "PORT_PREFECT", []),
        ("ui", "PORT_MLFLOW", []),
        ("ui", "HF_HUB_OFFLINE", []),
    ],
)
def test_no_value_runs_as_code(told: Path, target: str, names: str, expected: list[str], attack: str) -> None:
    """Not even those that make would expand, nor what stands in the environment; each arrives as it was given."""
    as_words, of_all = [word.format(attack) for word in expected], dict.fromkeys(names.split(), attack)
    for given, environment in ((tuple(f"{name}={attack}" for name in of_all), {}), ((), of_all)):
        if given or expected[:1] != ["--set"]:  # A setting is none that happens to stand in the environment.
            words, variables = _handed_on(told, target, *given, **environment)
            assert words[len(words) - len(as_words) :] == as_words
            assert {name: variables[name] for name in of_all} == of_all
            if given and "PARTS" in of_all:
                assert variables["BREADCRUMB_PARTS"] == attack
    assert not (told / FILE).exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_words_of_the_user_are_split_and_not_run(told: Path, attack: str) -> None:
    for target in ("test", "check", "search-server", "bench", "bench-slate", "bench-retrieval"):
        for given, environment in (((f"ARGS={attack}",), {}), ((), {"ARGS": attack})):
            words, _ = _handed_on(told, target, *given, **environment)
            split = shlex.split(attack)
            assert words[-len(split) :] == split
            assert not (told / FILE).exists()
    done = _make(*(f"--old-file={stamp}" for stamp in STAMPS), "test", "ARGS=it's", cwd=told)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: ARGS: No closing quotation.")


@pytest.mark.parametrize("name", ["VENV", "PYTHON", "WITH", "BIN", "STAMP", "FIND_PYTHON", "odd", "SHELL"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_names_of_files_and_the_makefiles_own_words_run_nothing(told: Path, name: str, attack: str) -> None:
    for target in ("run", "help", "setup", "report"):
        _make(target, f"{name}={attack}", cwd=told)
        assert not (told / FILE).exists(), target
    _make("report", cwd=told, **{name: attack})
    assert not (told / FILE).exists()


NO_REGISTRY = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
"""As far as it comes without one: a new `.venv`, and no uv."""


def _requirements(root: Path) -> Path:
    shutil.copy(ROOT / "Makefile", root)
    shutil.copytree(ROOT / "requirements", root / "requirements", ignore=shutil.ignore_patterns(".installed"))
    (root / "tasks").mkdir()
    for path in shipped.files("tasks", "*.py"):
        if path.parent.name == "tasks":
            shutil.copy(path, root / "tasks")
    return root


def _is_made_anew(root: Path, **environment: str) -> None:
    """The next `make` makes a whole `.venv`, with a Python outside of it, of which nothing older remains."""
    done = _make("setup", cwd=root, **NO_REGISTRY, **environment)
    assert "No matching distribution found for uv" in done.stderr
    home = re.search(r"^home = (.*)$", (root / ".venv/pyvenv.cfg").read_text(), re.MULTILINE)
    assert home is not None
    assert not Path(home[1]).is_relative_to(root)
    assert (root / ".venv/bin/pip").exists()
    assert not (root / ".venv/bin/half-installed").exists()
    assert not list((root / ".venv").glob(".made-*"))


@pytest.mark.slow
def test_a_half_made_environment_is_made_anew_from_a_python_outside_of_it(tmp_path: Path) -> None:
    """Also where PATH names it by another path, through a link."""
    root = _requirements(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    half = root / ".venv" / "bin"
    half.mkdir(parents=True)
    base = Path(os.path.realpath(sys.executable))
    for name in ("python3", "python3.11"):  # Without pyvenv.cfg this is a Python of its own, whatever it leads to.
        (half / name).symlink_to(base)
    (half / "half-installed").touch()
    (root / ".venv/.made-from-gpu.txt").touch()  # Of another set, whose libraries are gone.
    _is_made_anew(root, PATH=f"{tmp_path}/link/.venv/bin:{os.environ['PATH']}")


@pytest.mark.slow
def test_an_environment_that_was_killed_in_the_making_is_made_anew(tmp_path: Path) -> None:
    """Killed ever later, each time in making anew what the last kill has left."""
    root = _requirements(tmp_path)
    for sign in ("pyvenv.cfg", "bin/python3", "lib/python*/site-packages/pip/__main__.py"):
        _killed_when(root, sign)
        (root / ".venv/bin").mkdir(exist_ok=True)
        (root / ".venv/bin/half-installed").touch()
    _is_made_anew(root)


def _killed_when(root: Path, sign: str) -> None:
    """Start `make setup`, and kill it when a file of this name is new in its `.venv`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")} | NO_REGISTRY
    half = root / ".venv/bin/half-installed"
    with subprocess.Popen(
        ["make", "setup"], cwd=root, env=environment, start_new_session=True, stdout=subprocess.PIPE
    ) as making:
        while half.exists() or not list((root / ".venv").glob(sign)):
            assert making.poll() is None, f"{half} is still there" if half.exists() else f"{sign} was never seen"
            time.sleep(0.002)
        os.killpg(making.pid, signal.SIGKILL)
    assert making.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("python3.10", "error: found no python3.10 that is Python 3.11, 3.12 or 3.13"),
        ("python3.99", "error: found no python3.99 that is Python 3.11, 3.12 or 3.13"),
        ("/bin/true", "error: found no /bin/true that is Python 3.11"),
        (
            "no-venv",
            "cannot make environments: it has no module venv or ensurepip. On Debian and Ubuntu: apt install pyth",
        ),
    ],
)
def test_a_python_that_cannot_be_used_is_an_error_and_removes_nothing(tmp_path: Path, given: str, told: str) -> None:
    root = _requirements(tmp_path)
    (root / ".venv/bin").mkdir(parents=True)
    shim = tmp_path / "no-venv"  # As on a system where python3-venv is a package of its own.
    answers = f'*ensurepip*) exit 1;; *base_exec*) echo {shim};; *) exec {sys.executable} "$@";;'
    shim.write_text(f'#!/bin/sh\ncase "$2" in {answers} esac\n')
    shim.chmod(0o755)
    done = _make("setup", cwd=root, PYTHON=str(shim) if given == "no-venv" else given)
    assert done.returncode == 2
    assert told in done.stderr
    assert (root / ".venv/bin").is_dir()


@pytest.mark.parametrize(
    ("made_in", "given", "is_made_anew"),
    [
        ("{here}/.venv\n{python}\n", "", False),
        ("{here}/.venv\n/other/python3.12\n", "", False),  # Made with PYTHON= once; later calls need not repeat it.
        ("{here}/.venv\n{python}\n", sys.executable, False),
        ("{here}/.venv\n/other/python3.12\n", sys.executable, True),
        ("/elsewhere/.venv\n{python}\n", "", True),  # Moved, or copied with its clone.
        ("", "", False),
    ],
)
def test_an_environment_that_was_moved_or_is_of_another_python_is_made_anew(
    tmp_path: Path, made_in: str, given: str, is_made_anew: bool
) -> None:
    root = _requirements(tmp_path)
    (root / ".venv").mkdir()
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    if made_in:
        (root / ".venv/.made-in").write_text(made_in.format(here=root.resolve(), python=python))
    (root / ".venv/.made-from-run.txt").touch()
    (root / "other/.venv").mkdir(parents=True)
    for elsewhere in ({}, {"CDPATH": ".:..:other"}, {"CDPATH": str(root / "other")}):
        done = _make("--dry-run", "report", cwd=root, **({"PYTHON": given} if given else {}), **elsewhere)
        assert done.returncode == 0, done.stderr
        assert ("First use" in done.stdout) == is_made_anew, elsewhere
