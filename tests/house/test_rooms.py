"""Guards the plan of the house: imports point one way, the core stands alone, `dvc.yaml` is about data flow alone.

DVC sees only what it is told. It is told the plan of each stage; that a plan lists every file which its stage loads is
checked by the runner when a module is imported.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import planned
from tasks.identity import Sources
from tests import shipped

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tasks"
# A room may import the rooms before it and itself. `services` holds protocols that parts name and what reads replies;
# the kinds of services, which are loaded by name, stand below what they are made of.
ORDER = (
    "writable",
    "program",
    "loopback",
    "lifetime",
    "types",
    "own",
    "conf",
    "reached",
    "parts",
    "extends",
    "text",
    "clock",
    "store",
    "trained",
    "libraries",
    "identity",
    "device",
    "footprint",
    "limits",
    "cluster",
    "wire",
    "crew",
    "planned",
    "records",
    "checkpoint",
    "pretrained",
    "model_files",
    "attention",
    "shared_prefix",
    "passes",
    "precision",
    "trainee",
    "model",
    "supervised",
    "flops",
    "gguf_header",
    "gguf_file",
    "hub",
    "model_source",
    "data",
    "retrieval",
    "server",
    "generate",
    "agent",
    "base",
    "reader",
    "services",
    "reward_model",
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
    "tool",
    "report",
    "runner",
    "params",
    "plan",
    "score",
    "stages",
    "registry",
)
ORCHESTRATION = {"prefect", "dvc", "mlflow"}
MLFLOW = [
    TASKS / "runner/upload.py",
    TASKS / "registry/__main__.py",
    TASKS / "registry/policy.py",
]  # What imports MLflow.
# What a stage reads that no stage writes.
GIVEN = {"${data_folder}", "conf/papers/printed.csv"}
# They resolve settings; a stage reads its plan.
PLANNING = ("tasks/plan/", "tasks/methods/loader.py", "tasks/extends.py", "tasks/params/")
PART = re.compile(r"^PART\b", re.MULTILINE)
SOURCES = Sources(ROOT)


def _sources(folder: str = "tasks") -> list[Path]:
    return shipped.files(folder, "*.py")


def _room(path: Path) -> str:
    return _place(path.relative_to(ROOT).with_suffix("").parts)


def _place(parts: Sequence[str]) -> str:
    """The room of a module, given the parts of its dotted name."""
    path = TASKS / "services" / f"{parts[2]}.py" if parts[1] == "services" and len(parts) > 2 else None
    is_kind = path is not None and path.is_file() and PART.search(path.read_text(encoding="utf-8"))
    return "services/kinds" if is_kind else parts[1]


def _stages() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"])


def test_a_reward_may_fill_prompts_and_read_replies_and_name_no_kind_of_service() -> None:
    assert _place(("tasks", "services", "replies", "filled")) == _place(("tasks", "services", "Chat")) == "services"
    assert _place(("tasks", "services", "endpoint", "Endpoint")) == "services/kinds"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in _sources():
        if path == TASKS / "__init__.py":
            continue
        room = _room(path)
        assert room in ORDER, f"tasks/{room} has no place in the order of rooms; give it one here"
        for name, line in SOURCES.imports(path):
            parts = name.split(".")
            if parts[0] != "tasks" or len(parts) < 2:
                continue
            assert _place(parts) in ORDER, f"{path.relative_to(ROOT)}:{line}: there is no room {parts[1]}"
            if ORDER.index(_place(parts)) > ORDER.index(room):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {name}, which stands below it")
    assert not wrong, "\n".join(wrong)


def test_only_a_part_imports_a_part() -> None:
    """Whoever imports a particular part by name depends on it for ever; parts are found by kind."""
    kinds = {path for path in _sources() if PART.search(path.read_text(encoding="utf-8"))}
    assert kinds
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources()
        for name, line in SOURCES.imports(path)
        if path not in kinds and kinds & set(SOURCES.files_of(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_upload_and_registry_import_mlflow_and_only_flows_prefect_and_dvc() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources()
        for name, line in SOURCES.imports(path)
        if name.partition(".")[0] in ORCHESTRATION and path not in MLFLOW
    ]
    assert not wrong, "\n".join(wrong)


def test_flows_import_nothing_of_the_core_but_settings_and_the_guard_of_servers() -> None:
    may = (
        "tasks.conf",
        "tasks.lifetime",
        "tasks.loopback",
        "tasks.params",
        "tasks.planned",
        "tasks.program",
        "tasks.registry.nights",
        "tasks.report.terminal",
        "tasks.runner.git",
        "tasks.runner.ledger",
        "tasks.runner.lock",
        "tasks.runner.record",
        "tasks.runner.runs",
        "tasks.server.origins",
        "tasks.writable",
    )
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _sources("flows")
        for name, line in SOURCES.imports(path)
        if name.startswith("tasks.") and not name.startswith(may)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_core_can_be_imported_where_orchestration_is_blocked() -> None:
    optional = {"tasks.generate.vllm"}
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in _sources()]
    names = [
        name
        for name in modules
        if not name.startswith(("tasks.stages", "tasks.runner", "tasks.registry")) and name not in optional
    ]
    code = (
        "import sys, importlib\n"
        f"for name in {sorted(ORCHESTRATION)}: sys.modules[name] = None\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_dvc_knows_every_stage() -> None:
    entries = {path.stem for path in shipped.files("tasks/stages", "*.py")} - {"__init__"}
    assert _stages().keys() == entries
    assert _stages()["plan"]["deps"] == ["tasks", "conf", "params.yaml", "requirements", "${parts}"]


@pytest.mark.parametrize("group", sorted(_stages().keys() - {"plan"}))
def test_a_stage_depends_on_its_plan_and_on_what_it_reads(group: str) -> None:
    """No code and no settings: these stand in its plan."""
    stage: dict[str, Any] = _stages()[group]
    keys = _matrix(TASKS / "stages" / f"{group}.py")
    assert tuple(stage.get("matrix", {})) == keys
    # `exec`: between DVC and a stage no shell may stay, or the stage would outlive a killed DVC.
    words = "".join(f" --{key} ${{item.{key}}}" for key in keys)
    assert stage["cmd"] == f"exec python -m tasks.stages.{group}{words}"
    item = "-".join(f"${{item.{key}}}" for key in keys)
    plan, *others = stage["deps"]
    assert plan == planned.path_of(f"{group}@{item}" if item else group).as_posix()
    assert [dep for dep in others if not dep.startswith("artifacts/")] == [dep for dep in others if dep in GIVEN]
    assert "params" not in stage


def _matrix(path: Path) -> tuple[str, ...]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MATRIX":
            return tuple(ast.literal_eval(node.value))
    return ()


@pytest.mark.parametrize("group", sorted(_stages().keys() - {"plan"}))
def test_a_stage_loads_nothing_that_resolves_settings(group: str) -> None:
    """It reads its plan; so a change of how settings are read runs only those whose settings it changes."""
    used = SOURCES.closure([f"tasks.stages.{group}"])
    assert not [path for path in used if path.startswith(PLANNING)]


def test_every_file_that_is_no_python_is_a_document_or_a_source() -> None:
    """Code that reads a file of another kind would give other results unseen; `tasks.identity.DATA` must have it."""
    tracked = [path.relative_to(ROOT) for path in shipped.files("tasks") if path.suffix not in (".py", ".md")]
    assert len(tracked) >= 3
    uncounted = [str(path) for path in tracked if str(path) not in SOURCES.closure([".".join(path.parent.parts)])]
    assert not uncounted


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
