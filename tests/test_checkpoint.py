"""Checkpoints: exact round trips, torn ones skipped, a full disk that harms nothing, nothing unpickled."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pprint import pformat

import pytest
import torch

from tasks import checkpoint
from tasks.checkpoint import State
from tasks.store import DataError


def state(step: int, size: int = 300) -> State:
    tensors = {
        "weights/a": torch.arange(size) * 0.1 + step,
        "rng": torch.get_rng_state(),
        "half": torch.ones(3).bfloat16(),
    }
    return State(step, tensors, {"position": step, "history": [0.1, 1e-17, 3], "name": "é"})


def same(a: State, b: State) -> bool:
    return (
        a.step == b.step
        and a.values == b.values
        and a.tensors.keys() == b.tensors.keys()
        and all(torch.equal(t, b.tensors[n]) and t.dtype == b.tensors[n].dtype for n, t in a.tensors.items())
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_round_trip_is_exact(tmp_path: Path) -> None:
    written = state(7)
    path = checkpoint.save(tmp_path, written)
    assert path.name == "step-00000007"
    assert same(checkpoint.load(path), written)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert same(found, written)


def test_views_and_shared_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    path = checkpoint.save(tmp_path, State(1, {"a": base, "b": base.T, "c": base[1]}, {}))
    found = checkpoint.load(path).tensors
    assert torch.equal(found["b"], base.T)
    assert torch.equal(found["c"], base[1])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, state(step))
    assert checkpoint.steps(tmp_path) == [3, 10]
    checkpoint.save(tmp_path, state(10, 5))  # written again after a resume from before it
    assert checkpoint.load(tmp_path / "step-00000010").tensors["weights/a"].numel() == 5


def flip(place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= 0x20
        path.write_bytes(data)

    return damage


DAMAGE = {
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-7]),
    "empty": lambda p: p.write_bytes(b""),
    "missing": lambda p: p.unlink(),
    **{f"flip {place}": flip(place) for place in (0, 6, 13, 60, -3)},
}


@pytest.mark.parametrize("name", ["tensors.safetensors", "values.json", "manifest.json"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_torn_checkpoint_is_reported_and_the_older_one_used(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save(tmp_path, state(1))
    DAMAGE[kind](checkpoint.save(tmp_path, state(2)) / name)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert same(found, state(1))
    (record,) = caplog.records
    assert "step-00000002" in record.getMessage()
    assert "an older checkpoint is used" in record.getMessage()


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    """One that only changes white space may pass; what is loaded is then what was written."""
    path = checkpoint.save(tmp_path, state(1, 3)) / "manifest.json"
    sound = path.read_bytes()
    for place in range(len(sound)):
        for bit in (0x01, 0x20, 0x80):
            data = bytearray(sound)
            data[place] ^= bit
            path.write_bytes(data)
            try:
                assert same(checkpoint.load(path.parent), state(1, 3))
            except DataError:
                continue


@pytest.mark.parametrize("text", ["[]", "{}", '{"files": []}', '{"files": {}}', '{"files": {"values.json": ""}}', "3"])
def test_a_manifest_that_vouches_for_nothing(tmp_path: Path, text: str) -> None:
    path = checkpoint.save(tmp_path, state(1))
    (path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json does not list"):
        checkpoint.load(path)
    assert checkpoint.latest(tmp_path) is None


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A pickle in a tensor file's place, with a manifest that vouches for it, runs no code."""
    import json

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = checkpoint.save(tmp_path, state(1))
    (path / "tensors.safetensors").write_bytes(pickle.dumps(Trap()))
    from tasks.store import sha256

    files = {name: sha256(path / name) for name in ("tensors.safetensors", "values.json")}
    (path / "manifest.json").write_text(json.dumps({"files": files}))
    with pytest.raises(Exception, match=r"(?i)header"):
        checkpoint.load(path)
    assert not (tmp_path / "sprung").exists()


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing more fails like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit", [0, 100, 4000, 65536])
def test_a_full_disk_harms_nothing(tmp_path: Path, limit: int) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, state(1))
    checkpoint.save(folder, state(2))
    before = tree(folder)
    with (
        file_limit(limit),
        pytest.raises(OSError, match=r"step-00000003: the checkpoint could not be written .*Free disk"),
    ):
        checkpoint.save(folder, state(3, 40_000))
    assert tree(folder) == before
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]
    checkpoint.save(folder, state(3, 40_000))
    assert checkpoint.steps(folder) == [2, 3]


@pytest.mark.parametrize("name", ["values.json", "manifest.json"])
def test_a_disk_that_fills_between_the_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, state(1))
    before = tree(tmp_path)
    write = checkpoint.write_json

    def full(path: Path, value: object) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(tmp_path, state(2))
    assert tree(tmp_path) == before


def test_what_a_killed_run_was_writing_is_removed(tmp_path: Path) -> None:
    half = tmp_path / ".step-00000002.x1y2"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, state(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)]
)
def test_optimizer_round_trip(tmp_path: Path, make: Callable[..., torch.optim.Optimizer]) -> None:
    """Three steps equal one step, a file, and two steps; to the bit."""

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        return module, make(module.parameters(), lr=0.1)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        module(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    module, optimizer = fresh()
    other, second = fresh()
    assert checkpoint.pack_optimizer(optimizer, "o")[0] == {}  # nothing before the first step
    step(module, optimizer)
    tensors, scalars = checkpoint.pack_optimizer(optimizer, "policy/o")
    path = checkpoint.save(
        tmp_path, State(1, tensors | {f"w/{n}": p for n, p in module.named_parameters()}, {"o": scalars})
    )
    loaded = checkpoint.load(path)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(loaded.tensors[f"w/{name}"])
    checkpoint.unpack_optimizer(second, "policy/o", loaded.tensors, loaded.values["o"])
    assert pformat(second.state_dict()) == pformat(optimizer.state_dict())  # keys in any order
    for _ in range(2):
        step(module, optimizer)
        step(other, second)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
