"""A new kind of system is one file of code and one of settings: the real stages describe, evaluate and report it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from tests.services.completions import Completions, completion, serving
from tests.stages.clone import HOUSE, Clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TITLE = "kind: first_title\ntitle: First title\nnum_passages: 3\n"
ASKED = """kind: asked_model
title: Asked model
services: {chat: mine}
prompt: |
  {passages}
  Question: {question}
"""
CHAT = """kind: endpoint
base_url: URL
model: reader
key_variable: ""
max_in_flight: 4
timeout_s: 20.0
retries: 1
backoff_s: 0.01
max_backoff_s: 0.02
max_retry_after_s: 1.0
max_refused_in_a_row: 3
max_requests: 1000
max_total_tokens: 100000
request: {temperature: 0}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Completions]:
    """A chat model that always gives the same answer."""
    with serving() as found:
        found.answer = lambda body: (200, completion("Avenor"))
        yield found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, server: Completions) -> Clone:
    """A copy with the start policy, two systems that are no policy, and no method."""
    clone = Clone.make(tmp_path_factory.mktemp("system") / "clone")
    for kind in ("first_title", "asked_model"):
        shutil.copyfile(HOUSE / f"tests/systems/{kind}.py", clone.root / f"tasks/systems/{kind}.py")
    (clone.root / "conf/system/title.yaml").write_text(TITLE)
    (clone.root / "conf/system/asked.yaml").write_text(ASKED)
    (clone.root / "conf/service/mine.yaml").write_text(CHAT.replace("URL", server.url))
    clone.set("systems", "[base, title, asked]")
    clone.must("data", "validate", "index", "recall", "retrievers", "augment", "base --seed 0")
    for name in ("base", "title", "asked"):
        clone.must(*(f"{stage} --system {name}" for stage in ("train --seed 0", "evaluate --seed 0")))
    clone.must("report")
    return clone


def test_a_description_says_what_is_played(clone: Clone) -> None:
    start, title, asked = (
        json.loads((clone.root / f"artifacts/train/{name}-0/system.json").read_text())
        for name in ("base", "title", "asked")
    )
    assert (start["kind"], start["policy"], start["made_by"]) == ("policy", "artifacts/base/0/policy", "base@0")
    assert (title["kind"], title["policy"], title["is_trained"]) == ("first_title", None, False)
    assert (asked["kind"], asked["made_by"]) == ("asked_model", "train@asked-0")
    assert title["policy_sha256"] != asked["policy_sha256"]
    assert [path.name for path in (clone.root / "artifacts/train/base-0").iterdir()] == ["system.json"]


@pytest.mark.parametrize(("name", "title"), [("title", "First title"), ("asked", "Asked model")])
def test_it_stands_in_table_and_page(clone: Clone, name: str, title: str) -> None:
    rows = [line.split(",") for line in (clone.root / "reports/results.csv").read_text().splitlines()]
    measured = {(row[4], row[5]) for row in rows if row[0] == name}
    assert {("greedy", "em"), ("greedy", "em_minus_base"), ("sampled", "f1")} <= measured
    assert not [row for row in rows if row[0] == name and row[4] == "training"]
    assert f"| {title} | 1 |" in (clone.root / "reports/results.md").read_text()
    assert title in (clone.root / "reports/index.html").read_text()


def test_the_model_was_asked_once_a_question_in_each_mode(clone: Clone, server: Completions) -> None:
    scores = (clone.root / "artifacts/evaluate/asked-0/scores.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in scores]
    assert {row["answer"] for row in rows} == {"Avenor"}
    assert {row["prefill_tokens"] for row in rows} == {50}
    assert len(server.asked) == len(rows) == 2 * len({row["question_id"] for row in rows})
    assert {body["temperature"] for _, body, _ in server.asked} == {0, 1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "services: {chat: mine}",
            "",
            "asked.yaml: services={}: kind 'asked_model' calls others, expected {chat: <a",
        ),
        ("services: {chat: mine}", "services: {chats: mine}", "asked.yaml: services={'chats': 'mine'}: kind 'asked_mo"),
        ("chat: mine", "chat: none", "asked.yaml: services: chat: unknown service 'none'. Known: mine, op"),
        ("chat: mine", "chat: world", "kind='world_documents' plays documents, expected one that plays chat"),
        ("prompt: |", "num_passages: 0\nprompt: |", "conf/system/asked.yaml: num_passages=0: expected 1 or more"),
        ("kind: asked_model", "kind: asked", "asked.yaml: unknown kind 'asked': tasks/systems/ has no such part. Know"),
    ],
)
def test_its_settings_are_checked_like_all_others(clone: Clone, old: str, new: str, message: str) -> None:
    clone.change("conf/system/asked.yaml", old, new)
    done = clone.stage("train --system asked --seed 0")
    clone.root.joinpath("conf/system/asked.yaml").write_text(ASKED)
    assert done.returncode == 1
    assert message in done.stderr
