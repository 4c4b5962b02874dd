"""The reward model as a service: its scores, what it cannot read, and a model that was exchanged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks import conf, parts
from tasks.reward_model import model as reward_models
from tasks.reward_model import wire
from tasks.reward_model.__main__ import MAX_BYTES, PATH, make_app
from tasks.reward_model.model import load, place_logits
from tasks.reward_model.reading import encode
from tasks.server.settings import Settings
from tasks.services import Probabilities, Resources, ServiceError
from tasks.services.remote_reward_model import RemoteRewardModel
from tasks.services.reward_model import FrozenRewardModel, InProcessRewardModel
from tasks.store import DataError
from tasks.trained import Trained
from tasks.types import Action, Question, Trajectory, Turn
from tests.reward_model.small import start, stored
from tests.server.attacks import get, refuses_foreign_requests, refuses_headers_without_end
from tests.services.completions import Completions, completion, serving

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
PROGRAM = """\
from pathlib import Path
from tasks import conf, program
conf.ROOT = Path.cwd()
from tasks.reward_model.__main__ import main
program.run(main)
"""

QUESTION = Question("q", "toy", "train", "Who is 1 ?", ("Hask",), 1)
SEARCH = Turn(Action("search", "x"), text=" look 1", observation=" found", executed=True)
INVALID = Turn(Action("invalid"), text=" so", observation=" again")
ANSWER = Turn(Action("answer", "Hask"), text=" answer Hask")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def model(root: Path) -> Trained:
    return stored(root, "small", 3, start(root / "start"))


def played(*turns: Turn) -> Trajectory:
    return Trajectory("q", "g", (1,), (1,), (True,), (0.0,), turns, "answered", "Hask")


def opened(root: Path, model: Trained) -> FrozenRewardModel:
    with InProcessRewardModel("small", "success").opened(Resources(root, root, models={"small": model})) as service:
        return service


def test_each_turn_has_the_probability_at_its_place(root: Path, model: Trained) -> None:
    service = opened(root, model)
    assert not any(parameter.requires_grad for parameter in service.model.parameters())
    plays = [played(SEARCH, INVALID, SEARCH, ANSWER), played(ANSWER), played(SEARCH)]
    found = service.probabilities(plays, [QUESTION] * 3)
    assert [tuple(f is None for f in one.after) for one in found] == [(False, True, False, False), (False,), (False,)]
    again, tokenizer = load(root / model.folder, is_new=False)
    one = encode(tokenizer, service.card.placeholder_id, QUESTION.question, plays[0].turns, 600)
    with torch.no_grad():
        (logits,) = place_logits(again, [one])
    wanted = logits.sigmoid().tolist()
    assert [found[0].before, *(f for f in found[0].after if f is not None)] == pytest.approx(wanted, abs=1e-6)
    assert len(set(wanted)) == 4
    assert found[0].before == pytest.approx(found[1].before, abs=1e-6)
    reads = [encode(tokenizer, service.card.placeholder_id, QUESTION.question, t.turns, 600) for t in plays]
    assert (service.usage.calls, service.usage.tokens) == (3, sum(map(len, reads)))


def test_turns_beyond_the_length_that_it_reads_have_no_score(root: Path, model: Trained) -> None:
    service = opened(root, model)
    long = played(SEARCH, replace(SEARCH, text=" look" * 700), ANSWER)
    (found,) = service.probabilities([long], [QUESTION])
    assert [f is None for f in found.after] == [False, True, True]


def test_a_model_that_was_exchanged_is_refused(root: Path, model: Trained) -> None:
    with pytest.raises(DataError, match=r"artifacts/models/small-3/manifest\.json: found \w+, expected sha256 0"):
        opened(root, Trained(model.folder, "0" * 64))


LONG = replace(QUESTION, id="long", question="Who is 1 ?" + " look" * 700)


def test_a_question_longer_than_the_model_reads_is_named(root: Path, model: Trained) -> None:
    service = opened(root, model)
    message = r"^services: reward_model: question 'long': found \d+ tokens, expected fewer than max_tokens=600\. Leave"
    with pytest.raises(ServiceError, match=message):
        service.probabilities([played(ANSWER), played(ANSWER)], [QUESTION, LONG])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("score", "found no weights score.weight, expected all of a reward model"),
        ("place", "found placeholder_id=5, expected"),
    ],
)
def test_scores_of_a_damaged_model_are_not_made_up(
    root: Path, model: Trained, tmp_path: Path, change: str, words: str
) -> None:
    """Sealed anew, so that only what is inside can tell."""
    folder = tmp_path / "model"
    shutil.copytree(root / model.folder, folder)
    if change == "score":
        weights = load_file(folder / "model.safetensors")
        del weights["score.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        reading = json.loads((folder / "reading.json").read_text())
        (folder / "reading.json").write_text(json.dumps(reading | {"placeholder_id": 5}))
    with pytest.raises(DataError, match=words):
        reward_models.opened(folder)


def test_it_names_a_model() -> None:
    with pytest.raises(ValueError, match="model='': expected the name of a file of conf/reward_model/"):
        parts.make("services", {"kind": "reward_model", "model": "", "head": "success"}, "x")


def test_a_model_of_another_head_is_not_opened(root: Path, model: Trained) -> None:
    """Its numbers would be rewarded with the wrong sign."""
    kind, resources = InProcessRewardModel("small", "hazard"), Resources(root, root, models={"small": model})
    message = "services: reward_model: small-3: found head 'success', expected 'hazard'. Name a model in conf/service/"
    with pytest.raises(ServiceError, match=message), kind.opened(resources):
        pass


# Over HTTP ------------------------------------------------------------------------------------------------------------


@contextmanager
def server(root: Path) -> Iterator[tuple[str, str, int]]:
    """The program in a process of its own, over models below `root`: its address, the name of its model, its pid."""
    command = [sys.executable, "-c", PROGRAM, "--model", "small", "--seed", "3", "--port", "0"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, env=ENV) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"ready: model (\S+) at (\S+)\. Ctrl-C ends it\.\n", process.stdout.readline())
        assert found is not None
        try:
            yield found[2], found[1], process.pid
        finally:
            process.terminate()
            assert process.wait(30) == 0


def test_a_server_gives_the_same_probabilities(root: Path, model: Trained, tmp_path: Path) -> None:
    plays = [played(SEARCH, INVALID, SEARCH, ANSWER), played(ANSWER), played(SEARCH)]
    here = opened(root, model).probabilities(plays, [QUESTION] * 3)
    with server(root) as (url, name, _):
        settings = Completions.conf(SimpleNamespace(url=url), model=name, retries=0, request={})  # type: ignore[arg-type]
        with RemoteRewardModel(settings, "success").opened(Resources(tmp_path, tmp_path)) as service:
            there = service.probabilities(plays, [QUESTION] * 3)
            assert (service.usage.calls, service.usage.failures, service.usage.hits) == (3, 0, 0)
            for a, b in zip(here, there, strict=True):
                assert [f is None for f in a.after] == [f is None for f in b.after]
                assert [a.before, *filter(None, a.after)] == pytest.approx([b.before, *filter(None, b.after)], abs=1e-6)
        other = replace(settings, model="small-3@other", max_refused_in_a_row=9)
        with (
            RemoteRewardModel(other, "success").opened(Resources(tmp_path, tmp_path)) as service,
            pytest.raises(ServiceError, match="refuses to score it: status 400: found model 'small-3@other', expected"),
        ):
            service.probabilities(plays[:1], [QUESTION])
        short = replace(settings, max_refused_in_a_row=9)
        with (
            RemoteRewardModel(short, "success").opened(Resources(tmp_path, tmp_path)) as service,
            pytest.raises(ServiceError, match=r"status 400: services: reward_model: question 'q': found \d+ tokens, "),
        ):
            service.probabilities([played(ANSWER)], [LONG])
    again = RemoteRewardModel(settings, "success")  # The server is gone; kept answers are not asked for again.
    with again.opened(Resources(tmp_path, tmp_path)) as service:
        assert service.probabilities(plays, [QUESTION] * 3) == there
        with pytest.raises(ServiceError, match="ConnectError"):
            service.probabilities([played(SEARCH, ANSWER)], [QUESTION])


def test_a_server_refuses_pages_and_endless_headers(root: Path, model: Trained) -> None:
    with server(root) as (url, _, pid):
        port = int(url.removesuffix("/v1").rpartition(":")[2])
        refuses_foreign_requests(port, "/v1/chat/completions")
        refuses_headers_without_end(port, pid, "/v1/chat/completions")
        too_large = f"content-length: {MAX_BYTES + 1}\r\nhost: localhost\r\n"
        assert b"413" in get(port, too_large, "/v1/chat/completions", "POST").partition(b"\r\n")[0]


def test_more_requests_than_may_be_in_work_are_refused(root: Path, model: Trained) -> None:
    """Each holds a trajectory of up to `MAX_BYTES`; the model scores one at a time."""
    begun, go_on, service = threading.Event(), threading.Event(), opened(root, model)

    def slow(plays: Sequence[Trajectory], questions: Sequence[Question]) -> list[Probabilities]:
        begun.set()
        assert go_on.wait(30)
        return service.probabilities(plays, questions)

    waiting: Any = SimpleNamespace(probabilities=slow)
    app = make_app(waiting, "m", "success", Settings(max_requests=2))
    body = {"model": "m", "messages": [{"role": "user", "content": wire.request("Who?", [ANSWER])}]}

    async def asked() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            in_work = [asyncio.create_task(client.post(PATH, json=body)) for _ in range(2)]
            await asyncio.to_thread(begun.wait, 30)
            refused = await client.post(PATH, json=body)
            go_on.set()
            return [refused, *await asyncio.gather(*in_work), await client.post(PATH, json=body)]

    refused, *taken = asyncio.run(asked())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["message"] == "at most 2 requests may be in work"
    assert [one.status_code for one in taken] == [200] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"head": "success", "before": 0.5, "after": [0.5]}', "found probabilities of 1 turns, expected 2"),
        ('{"head": "success", "before": 0.5, "after": [0.5, 1.5]}', "no probabilities (wrong_schema: "),
        ('{"head": "success", "before": null, "after": [0.5, 0.5]}', "no probabilities (wrong_schema: "),
        ('{"head": "success", "before": 0.5, "after": [0.5, NaN]}', "no probabilities (wrong_schema: "),
        ('{"before": 0.5, "after": [0.5, 0.5]}', "no probabilities (wrong_schema: reply: key 'head' is missing."),
        ('{"head": "hope", "before": 0.5, "after": [0.5, 0.5]}', "no probabilities (wrong_schema: reply: head: found"),
        (
            '{"head": "hazard", "before": 0.5, "after": [0.5, 0.5]}',
            "found numbers of head 'hazard', expected 'success'",
        ),
        ("0.5", "no probabilities (wrong_schema: "),
        ("half", "no probabilities (not_json: "),
    ],
)
def test_an_answer_that_is_no_list_of_probabilities_ends_the_step(tmp_path: Path, content: str, message: str) -> None:
    with serving() as running:
        running.answer = lambda body: (200, completion(content))
        with (
            RemoteRewardModel(running.conf(), "success").opened(Resources(tmp_path, tmp_path)) as service,
            pytest.raises(ServiceError) as caught,
        ):
            service.probabilities([played(SEARCH, ANSWER)], [QUESTION])
    assert str(caught.value).startswith(f"services: reward_model: question 'q': {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("after", "error"),
    [
        ([0.5, None, 0.5, 0.5], ""),
        ([0.5, None, None, None], ""),  # The model read no further.
        ([None, None, None, None], ""),
        ([None, None, 0.5, 0.5], "turn 1: found null, expected a number from 0 to 1"),
        ([0.5, None, None, 0.5], "turn 3: found null, expected a number from 0 to 1"),
        ([0.5, 0.25, 0.5, 0.5], "turn 2: found 0.25, expected null, because the turn searched nothing"),
    ],
)
def test_null_stands_where_nothing_was_searched_or_read(tmp_path: Path, after: list[float | None], error: str) -> None:
    plays = [played(SEARCH, INVALID, SEARCH, ANSWER)]
    with serving() as running:
        running.answer = lambda body: (200, completion({"head": "success", "before": 0.5, "after": after}))
        with RemoteRewardModel(running.conf(), "success").opened(Resources(tmp_path, tmp_path)) as service:
            if error:
                with pytest.raises(ServiceError, match=rf"^services: reward_model: question 'q': {error}"):
                    service.probabilities(plays, [QUESTION])
            else:
                (found,) = service.probabilities(plays, [QUESTION])
                assert list(found.after) == after


def test_the_remote_model_of_the_house_can_be_built() -> None:
    house = Path(__file__).parents[2]
    assert parts.make("services", conf.section("service", "remote_pica", house), "x").role == "reward_model"
