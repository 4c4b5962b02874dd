"""Training whose rewards ask a real server: what is counted, and what is learned when the server or its budget ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tasks.rewards import Field, on_last_token
from tasks.services import NO_SERVICES, Refusal, Resources, Role, ServiceError, Services
from tasks.services.endpoint import Endpoint
from tasks.store import sha256
from tasks.train.loop import Trainer
from tasks.types import Question, Scores, Trajectory
from tests.services.completions import Completions, completion, serving
from tests.tiny import make_trainer
from tests.train.test_loop import CutError, assert_equal, cut_after, outcome

FILE = "replies.jsonl"
OPTIONS: dict[str, Any] = {"num_steps": 4, "rollouts_per_step": 8, "minibatches": 2}
PER_STEP = 8


@dataclass(frozen=True)
class Asked:
    """The number that a chat model replies about a trajectory; a reply that is none counts as 0 and as a failure."""

    reads: ClassVar[tuple[Field, ...]] = ()
    services: ClassVar[tuple[Role, ...]] = ("chat",)
    components: ClassVar[tuple[str, ...]] = ("asked",)

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Services = NO_SERVICES
    ) -> list[Scores]:
        chat = services["chat"]
        asked = [[{"role": "user", "content": f"{t.group_id} {t.response_ids}"}] for t in trajectories]
        scores = []
        for trajectory, reply in zip(trajectories, chat.replies(asked), strict=True):
            is_number = not isinstance(reply, Refusal) and reply.content in ("0", "1")
            chat.usage.failures += not isinstance(reply, Refusal) and not is_number
            value = float(reply.content) if is_number else 0.0  # type: ignore[union-attr]
            scores.append(on_last_token(trajectory, value, asked=value))
        return scores


def _even(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, completion(str(body["messages"][0]["content"].count(",") % 2), 7)


def _trained(scratch: Path, conf: Endpoint, root: Path, **options: Any) -> Trainer:
    with conf.opened(Resources(root, scratch)) as chat:
        trainer = make_trainer(scratch, rewards=(Asked(),), services={"chat": conf}, **OPTIONS | options)
        trainer.services = {"chat": chat}
        trainer.run()
        return trainer


def _works(trainer: Trainer) -> dict[str, float]:
    return trainer.progress.usage["chat"].named(("calls", "tokens", "failures"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A run that met no fault, recorded."""
    root = tmp_path_factory.mktemp("whole")
    with serving() as server:
        server.answer = _even
        return _trained(root / "run", server.conf(recorded=FILE), root), root


def test_calls_tokens_and_failures_are_counted_a_step_and_in_all(whole: tuple[Trainer, Path]) -> None:
    history = whole[0].progress.history[1:]
    assert [row["metrics"]["services/chat/calls"] for row in history] == [PER_STEP] * 4
    assert [row["metrics"]["services/chat/tokens"] for row in history] == [7 * PER_STEP] * 4
    assert _works(whole[0]) == {"calls": 4 * PER_STEP, "tokens": 28 * PER_STEP, "failures": 0}
    assert not [name for row in history for name in row["metrics"] if name.endswith(("seconds", "hits"))]
    assert whole[0].progress.usage["chat"].seconds > 0


def test_seconds_and_hits_are_logged_and_not_kept(tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []
    with serving() as server:
        server.answer = _even
        trainer = _trained(tmp_path, server.conf(), tmp_path, num_steps=1, log=lambda step, m: logged.append(m))
    assert logged[1]["services/chat/seconds"] > 0
    assert logged[1]["services/chat/hits"] == 0
    assert "services/chat/hits" not in trainer.progress.history[1]["metrics"]


def test_a_recorded_run_is_repeated_to_the_bit_without_its_server(whole: tuple[Trainer, Path], tmp_path: Path) -> None:
    trainer, root = whole
    (tmp_path / FILE).write_bytes((root / FILE).read_bytes())
    conf = trainer.method.services["chat"]
    assert isinstance(conf, Endpoint)
    replay = replace(conf, replayed_sha256=sha256(root / FILE))
    again = _trained(tmp_path / "run", replay, tmp_path)
    assert_equal(outcome(again), outcome(trainer))
    assert _works(again) == _works(trainer)
    assert again.progress.usage["chat"].hits == 4 * PER_STEP


def test_a_budget_that_ends_in_a_step_is_one_line_and_costs_nothing(
    whole: tuple[Trainer, Path], tmp_path: Path
) -> None:
    """The budget ends in the middle of step 3; with a larger one the run goes on from the checkpoint of step 2."""
    with serving() as server:
        server.answer = _even
        poor, rich = server.conf(max_requests=20), server.conf(max_requests=4 * PER_STEP)
        with pytest.raises(
            ServiceError, match=r"the budget is spent: 20 of max_requests=20 .*Raise it to go on"
        ) as caught:
            _trained(tmp_path / "run", poor, tmp_path)
        assert "\n" not in str(caught.value)
        # A checkpoint belongs to the settings of its method, of which a budget is a part: the run starts anew, and
        # finds every reply that was paid for.
        rest = _trained(tmp_path / "again", rich, tmp_path)
        assert len(server.asked) == 4 * PER_STEP
    assert_equal(outcome(rest), outcome(whole[0]))


def test_a_killed_run_goes_on_with_the_same_counts(whole: tuple[Trainer, Path], tmp_path: Path) -> None:
    with serving() as server:
        server.answer = _even
        with pytest.raises(CutError):
            _trained(tmp_path / "run", server.conf(), tmp_path, log=cut_after(4))
        rest = _trained(tmp_path / "run", server.conf(), tmp_path)
        assert len(server.asked) == 4 * PER_STEP
    assert_equal(outcome(rest), outcome(whole[0]))
    assert _works(rest) == _works(whole[0])


@pytest.mark.parametrize("fault", ["down", "slow", "cut"])
def test_a_server_that_goes_away_ends_the_run_in_one_line_and_it_goes_on_later(
    whole: tuple[Trainer, Path], tmp_path: Path, fault: str
) -> None:
    with serving() as server:
        conf = server.conf(timeout_s=0.5, retries=1)
        _fail_after(server, 20, fault)
        with pytest.raises(ServiceError, match=r"\(2 tries\)\. Every finished reply is kept in \.scratch") as caught:
            _trained(tmp_path / "run", conf, tmp_path)
        assert "\n" not in str(caught.value)
        server.answer = _even
        rest = _trained(tmp_path / "run", conf, tmp_path)
    assert_equal(outcome(rest), outcome(whole[0]))
    assert _works(rest) == _works(whole[0])


def _fail_after(server: Completions, count: int, fault: str) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if len(server.asked) <= count:
            return _even(body)
        if fault == "slow":
            time.sleep(1.0)
        return (200, None) if fault == "cut" else (503, {"error": "away"})

    server.answer = answer


def test_rubbish_is_counted_and_trains_nothing(tmp_path: Path) -> None:
    """Every reply is NaN, a number out of bounds or prose: all rewards are equal, and weights stay as they are."""
    rubbish = ["nan", "1e999", "I give it 1.", "", "2", "-1"]
    with serving() as server:
        server.answer = lambda body: (200, completion(rubbish[len(server.asked) % len(rubbish)]))
        trainer = _trained(tmp_path, server.conf(), tmp_path, num_steps=2)
    assert _works(trainer)["failures"] == 2 * PER_STEP
    assert all(row["metrics"]["reward_mean"] == 0.0 for row in trainer.progress.history[1:])
    weights, _, _ = outcome(trainer)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
