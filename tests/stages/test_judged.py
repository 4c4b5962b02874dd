"""Training with a judge behind a server, through the stage: what a run may spend is raised, and it goes on."""

from __future__ import annotations

import hashlib
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tasks.planned import path_of
from tasks.runner.resume import fingerprint
from tests.services.completions import Completions, completion, serving
from tests.stages.clone import PATIENCE, Clone

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

NAME, TRAIN = "train@judged-0", "train --system judged --seed 0"
JUDGE = """kind: chat_judge
second_temperature: 0.3
thought: "{question} {context} {thought}"
query: "{question} {context} {thought} {query}"
answer: "{question} {context} {answer} {golds}"
chat:
  base_url: %s
  model: judge-1
  key_variable: ""
  max_in_flight: 2
  max_requests: 100000
  max_total_tokens: 100000000
  request: {}
""" + textwrap.indent(PATIENCE, "  ")
METHOD = """extends: slate
title: Judged
paper_rows: []
services: {judge: chat_judge}
"""


def _verdict(body: dict[str, Any]) -> tuple[int, Any]:
    """Some score, which depends on the request alone."""
    digest = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
    return 200, completion(f"<score> {digest[0] % 3 - 1} </score>")


def _ready(folder: Path, server: Completions) -> Clone:
    clone = Clone.make(folder)
    (clone.root / "conf/method/judged.yaml").write_text(METHOD)
    (clone.root / "conf/service/chat_judge.yaml").write_text(JUDGE % server.url)
    clone.set("systems", "[base, judged]")
    clone.must("data", "validate", "index", "recall", "augment", "base --seed 0", "inputs --system judged --seed 0")
    return clone


def test_a_run_whose_budget_is_spent_goes_on_when_it_is_raised(tmp_path: Path) -> None:
    with serving() as server, serving() as other:
        server.answer = other.answer = _verdict
        clone = _ready(tmp_path / "clone", server)
        whole = clone.copy(tmp_path / "whole")
        whole.must(TRAIN)
        num_asked = len(server.asked)
        assert num_asked > 10

        service = "conf/service/chat_judge.yaml"
        clone.change(service, "max_requests: 100000", f"max_requests: {num_asked - 3}")
        stopped = clone.stage(TRAIN)
        assert stopped.returncode == 1
        assert "the budget is spent" in stopped.stderr
        plan, state = (clone.root / path_of(NAME)).read_bytes(), fingerprint(clone.root, NAME)
        assert (clone.root / f".scratch/work/{NAME}-{state}").is_dir()

        # Another limit, another patience and another address of the same model are no other run.
        clone.change(service, f"max_requests: {num_asked - 3}", "max_requests: 100000")
        clone.change(service, "retries: 1", "retries: 5")
        clone.change(service, server.url, other.url)
        clone.must("plan")
        assert (clone.root / path_of(NAME)).read_bytes() == plan
        assert fingerprint(clone.root, NAME) == state
        clone.must(TRAIN)
        assert len(server.asked) == 2 * num_asked - 3
        assert 3 <= len(other.asked) < 10  # The unfinished step asks again, because replies are kept by address.
        assert clone.files("artifacts/train") == whole.files("artifacts/train")

        clone.change(service, "model: judge-1", "model: judge-2")
        clone.must("plan")
        assert fingerprint(clone.root, NAME) != state
