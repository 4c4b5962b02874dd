"""Which files count as used, and which changes of a file change its hash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks import identity, libraries
from tasks.identity import Sources

FILES = {
    "tasks/__init__.py": "",
    "tasks/play/__init__.py": "from tasks import words\n",
    "tasks/play/loop.py": "def play():\n    from tasks.play import turn\n    return turn.N\n",
    "tasks/play/turn.py": "N = 1\n",
    "tasks/play/unused.py": "N = 2\n",
    "tasks/play/page.css": "a {}\n",
    "tasks/play/README.md": "About this room.\n",
    "tasks/words/__init__.py": "",
    "tasks/stage.py": "from tasks.play.loop import play\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small package: `stage` imports `play.loop`, which imports `play.turn` inside a function."""
    for path, text in FILES.items():
        _write(tmp_path, path, text)
    return tmp_path


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


def _closure(root: Path) -> set[str]:
    return Sources(root).closure(["tasks.stage"])


def _hash(root: Path, text: str) -> str:
    _write(root, "tasks/one.py", text)
    return Sources(root).hash_of(root / "tasks/one.py")


def test_a_closure_has_what_is_imported_in_functions_and_on_the_way(root: Path) -> None:
    unused = {"tasks/play/unused.py", "tasks/play/README.md"}
    assert _closure(root) == FILES.keys() - unused


def test_a_new_import_makes_the_closure_grow(root: Path) -> None:
    before = _closure(root)
    _write(root, "tasks/play/turn.py", "import tasks.play.unused as other\nN = 1\n")
    assert _closure(root) - before == {"tasks/play/unused.py"}


def test_a_renamed_file_is_another_file(root: Path) -> None:
    before = Sources(root).hashes(["tasks.stage"])
    (root / "tasks/play/turn.py").rename(root / "tasks/play/move.py")
    _write(root, "tasks/play/loop.py", "def play():\n    from tasks.play import move\n    return move.N\n")
    after = Sources(root).hashes(["tasks.stage"])
    assert after["tasks/play/move.py"] == before["tasks/play/turn.py"]
    assert after.keys() ^ before.keys() == {"tasks/play/turn.py", "tasks/play/move.py"}


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("from . import unused", True),
        ("from .unused import N", True),
        ("from .. import play\nfrom ..play.unused import N", True),
        ("try:\n    import tasks.play.unused\nexcept ImportError:\n    pass", True),
        ('import importlib\nimportlib.import_module("tasks.play.unused")', True),
        ("if TYPE_CHECKING:\n    from tasks.play import unused", False),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    from tasks.play import unused", True),
        ("if not TYPE_CHECKING:\n    from tasks.play import unused", True),
        ('"""import tasks.play.unused"""', False),
        ("import json, torch", False),
    ],
)
def test_which_imports_count(root: Path, text: str, counts: bool) -> None:
    _write(root, "tasks/play/turn.py", f"{text}\n")
    assert ("tasks/play/unused.py" in _closure(root)) is counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from tasks.play.unused import *", r"tasks/play/turn.py:1: star import"),
        ("from importlib import import_module\nimport_module(name)", r"tasks/play/turn.py:2: imports a module whose"),
        ("__import__(f'tasks.play.{name}')", r"tasks/play/turn.py:1: imports a module whose name is computed"),
        ("runpy.run_path(path)", r"tasks/play/turn.py:1: imports a module whose name is computed"),
        ("def (", r"tasks/play/turn.py: not Python: .* Mend the file"),
    ],
)
def test_what_nobody_can_follow_is_refused(root: Path, text: str, message: str) -> None:
    _write(root, "tasks/play/turn.py", f"{text}\n")
    with pytest.raises(ValueError, match=message):
        _closure(root)


def test_parts_loaded_by_kind_are_marked_and_found_in_the_settings(root: Path) -> None:
    before = _closure(root)
    _write(
        root, "tasks/play/turn.py", f'import importlib\nimportlib.import_module(f"tasks.{{x}}")  {identity.BY_KIND}\n'
    )
    assert _closure(root) == before


def test_a_module_that_does_not_exist_is_named(root: Path) -> None:
    with pytest.raises(ValueError, match=r"tasks\.stagee: .*stagee\.py is missing"):
        Sources(root).closure(["tasks.stagee"])


