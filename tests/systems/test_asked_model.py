"""The example of a prompted system: what a failed search becomes, and what it sends in each mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tasks import conf
from tasks.evaluate.play import evaluate
from tasks.retrieval import RetrievalError
from tasks.services import Resources
from tasks.services.endpoint import ChatEndpoint
from tasks.types import Hit, Question
from tests.services.completions import Completions, completion, serving
from tests.systems.asked_model import AskedModel, AskedModelSettings

NAMES = ("Oslo", "Lima", "Bern")


@dataclass
class Faulty:
    """Finds a passage for every query, except for those in `lost`; the first `outages` calls fail as a whole."""

    lost: tuple[str, ...] = ()
    outages: int = 0
    calls: list[list[str]] = field(default_factory=list)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.calls.append(list(queries))
        if len(self.calls) <= self.outages or set(self.lost) & set(queries):
            raise RetrievalError("no answer.")
        return [[Hit(f"p-{query}", 1.0, query, f"{query} is a town.")] for query in queries]


@pytest.fixture
def server() -> Iterator[Completions]:
    """A chat model that always gives the same answer."""
    with serving() as found:
        found.answer = lambda body: (200, completion("a town"))
        yield found


@pytest.fixture
def chat(server: Completions, tmp_path: Path) -> Iterator[ChatEndpoint]:
    with server.conf(request={"temperature": 0.7, "max_tokens": 9}).opened(Resources(tmp_path, tmp_path)) as opened:
        yield opened


def _questions() -> list[Question]:
    return [Question(f"q{i}", "mine", "test", name, ("town",), 1) for i, name in enumerate(NAMES)]


PROMPT = "{passages} {question}"


def _system(chat: ChatEndpoint, retriever: Faulty, pauses: list[float], prompt: str = PROMPT) -> AskedModel:
    return AskedModel(chat, retriever, 1, prompt, sleep=pauses.append)


def test_a_search_that_fails_after_its_retries_fails_its_own_episode(chat: ChatEndpoint, server: Completions) -> None:
    pauses: list[float] = []
    episodes = list(_system(chat, Faulty(lost=("Lima",)), pauses).play(_questions(), "greedy", 0))
    assert [(episode.question_id, episode.status) for episode in episodes] == [
        ("q0", "answered"),
        ("q1", "failed"),
        ("q2", "answered"),
    ]
    assert (episodes[1].error, episodes[1].answer, episodes[1].turns) == ("no answer.", None, ())
    assert [episode.turns[0].hits[0].passage_id for episode in (episodes[0], episodes[2])] == ["p-Oslo", "p-Bern"]
    assert pauses == [1.0, 2.0]
    assert sorted(body["messages"][0]["content"] for _, body, _ in server.asked) == [
        "Bern is a town. Bern",
        "Oslo is a town. Oslo",
    ]


def test_a_search_that_answers_in_the_end_fails_nothing(chat: ChatEndpoint) -> None:
    pauses: list[float] = []
    episodes = list(_system(chat, Faulty(outages=1), pauses).play(_questions(), "greedy", 0))
    assert {episode.status for episode in episodes} == {"answered"}
    assert pauses == [1.0]


def test_the_evaluation_bounds_how_many_may_fail(chat: ChatEndpoint, tmp_path: Path) -> None:
    system = _system(chat, Faulty(lost=("Lima",)), [])
    with pytest.raises(RetrievalError, match=r"1 of 3 episodes could not search, .*Question q1: no answer\."):
        evaluate(system, _questions(), False, "asked", 0, 3, tmp_path)
    found = evaluate(system, _questions(), False, "asked", 0, 3, tmp_path, max_failed_share=0.5)
    assert [row.status for row in found.scores] == ["answered", "failed", "answered"]


def test_each_mode_has_its_temperature_and_draws_have_a_seed(chat: ChatEndpoint, server: Completions) -> None:
    system = _system(chat, Faulty(), [])
    for mode, seed in (("greedy", 3), ("sampled", 3), ("sampled", 4), ("sampled", 3)):
        assert len(list(system.play(_questions()[:1], mode, seed))) == 1  # type: ignore[arg-type]
    sent = [(body["temperature"], body.get("seed"), body["max_tokens"]) for _, body, _ in server.asked]
    assert sent == [(0, None, 9), (1, 3, 9), (1, 4, 9)]  # The last play was answered from the cache.


@pytest.mark.parametrize("prompt", ["", "{oops}", "{passages}", "{question}"])
def test_a_prompt_without_a_placeholder_is_refused_before_anything_is_played(prompt: str) -> None:
    with pytest.raises(ValueError, match=r"^conf/system/asked\.yaml: prompt=.*: expected text with \{"):
        conf.fill(AskedModelSettings, {"prompt": prompt}, "conf/system/asked.yaml")


def test_other_braces_of_a_prompt_stay(chat: ChatEndpoint, server: Completions) -> None:
    system = _system(chat, Faulty(), [], prompt='{"passages": "{passages}", "answer": {}} {question}')
    assert [episode.answer for episode in system.play(_questions()[:1], "greedy", 0)] == ["a town"]
    ((_, body, _),) = server.asked
    assert body["messages"][0]["content"] == '{"passages": "Oslo is a town.", "answer": {}} Oslo'
