"""`engine: deepspeed` in the stages that teach start policies, readers and reward models: a kill loses nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.forked import Kill, forking_python
from tests.stages.clone import Clone
from tests.stages.test_deepspeed import FORKED, Place

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

BEFORE = ("plan", "data", "validate", "index", "recall", "augment")
PLAYED = ("trajectories --reward_model pica --seed 0", "labels --reward_model pica --seed 0")
TAUGHT = {
    "base --seed 0": "artifacts/base/0",
    "start --start r_search --seed 0": "artifacts/models/r_search-0",
    "reader --reader tiny_llama --seed 0": "artifacts/models/tiny_llama-0",
    "reward_model --reward_model pica --seed 0": "artifacts/models/pica-0",
}
"""Each stage, and what it makes."""


def must(place: Place, *stages: str) -> None:
    for stage in stages:
        name, *words = stage.split()
        done = place.run("python", "-m", f"tasks.stages.{name}", *words)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A clone in which all of them were taught."""
    clone = Clone.make(tmp_path_factory.mktemp("taught") / "clone")
    models = {"reward_models": "pica", "readers": "tiny_llama", "starts": "r_search", "tools": "r_search"}
    settings = {"systems": "base, pica, r_search"} | models
    for key, value in settings.items():
        clone.set(key, f"[{value}]")
    clone.set("engine", "deepspeed")
    with forking_python(is_linked=False) as folder:
        (clone.root / "conf/cluster/forked.yaml").write_text(FORKED % folder, encoding="utf-8")
        made = Place(clone, folder)
        first, *others = TAUGHT
        must(made, *BEFORE, first, *PLAYED, *others)
        yield made


@pytest.mark.parametrize("stage", TAUGHT)
def test_a_killed_worker_ends_the_stage_in_one_line_and_it_goes_on_to_the_same_bytes(
    place: Place, tmp_path: Path, stage: str
) -> None:
    killed = Place(place.clone.copy(tmp_path / "clone"), place.python)
    root, (name, *words) = killed.clone.root, stage.split()
    expected = killed.clone.files(TAUGHT[stage])
    assert expected
    for path in (root / ".scratch/work").glob(f"{name}@*"):
        shutil.rmtree(path)  # The checkpoints of the training that was not disturbed.

    # The third update of a process: of the reward model the first after its checkpoint, of all others before one.
    forked.place(root, Kill("deepspeed_worker", 1, "update", 3))
    done = killed.run("python", "-m", f"tasks.stages.{name}", *words)
    assert (root / forked.KILLED).exists(), done.stdout + done.stderr
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    said = r"error: worker 1 on localhost, in update: it was ended by signal 9\. .*the run continues\."
    assert re.fullmatch(said, line)
    assert killed.clone.files(TAUGHT[stage]) == expected  # What was made before is still there.

    (root / forked.ORDER).unlink()
    must(killed, stage)
    assert killed.clone.files(TAUGHT[stage]) == expected


def test_the_plain_engine_makes_the_same_model_but_for_the_order_of_sums(place: Place, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    plain = Place(place.clone.copy(tmp_path / "clone"), place.python)
    plain.clone.set("engine", "plain")
    must(plain, "plan", "base --seed 0")
    ours, theirs = (
        load_file(one.clone.root / TAUGHT["base --seed 0"] / "policy/model.safetensors") for one in (place, plain)
    )
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-2)
        assert float((tensor - theirs[key]).abs().mean()) < 1e-4, key
