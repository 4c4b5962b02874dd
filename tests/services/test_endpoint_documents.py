"""The simulator that asks a model, against a real server: documents, noise, faults, budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tasks.retrieval import RetrievalError
from tasks.retrieval.generated import GeneratedRetriever
from tasks.services import Resources, load
from tasks.services.endpoint_documents import EndpointDocuments
from tests.services.completions import Completions, completion, serving

ROOT = Path(__file__).parents[2]
PROMPT = "Write {num_documents} documents with {kind} for: {query}"


@pytest.fixture
def server() -> Iterator[Completions]:
    with serving() as running:
        running.answer = lambda body: (200, completion(documents(body)))
        yield running


def documents(body: dict[str, Any], count: int = 2) -> dict[str, Any]:
    """What the request asked for, so that a test sees what the model was told."""
    told = body["messages"][1]["content"]
    return {"documents": [{"title": f"T{i}", "text": f"{told} #{i}"} for i in range(count)]}


@pytest.fixture
def open_search(server: Completions, tmp_path: Path) -> Iterator[Callable[..., GeneratedRetriever]]:
    """Opens the service over one cache, as often as a test likes."""
    with ExitStack() as stack:

        def make(noise: float = 0.0, **changes: Any) -> GeneratedRetriever:
            settings = EndpointDocuments("truth", "noise", 2, PROMPT, server.conf(**changes))
            engine = stack.enter_context(settings.opened(Resources(tmp_path, tmp_path)))
            engine.announce(noise, "0/1")
            return engine

        yield make


Search = Callable[..., GeneratedRetriever]


def test_the_model_is_told_query_and_kind(server: Completions, open_search: Search) -> None:
    (useful,) = open_search().search(["who {kind} rules Avenor"], 2)
    assert [hit.text for hit in useful] == [
        f"Write 2 documents with truth for: who {{kind}} rules Avenor #{i}" for i in range(2)
    ]
    assert [(hit.title, hit.score) for hit in useful] == [("T0", 1.0), ("T1", 0.5)]
    assert all(hit.passage_id.startswith("generated:") for hit in useful)
    (noisy,) = open_search(noise=1.0).search(["q"], 2)
    assert "with noise for: q" in noisy[0].text


def test_the_same_draw_is_not_asked_twice_and_another_draw_is(server: Completions, open_search: Search) -> None:
    first = open_search()
    found = first.search(["a", "b"], 2)
    assert len(server.asked) == 2
    assert open_search().search(["a", "b"], 2) == found
    assert len(server.asked) == 2
    first.announce(0.0, "0/2")
    first.search(["a"], 2)
    assert len(server.asked) == 3


def test_a_reply_that_cannot_be_read_is_asked_for_again(server: Completions, open_search: Search) -> None:
    replies = iter(["no JSON", json.dumps({"documents": [{"title": "t", "text": "right"}]})])
    server.answer = lambda body: (200, completion(next(replies)))
    assert open_search().search(["q"], 1)[0][0].text == "right"


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("no JSON", "not_json"),
        ({"documents": []}, "found 0 documents with text, expected 1"),
        ({"documents": [{"title": "t", "text": " "}]}, "found 1 documents with text, expected 1"),
        ({"pages": []}, "wrong_schema"),
    ],
)
def test_a_query_without_a_usable_reply_is_a_failed_search(
    server: Completions, open_search: Search, reply: Any, problem: str
) -> None:
    server.answer = lambda body: (200, completion(reply))
    with pytest.raises(RetrievalError, match=f"query 'q': no usable reply in 2 attempts: .*{problem}"):
        open_search().search(["q"], 1)
    assert len(server.asked) == 2


def test_a_spent_budget_is_a_failed_search_that_names_the_file(server: Completions, open_search: Search) -> None:
    engine = open_search(max_requests=1)
    engine.search(["a"], 2)
    with pytest.raises(RetrievalError, match=r"the budget is spent: 1 of max_requests=1 of the file of conf/service/"):
        engine.search(["b"], 2)


def test_the_shipped_settings_can_be_read() -> None:
    settings = load("documents", "simulator", ROOT)
    assert isinstance(settings, EndpointDocuments)
    assert settings.chat.base_url.startswith("http://127.0.0.1")


def test_only_the_queries_without_a_usable_reply_are_asked_again(server: Completions, open_search: Search) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        is_bad = "for: b" in body["messages"][1]["content"] and "attempt 1" in body["messages"][0]["content"]
        return 200, completion("no JSON" if is_bad else documents(body))

    server.answer = answer
    found = open_search().search(["a", "b", "c"], 1)
    assert [hits[0].text[-4:] for hits in found] == ["a #0", "b #0", "c #0"]
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [({"attempts": 0}, "attempts=0: expected at least 1"), ({"prompt": "{query}"}, r"expected text with {kind}")],
)
def test_settings_out_of_bounds(server: Completions, change: dict[str, Any], message: str) -> None:
    fine = {"useful": "truth", "noisy": "noise", "attempts": 1, "prompt": PROMPT, "chat": server.conf()}
    with pytest.raises(ValueError, match=message):
        EndpointDocuments(**(fine | change))
