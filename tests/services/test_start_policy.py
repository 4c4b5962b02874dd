"""The start policy as a service: its log-probabilities are those of a plain forward, however much was learned since."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.services import Resources, opened
from tasks.services.start_policy import StartPolicy
from tests.tiny import logprobs_of, make_model, make_tokenizer, make_trainer

PAIRS = [((3, 5, 8, 13), (21, 34)), ((2, 4), (6,)), ((9, 9, 9), (1, 2, 3, 4))]


def test_log_probabilities_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_steps=1)
    trainer.run()
    start = make_model(make_tokenizer())
    slow = [float(logprobs_of(start, (*context, *ids), len(context)).mean()) for context, ids in PAIRS]
    resources = Resources(tmp_path, tmp_path, trainer.policy, trainer.player.tokenizer, max_batch_tokens=256)
    with opened({"log_probs": StartPolicy()}, resources) as services:
        assert services["log_probs"].mean_logprobs(PAIRS) == pytest.approx(slow, abs=1e-5)
