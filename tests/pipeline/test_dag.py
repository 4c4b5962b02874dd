"""The order of stages, and what is repaired after a kill; no stage runs here."""

from pathlib import Path

import networkx

from flows import dag


def test_repair_leaves_a_sound_clone_alone(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages:\n  data:\n    cmd: x\n")
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    (tmp_path / ".dvc/tmp/rwlock").write_text("{}")
    assert dag.repair(tmp_path) == []
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages:\n  data: {")
    assert dag.repair(tmp_path) == ["removed the torn dvc.lock"]
    (tmp_path / ".dvc/tmp/rwlock").write_text("")
    assert dag.repair(tmp_path) == []
    assert not (tmp_path / ".dvc/tmp/rwlock").exists()


def test_what_most_others_wait_for_comes_first() -> None:
    """As in dvc.yaml: two leaves beside a long path."""
    needs = {
        "data": (), "index": ("data",), "recall": ("index",), "base@0": ("index",), "base@1": ("index",),
        "train@0": ("base@0",), "train@1": ("base@1",), "report": ("recall", "train@0", "train@1"),
    }  # fmt: skip
    graph = networkx.DiGraph((need, name) for name, others in needs.items() for need in others)
    order = list(dag.ordered(graph))
    assert order == ["data", "index", "base@0", "base@1", "recall", "train@0", "train@1", "report"]
    assert all(order.index(need) < order.index(name) for name, others in needs.items() for need in others)
