"""The example of a service that scores turns: golden values, one call for a batch, and bad settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.services import Resources, opened
from tests.services.parity import Parity
from tests.services.test_turn_scores import played
from tests.tiny import question


def test_golden_scores_and_it_is_closed_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns begin with tokens 0, 3 and 6."""
    with opened({"turn_scores": Parity(0.5, 0.25)}, Resources(Path(), Path())) as services:
        scorer = services["turn_scores"]
        asked = replace(question(), id=played(1).question_id)
        assert scorer.score([played(3), played(1)], [asked, asked]) == [[0.5, 0.25, 0.5], [0.5]]
    assert capsys.readouterr().out == "parity: 2 trajectories in 1 calls\n"
    with pytest.raises(AssertionError):
        scorer.score([], [])


def test_bounds() -> None:
    with pytest.raises(ValueError, match=r"odd=1.5: expected 0 to 1"):
        Parity(0.5, 1.5)
