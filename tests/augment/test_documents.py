"""The simulator that asks a model, against a real server: documents, noise, faults, budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import conf
from tasks.augment.documents import EndpointWriter
from tasks.augment.endpoint import Endpoint
from tasks.augment.settings import SimulatorConf
from tasks.retrieval import RetrievalError
from tasks.retrieval.generated import GeneratedRetriever
from tests.augment.completions import Completions, completion, serving

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


def search(server: Completions, cache: Path, noise: float = 0.0, **changes: Any) -> GeneratedRetriever:
    settings = SimulatorConf(server.conf(prompt=PROMPT, **changes), "truth", "noise", attempts=2)
    writer = EndpointWriter(Endpoint(settings.endpoint, cache, "conf/simulator/endpoint.yaml"), settings)
    return GeneratedRetriever(writer, noise=noise, seed="0/1")


def test_the_model_is_told_query_and_kind(server: Completions, tmp_path: Path) -> None:
    (useful,) = search(server, tmp_path).search(["who {kind} rules Avenor"], 2)
    assert [hit.text for hit in useful] == [
        f"Write 2 documents with truth for: who {{kind}} rules Avenor #{i}" for i in range(2)
    ]
    assert [(hit.title, hit.score) for hit in useful] == [("T0", 1.0), ("T1", 0.5)]
    assert all(hit.passage_id.startswith("generated:") for hit in useful)
    (noisy,) = search(server, tmp_path, noise=1.0).search(["q"], 2)
    assert "with noise for: q" in noisy[0].text


def test_the_same_draw_is_not_asked_twice_and_another_draw_is(server: Completions, tmp_path: Path) -> None:
    first = search(server, tmp_path)
    found = first.search(["a", "b"], 2)
    assert len(server.asked) == 2
    assert search(server, tmp_path).search(["a", "b"], 2) == found
    assert len(server.asked) == 2
    first.seed = "0/2"
    first.search(["a"], 2)
    assert len(server.asked) == 3


def test_a_reply_that_cannot_be_read_is_asked_for_again(server: Completions, tmp_path: Path) -> None:
    replies = iter(["no JSON", json.dumps({"documents": [{"title": "t", "text": "right"}]})])
    server.answer = lambda body: (200, completion(next(replies)))
    assert search(server, tmp_path).search(["q"], 1)[0][0].text == "right"


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
    server: Completions, tmp_path: Path, reply: Any, problem: str
) -> None:
    server.answer = lambda body: (200, completion(reply))
    with pytest.raises(RetrievalError, match=f"query 'q': no usable reply in 2 attempts: .*{problem}"):
        search(server, tmp_path).search(["q"], 1)
    assert len(server.asked) == 2


def test_a_spent_budget_is_a_failed_search_that_names_the_file(server: Completions, tmp_path: Path) -> None:
    engine = search(server, tmp_path, max_requests=1)
    engine.search(["a"], 2)
    with pytest.raises(RetrievalError, match=r"the budget is spent: 1 of max_requests=1 of conf/simulator/endpoint"):
        engine.search(["b"], 2)


def test_the_shipped_settings_can_be_read() -> None:
    settings = conf.load(SimulatorConf, "simulator", "endpoint", root=ROOT)
    assert settings.endpoint.base_url.startswith("http://127.0.0.1")
