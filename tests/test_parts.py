"""Parts by room and kind: a file is a kind, settings survive a round trip, and wrong ones say where they stand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import parts

WHERE = "conf/method/toy.yaml: rewards"
PART = '''"""A part."""
from dataclasses import dataclass
from tasks.conf import require

@dataclass(frozen=True)
class Toy:
    weight: float
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.weight >= 0, "weight", self.weight, "0 or more")


PART = Toy
'''


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A room `toys` with the kinds `bear` and `train`, and a module that is no part."""
    import tasks

    folder = tmp_path / "toys"
    folder.mkdir()
    for name, text in (("__init__", '"""Toys."""'), ("bear", PART), ("train", PART), ("shelf", '"""No PART here."""')):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(parts, "_TASKS", tmp_path)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    yield "toys"
    for name in [name for name in sys.modules if name.startswith("tasks.toys")]:
        del sys.modules[name]


def test_a_file_is_a_kind_and_other_modules_are_none(room: str, tmp_path: Path) -> None:
    (tmp_path / "toys/.#bear.py").symlink_to("user@machine.1234")  # Emacs leaves it beside a file that is edited.
    (tmp_path / "toys/.bear.py").write_text(PART)
    assert parts.kinds(room) == ["bear", "train"]
    assert "tasks.toys.bear" not in sys.modules, "a part is imported where it is used, and not to know its name"


def test_settings_survive_a_round_trip(room: str) -> None:
    made = parts.make(room, {"kind": "bear", "weight": 1, "names": ["a"]}, WHERE)
    assert (made.weight, made.names) == (1.0, ("a",))
    tree = json.loads(json.dumps(parts.plain(made)))
    assert tree == {"kind": "bear", "weight": 1.0, "names": ["a"]}
    assert parts.make(room, tree, WHERE) == made
    assert "tasks.toys.train" not in sys.modules


def test_a_mapping_of_kinds_keeps_its_order(room: str) -> None:
    made = parts.make_each(room, {"train": {"weight": 2.0}, "bear": {"weight": 1.0}}, WHERE)
    assert [(parts.kind_of(one), one.weight) for one in made] == [("train", 2.0), ("bear", 1.0)]
    (left,) = parts.make_each(room, {"train": None, "bear": {"weight": 1.0}}, WHERE)
    assert parts.kind_of(left) == "bear"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"kind": "bera", "weight": 1.0},
            "unknown kind 'bera': tasks/toys/ has no such part. Did you mean 'bear'? Known: bear, train.",
        ),
        ({"kind": "shelf"}, "unknown kind 'shelf'"),
        ({"kind": "../toys/bear"}, "unknown kind '../toys/bear'"),
        ({"kind": "__init__"}, "unknown kind '__init__'"),
        ({"weight": 1.0}, "expected a mapping with key 'kind'. Known: bear, train."),
        ({"kind": ["bear"]}, "expected a mapping with key 'kind'"),
        ("bear", "found 'bear', expected a mapping with key 'kind'"),
        (None, "found None, expected a mapping with key 'kind'"),
        ({"kind": "bear"}, "'weight'"),
        ({"kind": "bear", "wieght": 1.0}, "'wieght'"),
        ({"kind": "bear", "weight": -1.0}, "weight=-1.0: expected 0 or more"),
        ({"kind": "bear", "weight": "much"}, "'much'"),
    ],
)
def test_wrong_settings_say_where_they_stand(room: str, tree: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + WHERE) as caught:
        parts.make(room, tree, WHERE)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ({"bera": {"weight": 1.0}}, "unknown kind 'bera'"),
        ({"bera": None}, "unknown kind 'bera'"),
        ({3: {}}, "unknown kind 3"),
        ({"bear": {"weight": -1.0}}, f"{WHERE}: bear: weight=-1.0: expected 0 or more"),
        ({"bear": 1.0}, f"{WHERE}: bear: found 1.0"),
        (["bear"], "found ['bear'], expected a mapping of kind to numbers"),
    ],
)
def test_wrong_mappings_say_where_they_stand(room: str, trees: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + WHERE) as caught:
        parts.make_each(room, trees, WHERE)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "import no_such_judge\n\nPART = no_such_judge.Judge\n",
            "ModuleNotFoundError: No module named 'no_such_judge' (",
        ),
        ("\nfrom tasks.conf import gone\nPART = gone\n", "ImportError: cannot import name 'gone' from 'tasks.conf' ("),
        ("\nPART = Gone\n", "NameError: name 'Gone' is not defined (judge.py, line 2). Mend that file."),
        ("\nPART = (\n", "SyntaxError: '(' was never closed (judge.py, line 2). Mend that file."),
        ("PART = 5\n", "PART=5: expected a frozen dataclass."),
        ("class Judge:\n    pass\n\nPART = Judge\n", "Judge'>: expected a frozen dataclass."),
        ('"""\nPART is not here.\n"""\n', "PART=None: expected a frozen dataclass."),
    ],
)
def test_a_broken_part_is_named_with_what_names_it(room: str, tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / "toys" / "judge.py").write_text(text)
    for make in (
        lambda: parts.make(room, {"kind": "judge"}, WHERE),
        lambda: parts.make_each(room, {"judge": {}}, WHERE),
    ):
        with pytest.raises(ValueError, match=f"^{WHERE}: judge: tasks/toys/judge.py") as caught:
            make()
        assert cause in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_room_without_kinds_says_so(room: str, tmp_path: Path) -> None:
    for name in ("bear", "train"):
        (tmp_path / f"toys/{name}.py").unlink()
    with pytest.raises(ValueError, match=r"unknown kind 'bear': tasks/toys/ has no such part\. There is none yet\.$"):
        parts.make(room, {"kind": "bear"}, WHERE)
