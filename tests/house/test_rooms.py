"""Guards the plan of the house: imports point one way, the core stands alone, `dvc.yaml` tells the truth.

DVC sees only what it is told, so the code dependencies of each stage are compared with what its entry point
really imports, file by file.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tasks"
# A room may import the rooms before it and itself. `services` holds protocols that parts name; the kinds of services,
# which are loaded by name, stand below what they are made of.
ORDER = (
    "types",
    "conf",
    "parts",
    "extends",
    "text",
    "store",
    "identity",
    "records",
    "checkpoint",
    "device",
    "model",
    "data",
    "retrieval",
    "server",
    "generate",
    "agent",
    "base",
    "services",
    "rewards",
    "rl",
    "engine",
    "services/kinds",
    "augment",
    "inputs",
    "methods",
    "train",
    "systems",
    "evaluate",
    "report",
    "runner",
    "plan",
    "stages",
)
# They start and record a stage and cannot change what it writes, so they are nobody's dependency.
FRAME = {TASKS / "__init__.py", TASKS / "stages/__init__.py", *(TASKS / "runner").glob("*.py")}
ORCHESTRATION = {"prefect", "dvc", "mlflow"}
# `import_module(f"tasks.retrieval.{name}")`: any file of that room may be meant.
BY_NAME = re.compile(r'import_module\(f"(tasks\.[.\w]+)\.\{')
# `parts.make("rl.losses", ...)`: any part of that room may be meant.
BY_KIND = re.compile(r'parts\.make(?:_each)?\(\s*"([.\w]+)"')


def _sources(folder: str = "tasks") -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names of every import in the file, inside functions too, except those only for types."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*up, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def _files_of(name: str) -> list[Path]:
    """The files Python runs for `import name`: the packages on the way and the module itself."""
    parts, files = name.split("."), []
    for end in range(1, len(parts) + 1):
        base = ROOT.joinpath(*parts[:end])
        for candidate in (base / "__init__.py", base.with_suffix(".py")):
            if candidate.is_file():
                files.append(candidate)
    return files


def _room(path: Path) -> str:
    return _place(path.relative_to(ROOT).with_suffix("").parts)


def _place(parts: Sequence[str]) -> str:
    """The room of a module, given the parts of its dotted name."""
    is_kind = parts[1] == "services" and len(parts) > 2 and (TASKS / "services" / f"{parts[2]}.py").is_file()
    return "services/kinds" if is_kind and parts[2] != "__init__" else parts[1]


def closure(entry: Path) -> set[Path]:
    """Every file of `tasks/` that `entry` imports, itself included, the frame left out."""
    found: set[Path] = set()
    waiting = [entry]
    while waiting:
        path = waiting.pop()
        if path in found or path in FRAME:
            continue
        found.add(path)
        for name, _ in _imports(path):
            if name.partition(".")[0] == "tasks":
                waiting += _files_of(name)
        source = path.read_text(encoding="utf-8")
        for package in BY_NAME.findall(source):
            waiting += sorted(ROOT.joinpath(*package.split(".")).glob("*.py"))
        for room in BY_KIND.findall(source):
            waiting += sorted(TASKS.joinpath(*room.split(".")).glob("*.py"))
    return found


def _stages() -> dict[str, dict[str, object]]:
    return dict(yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"])


def test_imports_point_one_way() -> None:
    wrong = []
    for path in _sources():
        if path == TASKS / "__init__.py":
            continue
        room = _room(path)
        assert room in ORDER, f"tasks/{room} has no place in the order of rooms; give it one here"
        for name, line in _imports(path):
            parts = name.split(".")
            if parts[0] != "tasks" or len(parts) < 2:
                continue
            assert _place(parts) in ORDER, f"{path.relative_to(ROOT)}:{line}: there is no room {parts[1]}"
            if ORDER.index(_place(parts)) > ORDER.index(room):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {name}, which stands below it")
    assert not wrong, "\n".join(wrong)


def test_only_a_part_imports_a_part() -> None:
    """Whoever imports a particular part by name depends on it for ever; parts are found by kind."""
    kinds = {path for path in _sources() if re.search(r"^PART\b", path.read_text(encoding="utf-8"), re.MULTILINE)}
    assert kinds
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources()
        for name, line in _imports(path)
        if path not in kinds and kinds & set(_files_of(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_tracking_imports_mlflow_and_only_flows_prefect_and_dvc() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources()
        for name, line in _imports(path)
        if name.partition(".")[0] in ORCHESTRATION and path != TASKS / "runner/tracking.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_flows_import_nothing_of_the_core_but_conf() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources("flows")
        for name, line in _imports(path)
        if name.startswith("tasks.") and not name.startswith("tasks.conf")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_core_can_be_imported_where_orchestration_is_blocked() -> None:
    optional = {"tasks.generate.vllm"}
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in _sources()]
    names = [name for name in modules if not name.startswith(("tasks.stages", "tasks.runner")) and name not in optional]
    code = (
        "import sys, importlib\n"
        f"for name in {sorted(ORCHESTRATION)}: sys.modules[name] = None\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("group", _stages())
def test_code_dependencies_are_what_the_stage_imports(group: str) -> None:
    """Every imported file is covered by a dependency, and every dependency covers an imported file."""
    stage = _stages()[group]
    # `exec`: between DVC and a stage no shell may stay, or the stage would outlive a killed DVC.
    found = re.match(r"exec python -m tasks\.stages\.(\w+)", str(stage["cmd"]))
    assert found, f"dvc.yaml: {group}: found cmd {stage['cmd']!r}, expected 'exec python -m tasks.stages.<name>'"
    entry = TASKS / "stages" / f"{found[1]}.py"
    assert entry.is_file(), f"dvc.yaml: {group} runs {entry.name}, which does not exist"
    if group == "plan":
        assert stage["deps"] == ["tasks", "conf", "params.yaml", "requirements"]
        return
    if any(str(dep).startswith("artifacts/plan/") for dep in stage["deps"]):  # type: ignore[attr-defined]
        assert "params" not in stage
        assert not any(str(dep).startswith(("tasks", "conf")) for dep in stage["deps"])  # type: ignore[attr-defined]
        return
    imported = closure(entry)
    deps = [ROOT / str(dep) for dep in stage["deps"] if str(dep).startswith("tasks/")]  # type: ignore[union-attr, attr-defined]
    missing = {path for path in imported if not any(path == dep or dep in path.parents for dep in deps)}
    idle = {dep for dep in deps if not any(path == dep or dep in path.parents for path in imported)}
    rooms = sorted({str(path.relative_to(ROOT)) for path in missing})
    assert not missing, f"dvc.yaml: {group}: add to deps, or its files in full: {rooms}"
    assert not idle, f"dvc.yaml: {group}: remove from deps: {sorted(str(dep.relative_to(ROOT)) for dep in idle)}"


def test_every_stage_reads_settings_that_exist() -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    for group, stage in _stages().items():
        for entry in stage.get("params", []):  # type: ignore[attr-defined]
            if isinstance(entry, str):
                place = params
                for part in entry.split("."):
                    assert part in place, f"dvc.yaml: {group}: params.yaml has no {entry}"
                    place = place[part]


def test_no_file_without_a_subject() -> None:
    names = {path.name for folder in ("tasks", "flows", "tests") for path in _sources(folder)}
    assert not names & {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for folder in ("tasks", "flows")
        for path in _sources(folder)
        if path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, f"no docstring: {silent}"
