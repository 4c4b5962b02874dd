"""Workers of DeepSpeed and this process under supervised training: the same losses, weights and checkpoints."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tasks import identity
from tasks.base import fit as of_responses
from tasks.base.demonstrations import Example
from tasks.base.fit import Fit, PhaseConf
from tasks.crew import CrewError
from tasks.engine import DivergedError, deepspeed
from tasks.engine.deepspeed import DeepSpeedEngine, evened
from tasks.model import computes_in, export_folder
from tasks.plan.machine import Machine, Memory
from tasks.plan.memory import Division, Taught, supervised
from tasks.plan.model_size import of_folder
from tasks.reward_model import fit as of_potentials
from tasks.reward_model.settings import LossConf
from tasks.supervised import Learner, Supervision, opened
from tests.reward_model.small import FIT, labelled, start
from tests.reward_model.test_fit import fresh
from tests.tiny import make_model

TOTAL = 23.0


@pytest.fixture(autouse=True)
def one_thread(forked_workers: None) -> None:
    torch.set_num_threads(1)


def examples(count: int, seed: int = 0) -> list[Example]:
    """Prompts that begin alike, and responses of which some tokens are trained."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        response = tuple(rng.randrange(300) for _ in range(rng.randint(2, 9)))
        mask = (*(rng.random() < 0.7 for _ in response[1:]), True)
        found.append(Example((1, 2, 3, rng.randrange(300)), response, mask))
    return found