CODE = '''\
"""Doc."""
import os


class A:
    """Doc."""

    limit: int = 3
    """About the limit."""


def f(x, *, y=None):
    """Doc."""
    # Why.
    return {"a": [x, 1.5, None, *y], **os.environ} | {f"{x!r:>3}": b"a"}
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Why.", "# Another reason."),
        ('"""Doc."""', '"""Another text."""'),
        ('"""About the limit."""', ""),
        ("limit: int = 3", "limit: int = (\n        3\n    )"),
        ('"a"', "'a'"),
        ("import os", "import os\n\n\n"),
        ("1.5", "1.50"),
    ],
)
def test_comments_docstrings_and_formatting_do_not_change_a_hash(root: Path, old: str, new: str) -> None:
    assert old in CODE
    assert _hash(root, CODE.replace(old, new)) == _hash(root, CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= 3", "= 4"),
        ("1.5", "1.25"),
        ("= 3", "= True"),
        ("= 3", '= "3"'),
        ('b"a"', '"a"'),
        ("None,", "True,"),
        ("y=None", "y=False"),
        ("def f", "def g"),
        ("import os", "import os.path as os"),
        ("*, y", "y"),
        ("!r", "!s"),
        (">3", "<3"),
        ("limit: int", "limit: float"),
        ("return {", "yield {"),
    ],
)
def test_a_change_of_the_code_changes_the_hash(root: Path, old: str, new: str) -> None:
    assert old in CODE
    assert _hash(root, CODE.replace(old, new)) != _hash(root, CODE)


def test_the_hash_does_not_depend_on_what_python_versions_write_differently(root: Path) -> None:
    """Empty fields come and go with versions; the digits below were made by Python 3.11."""
    assert _hash(root, CODE) == "3a0a3cd88502a485"


def test_the_frame_counts_as_used_by_none_and_what_it_imports_by_all(root: Path) -> None:
    _write(root, "tasks/runner/__init__.py", "from tasks.play import unused\n")
    _write(root, "tasks/stage.py", "from tasks.runner import run\n")
    used = Sources(root).used(["tasks.stage"])
    assert used.keys() == FILES.keys() - {
        "tasks/__init__.py",
        "tasks/play/loop.py",
        "tasks/play/turn.py",
        "tasks/play/README.md",
    }


def test_other_files_are_hashed_byte_by_byte(root: Path) -> None:
    before = Sources(root).hashes(["tasks.stage"])
    _write(root, "tasks/play/page.css", "a {}\n\n")
    after = Sources(root).hashes(["tasks.stage"])
    assert [path for path in after if after[path] != before[path]] == ["tasks/play/page.css"]


@pytest.mark.parametrize(
    "name", [".DS_Store", "notes.txt", "turn.py~", ".turn.py.swp", ".#turn.py", ".page.css", "page.css.bak", "x.orig"]
)
def test_a_file_that_no_code_reads_is_no_source(root: Path, name: str) -> None:
    before = Sources(root).hashes(["tasks.stage"])
    for folder in ("tasks", "tasks/play"):
        _write(root, f"{folder}/{name}", "left behind\n")
    assert Sources(root).hashes(["tasks.stage"]) == before


@dataclass(frozen=True)
class Part:
    """A part of settings, such as a reward."""

    inner: Any = None


def test_modules_of_settings_are_those_of_the_dataclasses_they_hold() -> None:
    deep = Part({"rewards": [Part((identity_part(),))], "again": Part})
    Part.__module__ = "tasks.rewards.mine"
    assert identity.modules_of(deep) == {"tasks.rewards.mine", "tasks.types"}
    circle: list[Any] = []
    circle.append(Part(circle))
    assert identity.modules_of(circle) == {"tasks.rewards.mine"}
    assert identity.modules_of({"a": 1, "b": "tasks.rewards"}) == set()


@dataclass(frozen=True)
class Loading:
    """A part that loads others."""

    makes: Callable[[], object]

    def loads(self) -> object:
        return self.makes()


def test_modules_of_settings_are_found_where_what_loads_is_made_for_the_question_alone() -> None:
    """Each is gone after it was looked at, and the next one may lie where it lay."""
    Part.__module__ = "tasks.rewards.mine"
    for makers in ([Part, identity_part], [identity_part, Part]):
        assert identity.modules_of([Loading(make) for make in makers]) == {"tasks.rewards.mine", "tasks.types"}


@dataclass(frozen=True)
class Vector:
    """A part that requires something in some settings alone."""

    is_used: bool

    @property
    def requires(self) -> str:
        return "dense" if self.is_used else ""


def identity_part() -> object:
    """A dataclass of the real package."""
    from tasks.types import Passage

    return Passage("p", "title", "text")


def test_a_library_in_another_version_than_pinned_is_part_of_the_identity(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = "torch==2.5.1\nNumpy==2.1.0\ntyping_extensions==4.0\npeft==0.1\n"
    _write(root, "requirements/run.txt", pinned)
    there = {
        "torch": "2.5.1+cu124",
        "numpy": "2.1.0",
        "typing-extensions": "4.0",
        "unpinned": "1",
    }  # peft is not there.
    monkeypatch.setattr(identity, "installed", lambda: there)
    identity.note_installed(root)
    assert identity.libraries(root) == identity.pins(root)
    assert identity.recorded() == {"torch": "2.5.1+cu124", "numpy": "2.1.0"}
    assert not (root / identity.INSTALLED).exists()

    there |= {"torch": "2.6.0+cu126", "numpy": "2.1"}
    identity.note_installed(root)
    assert identity.differing(root) == {"torch": ("2.5.1", "2.6.0+cu126"), "numpy": ("2.1.0", "2.1")}
    changed = {"torch": "2.5.1, installed 2.6.0+cu126", "numpy": "2.1.0, installed 2.1"}
    assert identity.libraries(root) == identity.pins(root) | changed
    assert (root / identity.INSTALLED).read_text() == "numpy 2.1.0 -> 2.1\ntorch 2.5.1 -> 2.6.0+cu126\n"

    there |= {"torch": "2.5.1", "numpy": "2.1.0"}
    identity.note_installed(root)
    assert not (root / identity.INSTALLED).exists()


def test_only_what_uses_further_libraries_depends_on_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part's `requires` names a file of pins. Test tools are nobody's, nor is a file that is not all there."""
    for name, pin in {
        "run": "numpy==2",
        "deepspeed": "deepspeed==1\nninja==1",
        "dense": "faiss==1",
        "test": "pytest==9",
    }.items():
        _write(root, f"requirements/{name}.txt", f"{pin}\n")
    there = {"numpy": "2"}
    for module in (identity, libraries):
        monkeypatch.setattr(module, "installed", lambda: there)
    before = identity.libraries(root)
    there |= {"deepspeed": "1", "faiss": "0.9", "pytest": "8"}
    identity.note_installed(root)
    assert identity.libraries(root) == before == {"numpy": "2"}
    assert identity.libraries(root, ("deepspeed",)) == {"numpy": "2", "deepspeed": "1", "ninja": "1"}
    assert identity.libraries(root, ("dense",))["faiss"] == "1, installed 0.9"
    assert (root / identity.INSTALLED).read_text() == "faiss 1 -> 0.9\n"
    there |= {"deepspeed": "2", "ninja": "1"}
    identity.note_installed(root)
    assert (root / identity.INSTALLED).read_text() == "deepspeed 1 -> 2\nfaiss 1 -> 0.9\n"


def test_a_part_says_what_it_requires_however_deep_it_lies() -> None:
    assert identity.required_by({"a": [1, Part(("x",))]}) == set()
    needs = type("Needs", (Part,), {"requires": "deepspeed"})
    assert identity.required_by(
        [Part({"of": needs(1)}), Loading(lambda: Vector(True)), Loading(lambda: Vector(False))]
    ) == {
        "deepspeed",
        "dense",
    }


def test_loaded_files_are_those_that_python_has_run(root: Path) -> None:
    house = Path(identity.__file__).resolve().parents[1]
    code = f"import sys; sys.path[:0] = [{str(root)!r}]\nimport tasks.play.turn\n"
    code += f"import importlib.util as u; spec = u.spec_from_file_location('i', {str(house / 'tasks/identity.py')!r})\n"
    code += f"sys.path.append({str(house)!r}); import json; import pathlib\n"
    code += "tasks.__path__.append(sys.path[-1] + '/tasks'); from tasks import identity\n"
    code += f"print(json.dumps(sorted(identity.loaded(pathlib.Path({str(root)!r})))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ('["tasks/play/__init__.py", "tasks/play/turn.py", "tasks/words/__init__.py"]')


def test_what_is_remembered_of_a_file_belongs_to_its_bytes(root: Path) -> None:
    fresh, path, memo = Sources(root), root / "tasks/play/turn.py", root / identity.MEMO
    before = fresh.hashes(["tasks.stage"])
    fresh.remember()
    kept = json.loads(memo.read_text())
    (key,) = [key for key, facts in kept["files"].items() if facts["hash"] == before["tasks/play/turn.py"]]
    kept["files"][key]["hash"] = "remembered"
    memo.write_text(json.dumps(kept))
    assert Sources(root).hash_of(path) == "remembered"
    path.write_text(path.read_text() + "\n# A comment: other bytes, the same tree.\n")
    assert Sources(root).hashes(["tasks.stage"]) == before
    path.write_text("import tasks.play.unused\nN = 2\n")
    after = Sources(root).hashes(["tasks.stage"])
    assert after["tasks/play/turn.py"] != before["tasks/play/turn.py"]
    assert after.keys() - before.keys() == {"tasks/play/unused.py"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {}}', '{"made_by": "another version", "files": {"a": 1}}'])
def test_a_memo_that_cannot_be_used_is_made_again(root: Path, text: str) -> None:
    before = Sources(root).hashes(["tasks.stage"])
    memo = root / identity.MEMO
    memo.parent.mkdir(exist_ok=True)
    memo.write_text(text)
    again = Sources(root)
    assert again.hashes(["tasks.stage"]) == before
    again.remember()
    assert Sources(root).hashes(["tasks.stage"]) == before
    assert len(json.loads(memo.read_text())["files"]) >= len(before) - 1
