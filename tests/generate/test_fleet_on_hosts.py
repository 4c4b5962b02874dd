"""A fleet whose second generator is on a host that has no policy."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import cluster
from tasks.generate.fleet import FleetConf
from tasks.generate.policy_folder import KEPT, Kept
from tasks.generate.rows import RowsGenerator
from tasks.model import export_folder
from tests import network
from tests.agent.test_free_play import Slow, play
from tests.engine.test_two_hosts import spread
from tests.generate.test_fleet import searching
from tests.network import two_hosts
from tests.stages.clone import HOUSE, Clone

reason = network.missing()


@pytest.mark.skipif(bool(reason), reason=f"no root: {reason}")
def test_a_host_without_the_policy_gets_it_once_and_plays_the_same(
    tokenizer: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    wanted, _, _ = play(RowsGenerator(searching(tokenizer), tokenizer), tokenizer, Slow(0, 0), 0)
    export_folder(searching(tokenizer), tokenizer, tmp_path / "policy")
    clone = Clone.make(tmp_path_factory.mktemp("b") / "clone", smoke=False).root
    shutil.copytree(HOUSE / "tasks", clone / "tasks", dirs_exist_ok=True)  # With what its user has added.
    with two_hosts() as hosts, hosts.on_a():
        described = spread(hosts, hidden=tmp_path)
        here, there = described.hosts
        there = replace(there, folder=str(clone), workers=2)
        monkeypatch.setattr(cluster, "load", lambda: replace(described, hosts=(here, there)))
        times = []
        for _ in range(2):
            made = FleetConf(3).start(tmp_path / "policy", "float32")
            try:
                assert [member.place.host for member in made.crew.members] == ["a", "b", "b"]
                found, _, _ = play(made, tokenizer, Slow(0, 0), 4)
                assert found == wanted
            finally:
                made.shutdown()
            (copy,) = (path for path in (clone / KEPT).iterdir() if path.is_dir())
            times.append(copy.stat().st_mtime_ns)
            given = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
            assert {path.name: path.read_bytes() for path in copy.iterdir()} == given
        assert times[0] == times[1]  # It was sent once.


def test_a_folder_goes_when_another_comes_and_nobody_uses_it(tmp_path: Path) -> None:
    first, second, third = (Kept(tmp_path) for _ in range(3))
    assert first.find("one") is None
    for kept, name in ((first, "one"), (second, "two"), (third, "three")):
        path = Path(kept.take(name, [("a.json", b""), ("a.json", b"{"), ("a.json", b"}"), ("../b", b"")]))
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {"a.json": b"{}", "b": b""}
    assert second.find("three") is not None  # It leaves "two", which nobody uses now.
    third.take("four", [])
    assert first.find("one") is not None
    assert second.find("three") is not None
    assert first.find("two") is None