def halves(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """One micro-batch a worker, the longer one first: both learners add the same two gradients, and a + b = b + a."""
    return [rows[: len(rows) // 2 + 1], rows[len(rows) // 2 + 1 :]]


class Case:
    """A kind of supervised training.

    Args:
        kind: `responses` or `potentials`.
        folder: for a model.
        changes: of what the learner is told.
    """

    def __init__(self, kind: str, tokenizer: Any, folder: Path, **changes: Any) -> None:
        self.kind, self.tokenizer, self.folder = kind, tokenizer, folder
        told = of_responses.supervision()
        self.rows: list[Any] = list(examples(7))
        if kind == "potentials":
            told = of_potentials.supervision(LossConf(), FIT)
            start(folder)
            self.rows = list(labelled(fresh(folder)[1], 7))
        self.told: Supervision = replace(told, **{"max_grad_norm": 1e9} | changes)

    def model(self) -> Any:
        """The same one each time, in this process."""
        return fresh(self.folder)[0] if self.kind == "potentials" else make_model(self.tokenizer, kv_heads=2)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("kind", ["responses", "potentials"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_updates_are_those_of_this_process(kind: str, stage: Any, tokenizer: Any, tmp_path: Path) -> None:
    case = Case(kind, tokenizer, tmp_path / "start")
    engine = DeepSpeedEngine(workers=2, stage=stage)
    with opened(case.model(), case.told, None) as plain, engine.learner(case.model(), case.told) as divided:
        before, batches = weights_of(plain), halves(case.rows)
        for number in range(4):
            ours, theirs = (learner.learn(batches, TOTAL, 1e-3 / (1 + number)) for learner in (divided, plain))
            assert ours.metrics == theirs.metrics
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
            assert divided.measure(batches) == plain.measure(batches)

        expected = weights_of(plain)
        assert not all(torch.equal(tensor, before[name]) for name, tensor in expected.items())
        assert_equal(weights_of(divided), expected)
        divided.bring_back()
        assert_equal(dict(divided.model.named_parameters()), dict(plain.model.named_parameters()))
        divided.save(tmp_path / "ours")
        plain.save(tmp_path / "theirs")
    assert_equal(*(load_file(tmp_path / name / "tensors.safetensors") for name in ("ours", "theirs")))


@pytest.mark.parametrize(
    ("kind", "stage", "workers", "changes"),
    [
        ("responses", 3, 2, {"task": of_responses.Responses(share_reading=True)}),
        ("potentials", 3, 2, {"keep_activations": False, "max_grad_norm": 1.0}),
        ("potentials", 2, 3, {}),
    ],
)
def test_where_micro_batches_do_not_come_out_even_only_sums_are_rounded(
    kind: str, stage: Any, workers: int, changes: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    case = Case(kind, tokenizer, tmp_path / "start", **changes)
    batches = [case.rows[:1], case.rows[1:6], case.rows[6:]]
    engine = DeepSpeedEngine(workers=workers, stage=stage)
    names = ("loss",) if kind == "responses" else ("final", "gold")
    with opened(case.model(), case.told, None) as plain, engine.learner(case.model(), case.told) as divided:
        for step in range(3):
            given = batches if step else [case.rows[:1]]  # In the first one all workers but one have nothing.
            ours, theirs = (learner.learn(given, TOTAL, 1e-4) for learner in (divided, plain))
            assert len(ours.metrics) == (4 if step and workers == 2 else len(given))
            for name in names:
                assert ours.sum(name) == pytest.approx(theirs.sum(name), rel=1e-5)
        expected = weights_of(plain)
        for name, tensor in weights_of(divided).items():
            # Adam's first step is lr * sign: a gradient of about 0 may turn its sign with the order of the sum.
            assert float((tensor - expected[name]).abs().mean()) < 1e-6, name


@pytest.mark.parametrize(("kind", "stage"), [("responses", 2), ("responses", 3), ("potentials", 3)])
def test_in_bfloat16_losses_and_weights_begin_alike(kind: str, stage: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Responses are learned with rounded weights, and the reward model by autocast with whole ones."""
    if computes_in("bfloat16", torch.device("cpu")) != torch.bfloat16:
        pytest.skip("no bfloat16: this processor has no instructions for it")
    changes = (
        {"dtype": "bfloat16"} if kind == "responses" else {"task": of_potentials.Potentials(LossConf(), "bfloat16")}
    )
    case = Case(kind, tokenizer, tmp_path / "start", **changes)
    engine = DeepSpeedEngine(workers=2, stage=stage)
    with opened(case.model(), case.told, None) as plain, engine.learner(case.model(), case.told) as divided:
        ours, theirs = (learner.learn(halves(case.rows), TOTAL, 1e-4) for learner in (divided, plain))
        assert ours.metrics == theirs.metrics
        divided.bring_back()
        for mine, other in zip(divided.model.parameters(), plain.model.parameters(), strict=True):
            assert mine.dtype == other.dtype == (torch.bfloat16 if kind == "responses" else torch.float32)
            torch.testing.assert_close(mine.float(), other.float(), rtol=1e-2, atol=2.1e-4)


# A schedule over workers ----------------------------------------------------------------------------------------------

PHASE = PhaseConf(max_steps=5, batch=6, lr=1e-3, decay=True, stop_loss=0.0)


def taught(learner: Learner, scratch: Path, kill_at: int | None = None) -> dict[str, Tensor]:
    """Two phases, from the newest checkpoint; a worker is killed before the batch of step `kill_at`."""
    fit = Fit(learner, scratch, 2, 48, lambda step, metrics: None)

    def sample(step: int) -> list[Example]:
        if fit.step == kill_at:
            os.kill(learner.crew.call("pid", [()] * 2)[1], signal.SIGKILL)  # type: ignore[attr-defined]
        return examples(PHASE.batch, step)

    fit.run("first", replace(PHASE, max_steps=3), sample)
    fit.run("second", PHASE, sample)
    return {name: tensor.detach().clone() for name, tensor in learner.model.named_parameters()}


def test_a_killed_worker_ends_the_training_in_one_line_and_it_goes_on_with_any_learner(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "_MODULE", "tests.engine.tensors_worker")
    case = Case("responses", tokenizer, tmp_path / "start")
    engine = DeepSpeedEngine(workers=2, stage=2)

    def run(name: str, kill_at: int | None = None, engine: Any = engine) -> dict[str, Tensor]:
        with opened(case.model(), case.told, engine) as learner:
            return taught(learner, tmp_path / name, kill_at)

    whole = run("whole")
    for number, kill_at in enumerate((1, 6)):
        with pytest.raises(CrewError) as caught:
            run("killed", kill_at)
        said = r"worker 1 on localhost, in update: it was ended by signal 9\..* Start again: the run continues\."
        assert re.fullmatch(said, str(caught.value))
        assert (tmp_path / "killed").exists() == bool(number)  # Of step 1 there was no checkpoint.
    assert_equal(run("killed"), whole)

    with pytest.raises(CrewError):
        run("other", 6)
    for name, tensor in run("other", engine=None).items():  # This process goes on.
        assert float((tensor - whole[name]).abs().mean()) < 1e-5, name


def test_a_reward_model_is_trained_to_its_best_weights_and_resumed(tokenizer: Any, tmp_path: Path) -> None:
    case = Case("potentials", tokenizer, tmp_path / "start", max_grad_norm=1.0)

    def run(name: str, engine: Any, die_at: int = 0) -> Any:
        def log(step: int, metrics: dict[str, float]) -> None:
            if step == die_at:
                raise KeyboardInterrupt

        model, tokens = fresh(case.folder)
        rows, others = labelled(tokens, 12), labelled(tokens, 5, 1)
        with opened(model, case.told, engine) as learner:
            fit = of_potentials.Fit(learner, LossConf(), FIT, rows, others, "0", tmp_path / name, log)
            progress = fit.run()
        return {key: tensor.detach().clone() for key, tensor in model.named_parameters()}, progress

    engine = DeepSpeedEngine(workers=2, stage=3)
    (whole, progress), (plain, by_plain) = run("whole", engine), run("plain", None)
    assert (progress.step, progress.best_step) == (by_plain.step, by_plain.best_step)
    for ours, theirs in zip(progress.history, by_plain.history, strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-3)
    assert all(float((tensor - plain[name]).abs().mean()) < 1e-5 for name, tensor in whole.items())

    with pytest.raises(KeyboardInterrupt):
        run("killed", engine, 5)
    resumed, again = run("killed", engine)
    assert_equal(resumed, whole)
    assert again == progress


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_not_finite_ends_the_training_in_one_line(
    stage: Any, tokenizer: Any, tmp_path: Path
) -> None:
    case = Case("responses", tokenizer, tmp_path / "start")
    model = case.model()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with (
        DeepSpeedEngine(workers=2, stage=stage).learner(model, case.told) as divided,
        pytest.raises(DivergedError, match=r"the gradient norm is \w+ after 0 updates\. Lower the learning rate\."),
    ):
        divided.learn(halves(case.rows), TOTAL, 1e-3)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32")])
def test_a_worker_holds_the_tensors_that_the_preflight_counts(
    stage: Any, dtype: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "_MODULE", "tests.engine.tensors_worker")
    case = Case("responses", tokenizer, tmp_path / "start", dtype=dtype)
    export_folder(case.model(), tokenizer, tmp_path / "policy")
    engine = DeepSpeedEngine(workers=2, stage=stage)
    with engine.learner(case.model(), case.told) as divided:
        divided.learn(halves(case.rows), TOTAL, 1e-4)
        held = divided.crew.call("tensors", [()] * 2)
        loaded = divided.crew.call("loaded", [()] * 2)
    # A change of any of them makes those stages run again whose plan names this engine.
    files = identity.Sources(identity.ROOT).closure(identity.modules_of([engine]) | {"tasks.base.fit"})
    assert [path for path in loaded[0] if path not in files] == []

    machine = Machine(Memory(1, "memory"), None, True, True)
    taught = Taught("start policy", of_folder(tmp_path / "policy"), dtype, tokens=1, longest=1)
    items = list(supervised(taught, machine, Division(2, 1, stage, engine.offload, engine.bucket)))
    counted = sum(item.size for item in items if item.name.startswith("policy: "))
    for found in held:
        assert 0 <= found - counted <= 4000  # Buffers, the count of steps, and what makes lengths even.


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 5))
def test_all_workers_get_as_many_micro_batches_of_about_as_many_tokens(batches: list[list[int]], workers: int) -> None:
    found = evened(batches, workers, int)
    assert sorted(one for batch in found for one in batch) == sorted(one for batch in batches for one in batch)
    sizes = [sum(batch) for batch in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len(batches) <= len(found) < len(batches) + workers
    assert not len(found) % workers or all(len(batch) == 1 for batch in found)
    if not len(batches) % workers:
        assert sorted(map(id, found)) == sorted(map(id, batches))  # What comes out even is not cut.
