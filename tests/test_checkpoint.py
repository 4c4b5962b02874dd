"""Checkpoints: exact round trips, torn ones skipped, a full disk that harms nothing, nothing unpickled."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pprint import pformat

import pytest
import torch
from safetensors import SafetensorError

from tasks import checkpoint
from tasks.store import DataError, OutageError, sha256

State = tuple[dict[str, torch.Tensor], dict[str, object]]


def state(step: int, size: int = 300) -> State:
    tensors = {
        "weights/a": torch.arange(size) * 0.1 + step,
        "rng": torch.get_rng_state(),
        "half": torch.ones(3).bfloat16(),
    }
    return tensors, {"position": step, "history": [0.1, 1e-17, 3], "name": "é"}


def save(folder: Path, step: int, written: State | None = None) -> Path:
    """A checkpoint of two states, one in a folder of its own."""
    tensors, values = written or state(step)
    with checkpoint.writing(folder, step) as work:
        checkpoint.write_state(work, tensors, values)
        checkpoint.write_state(work / "engine", tensors, values)
    return folder / f"step-{step:08d}"


def load(path: Path) -> State:
    checkpoint.check(path)
    return checkpoint.read_state(path)


def same(a: State, b: State) -> bool:
    (tensors, values), (others, other_values) = a, b
    alike = (torch.equal(t, others[n]) and t.dtype == others[n].dtype for n, t in tensors.items())
    return values == other_values and tensors.keys() == others.keys() and all(alike)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_round_trip_is_exact(tmp_path: Path) -> None:
    written = state(7)
    path = save(tmp_path, 7, written)
    assert checkpoint.latest(tmp_path) == path
    assert path.name == "step-00000007"
    assert same(load(path), written)
    assert same(checkpoint.read_state(path / "engine"), written)


def test_views_and_shared_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    found, _ = load(save(tmp_path, 1, ({"a": base, "b": base.T, "c": base[1]}, {})))
    assert torch.equal(found["b"], base.T)
    assert torch.equal(found["c"], base[1])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    assert checkpoint.steps(tmp_path) == [3, 10]
    save(tmp_path, 10, state(10, 5))  # written again after a resume from before it
    assert load(tmp_path / "step-00000010")[0]["weights/a"].numel() == 5


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
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "deep": lambda p: p.write_bytes(b"[" * 100_000),
    "6000 digits": lambda p: p.write_bytes(b"9" * 6_000),
    **{f"flip {place}": flip(place) for place in (0, 6, 13, 60, -3)},
}


@pytest.mark.parametrize("name", ["tensors.safetensors", "values.json", "manifest.json", "engine/tensors.safetensors"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_torn_checkpoint_is_reported_and_the_older_one_used(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    older = save(tmp_path, 1)
    DAMAGE[kind](save(tmp_path, 2) / name)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.latest(tmp_path)
    assert found == older
    (record,) = caplog.records
    assert "step-00000002" in record.getMessage()
    assert "an older checkpoint is used" in record.getMessage()


@pytest.mark.parametrize("source", ["the step before", "another run"])
def test_a_whole_file_in_the_place_of_another_is_named_and_the_older_one_used(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It can be read and has the same names and shapes, so only its checksum tells."""
    older = save(tmp_path / "here", 1)
    newer, other = save(tmp_path / "here", 2, state(2)), save(tmp_path / "there", 2, state(5))
    name = "tensors.safetensors"
    shutil.copyfile({"the step before": older, "another run": other}[source] / name, newer / name)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(tmp_path / "here") == older
    assert f"{newer}: {name} does not match its checksum" in caplog.text


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    """One that only changes white space may pass; what is loaded is then what was written."""
    path = save(tmp_path, 1, state(1, 3)) / "manifest.json"
    sound = path.read_bytes()
    for place in range(len(sound)):
        for bit in (0x01, 0x20, 0x80):
            data = bytearray(sound)
            data[place] ^= bit
            path.write_bytes(data)
            try:
                assert same(load(path.parent), state(1, 3))
            except DataError:
                continue


def test_what_is_no_checkpoint_is_passed_over(tmp_path: Path) -> None:
    sound = save(tmp_path, 1)
    (tmp_path / "step-00000099").touch()
    for name in ("step-²", "step-٣٣٣٣٣٣٣٣", "step-7", "step-x"):
        (tmp_path / name).mkdir()
    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.latest(tmp_path) == sound
    save(tmp_path, 2)
    save(tmp_path, 3)
    assert checkpoint.steps(tmp_path) == [2, 3]


@pytest.mark.parametrize("text", ["[]", "{}", '{"files": []}', '{"files": {}}', '{"files": {"values.json": ""}}', "3"])
def test_a_manifest_that_vouches_for_nothing(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json does not list"):
        checkpoint.check(path)
    assert checkpoint.latest(tmp_path) is None


def test_a_file_that_the_manifest_does_not_know(tmp_path: Path) -> None:
    """It came there in another way than by writing the checkpoint."""
    path = save(tmp_path, 1)
    (path / "engine" / "more.json").write_text("{}")
    with pytest.raises(DataError, match=r"manifest\.json does not list engine/more\.json"):
        checkpoint.check(path)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A pickle in a tensor file's place, with a manifest that vouches for it, runs no code."""

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = save(tmp_path, 1)
    (path / "tensors.safetensors").write_bytes(pickle.dumps(Trap()))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["tensors.safetensors"] = sha256(path / "tensors.safetensors")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match=r"(?i)header"):
        load(path)
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
    save(folder, 1)
    save(folder, 2)
    before = tree(folder)
    with (
        file_limit(limit),
        pytest.raises(OSError, match=r"step-00000003: the checkpoint could not be written .*Free disk"),
    ):
        save(folder, 3, state(3, 40_000))
    assert tree(folder) == before
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]
    save(folder, 3, state(3, 40_000))
    assert checkpoint.steps(folder) == [2, 3]


@pytest.mark.parametrize("name", ["values.json", "manifest.json"])
def test_a_disk_that_fills_between_the_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    before = tree(tmp_path)
    write = checkpoint.write_json

    def full(path: Path, value: object) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path, 2)
    assert tree(tmp_path) == before


def test_what_a_killed_run_was_writing_is_removed(tmp_path: Path) -> None:
    half = tmp_path / ".step-00000002.x1y2"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, 2)
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
    weights = {f"w/{n}": p for n, p in module.named_parameters()}
    loaded, values = load(save(tmp_path, 1, (tensors | weights, {"o": scalars})))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(loaded[f"w/{name}"])
    checkpoint.unpack_optimizer(second, "policy/o", loaded, values["o"])
    assert pformat(second.state_dict()) == pformat(optimizer.state_dict())  # keys in any order
    for _ in range(2):
        step(module, optimizer)
        step(other, second)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_a_full_disk_is_known_by_its_number_whoever_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner tells a full disk in one line without a traceback."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError) as caught:
        save(tmp_path, 2)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).endswith("step-00000002")


def test_a_worker_that_dies_while_it_saves_is_no_full_disk(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = tree(tmp_path)
    with pytest.raises(OutageError, match=r"^worker 1 is gone$"), checkpoint.writing(tmp_path, 2):
        raise OutageError("worker 1 is gone")
    assert tree(tmp_path) == before
