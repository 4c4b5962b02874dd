"""The example of a judge: what it sends to a real server, and what each kind of reply earns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.services import Resources, opened
from tests.rewards.judge import Judge
from tests.services.completions import Answer, completion, serving
from tests.tiny import make_tokenizer, play_script, question

JUDGE = Judge(0.5, "{question}|{text}")
ANSWERED = "<think> so </think> <answer> Bristow </answer>"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ((200, completion({"score": 0.75})), 0.75),
        ((200, completion("```json\n{'score': 1}\n```")), 0.0),
        ((200, completion({"score": 7})), 0.0),
        ((200, completion({"score": 1.0}, finish_reason="length")), 0.0),
        ((400, {"error": "no"}), 0.0),
    ],
)
def test_golden_scores(answer: Answer, score: float, tmp_path: Path) -> None:
    trajectory = play_script(make_tokenizer(), [ANSWERED])
    with serving() as server:
        server.answer = lambda body: answer
        with opened({"chat": server.conf()}, Resources(tmp_path, tmp_path)) as services:
            (found,) = JUDGE([trajectory], [question()], services)
        ((_, body, _),) = server.asked
    assert body["messages"] == [{"role": "user", "content": f"Who rules Avenor ?|{ANSWERED}"}]
    assert found.components == {"judge": score}
    assert found.placed == ((trajectory.last_generated, score / 2),)


@pytest.mark.parametrize("change", [{"scale": -1.0}, {"prompt": "{question}"}])
def test_bounds(change: dict[str, Any]) -> None:
    fine: dict[str, Any] = {"scale": 1.0, "prompt": "{question} {text}"}
    with pytest.raises(ValueError, match=next(iter(change))):
        Judge(**(fine | change))
