"""The application in this process: the wire protocol, what is refused and how, cache and batches behind it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tasks import conf, store
from tasks.retrieval.remote import PROTOCOL
from tasks.server.app import SearchService
from tasks.server.settings import Settings
from tasks.store import DataError
from tests.server.running import NumberRetriever, serving

NO_CACHE = Settings(cache_bytes=0)


def ask(index: Path, body: Any, settings: Settings = NO_CACHE, **options: Any) -> Any:
    """The response to one POST /retrieve; bytes go out as they are."""

    async def main() -> Any:
        async with serving(index, settings, **options) as (client, _):
            if isinstance(body, bytes):
                return await client.post("/retrieve", content=body)
            return await client.post("/retrieve", json=body)

    return asyncio.run(main())


async def _stored(service: SearchService, count: int) -> None:
    """Answers are stored after they are sent."""
    while len(service._cache) < count:
        await asyncio.sleep(0.001)


def test_the_answer_has_the_shape_of_search_r1s(world_index, local):
    queries = ["film directed city", "", "nowhere", "film directed city"]
    with_scores = ask(world_index, {"queries": queries, "topk": 4, "return_scores": True}).json()
    without = ask(world_index, {"queries": queries, "topk": 4}).json()
    assert set(with_scores) == set(without) == {"result"}
    for hits, scored, documents in zip(local.search(queries, 4), with_scores["result"], without["result"], strict=True):
        assert [one["score"] for one in scored] == [hit.score for hit in hits]
        assert [one["document"] for one in scored] == documents
        assert documents == [
            {"id": h.passage_id, "title": h.title, "text": h.text, "contents": f'"{h.title}"\n{h.text}'} for h in hits
        ]


def test_the_default_top_k_and_more_than_there_is(world_index, local):
    assert len(ask(world_index, {"queries": ["city"]}).json()["result"][0]) == 3
    assert len(ask(world_index, {"queries": ["city"], "topk": None}).json()["result"][0]) == 3
    everything = ask(world_index, {"queries": ["city", ""], "topk": 1000, "return_scores": True}).json()["result"]
    assert [[one["document"]["id"] for one in hits] for hits in everything] == [
        [hit.passage_id for hit in hits] for hits in local.search(["city", ""], 1000)
    ]
    assert len(everything[0]) == 276
    assert len(ask(world_index, {"queries": ["city"], "topk": 2.0}).json()["result"][0]) == 2
    assert ask(world_index, {"queries": []}).json() == {"result": []}


def test_long_and_odd_queries(world_index):
    queries = ["word " * 2000, "x" * 10_000, "\x00 \n 東京 🚢", '"); DROP TABLE Cache', " "]
    assert [len(hits) for hits in ask(world_index, {"queries": queries, "topk": 2}).json()["result"]] == [2] * 5


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"", 400, "Invalid JSON"),
        (b"{", 400, "expected a JSON object"),
        (b"\xff\xfe", 400, "Invalid JSON"),
        (b"[" * 100_000, 400, "Invalid JSON"),
        (b'{"queries": ["\\ud800"]}', 400, "Invalid JSON"),
        (b"[]", 422, "found list of length 0"),
        (b"{}", 422, "body.queries: Field required"),
        (b'{"queries": "text"}', 422, "body.queries: Input should be a valid"),
        (b'{"queries": ["a", null]}', 422, "body.queries[1]: Input should be a valid string, found None"),
        (b'{"queries": ["a"], "topk": 0}', 422, "body.topk: Input should be greater than or equal to 1, found 0"),
        (b'{"queries": ["a"], "topk": -5}', 422, "found -5"),
        (b'{"queries": ["a"], "topk": 1001}', 422, "less than or equal to 1000, found 1001"),
        (b'{"queries": ["a"], "topk": "3"}', 422, "body.topk"),
        (b'{"queries": ["a"], "topk": true}', 422, "body.topk"),
        (b'{"queries": ["a"], "topk": 1e99}', 422, "body.topk"),
        (b'{"queries": ["a"], "topk": 2.5}', 422, "body.topk"),
        (b'{"queries": ["a"], "return_scores": 1}', 422, "body.return_scores"),
        (b'{"queries": ["a"], "top_k": 5}', 422, "body.top_k: Extra inputs are not permitted, found 5"),
    ],
)
def test_malformed_requests_are_told_what_is_wrong(world_index, body, status, told):
    response = ask(world_index, body, opened=NumberRetriever())
    assert (response.status_code, told in response.json()["detail"]) == (status, True), response.text


def test_limits_of_a_request(world_index):
    limits = Settings(
        cache_bytes=0, max_queries=3, max_query_chars=10, max_top_k=5, max_hits=10, max_body_bytes=300, default_top_k=4
    )
    number = NumberRetriever()

    def told(body: Any) -> tuple[int, str]:
        response = ask(world_index, body, limits, opened=number)
        return response.status_code, response.text

    assert told({"queries": ["a", "b"], "topk": 5})[0] == 200
    assert told({"queries": ["a" * 10]})[0] == 200
    for body, words in [
        ({"queries": ["a"] * 4}, "at most 3 items"),
        ({"queries": ["a" * 11]}, "at most 10 characters, found str of length 11"),
        ({"queries": ["a"], "topk": 6}, "less than or equal to 5"),
        ({"queries": ["a", "b", "c"]}, "found topk=4 times 3 queries, expected a product of at most 10"),
    ]:
        status, text = told(body)
        assert (status, words in text) == (422, True), text
    status, text = told({"queries": ["a" * 300]})
    assert (status, "expected at most 300" in text) == (413, True), text


def test_a_failed_search_is_an_error_and_never_empty(world_index):
    broken = NumberRetriever(bad=lambda query: query == "bad")
    response = ask(world_index, {"queries": ["good", "bad"]}, opened=broken)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json() == {"detail": "the search failed: no answer to that"}

    class TooFew(NumberRetriever):
        def search(self, queries, top_k):
            return super().search(queries, top_k)[: 1 if len(queries) == 1 else -1]

    response = ask(world_index, {"queries": ["a", "b"], "topk": 1}, opened=TooFew())
    assert [hits[0]["text"] for hits in response.json()["result"]] == ["a 0", "b 0"]  # Asked again, one by one.


def test_a_fault_of_the_server_is_told_without_its_insides(world_index):
    class Faulty(NumberRetriever):
        def search(self, queries, top_k):
            if "secret" in queries:
                raise KeyError("inside")
            return super().search(queries, top_k)

    response = ask(world_index, {"queries": ["secret"]}, opened=Faulty())
    assert (response.status_code, response.json()) == (
        500,
        {"detail": "KeyError: a fault of the server; see its output"},
    )


def test_a_search_that_takes_too_long(world_index):
    settings = Settings(cache_bytes=0, request_timeout_s=0.1)
    response = ask(world_index, {"queries": ["a"]}, settings, opened=NumberRetriever(seconds=0.5))
    assert response.status_code == 504
    assert response.json() == {"detail": "1 of 1 queries had no answer within 0.1 s"}


def test_too_many_requests_at_once(world_index):
    async def main() -> list[int]:
        number = NumberRetriever()
        async with serving(world_index, Settings(cache_bytes=0, max_requests=3), number) as (client, _):
            number.free.clear()
            waiting = [asyncio.create_task(client.post("/retrieve", json={"queries": [f"q{i}"]})) for i in range(5)]
            while sum(task.done() for task in waiting) < 2:
                await asyncio.sleep(0.001)
            number.free.set()
            responses = await asyncio.gather(*waiting)
            assert all(r.headers["retry-after"] == "1" for r in responses if r.status_code == 503)
            again = await client.post("/retrieve", json={"queries": ["later"]})
            return [*sorted(r.status_code for r in responses), again.status_code]

    assert asyncio.run(main()) == [200, 200, 200, 503, 503, 200]


def test_health_tells_what_is_served(world_index, world_corpus):
    async def main() -> None:
        async with serving(world_index, NO_CACHE) as (client, service):
            told = await client.get("/health")
            assert (told.status_code, told.json()) == (
                200,
                {
                    "status": "ready",
                    "protocol": PROTOCOL,
                    "backend": "bm25",
                    "index_sha256": store.sha256(world_index / "manifest.json"),
                    "corpus_sha256": store.sha256(world_corpus),
                    "num_passages": 276,
                    "max_queries": 4096,
                    "max_hits": 20_480,
                    "max_top_k": 1000,
                },
            )
            for state in ("starting", "stopping"):
                service.state = state
                told = await client.get("/health")
                assert (told.status_code, told.json()["status"]) == (503, state)
                refused = await client.post("/retrieve", json={"queries": ["a"]})
                assert (refused.status_code, refused.json()) == (503, {"detail": f"the server is {state}"})
                assert refused.headers["retry-after"] == "1"

    asyncio.run(main())


def test_the_key(world_index):
    async def main() -> None:
        async with serving(world_index, NO_CACHE, api_key="open sesame") as (client, _):
            for headers in ({}, {"authorization": "open sesame"}, {"authorization": "Bearer open sesam"}):
                for path in ("/retrieve", "/metrics"):
                    refused = await client.request(
                        "POST" if path == "/retrieve" else "GET", path, json={"queries": ["a"]}, headers=headers
                    )
                    assert refused.status_code == 401
                    assert refused.headers["www-authenticate"] == "Bearer"
                    assert "sesame" not in refused.text
            key = {"authorization": "Bearer open sesame"}
            assert (await client.post("/retrieve", json={"queries": ["a"]}, headers=key)).status_code == 200
            assert (await client.get("/metrics", headers=key)).status_code == 200
            assert (await client.get("/health")).status_code == 200
            assert "securitySchemes" in (await client.get("/openapi.json")).text

    asyncio.run(main())


def test_other_paths_and_methods(world_index):
    async def main() -> None:
        async with serving(world_index, NO_CACHE) as (client, _):
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.post("/retrieve/", json={})).status_code == 404
            for method in ("GET", "PUT", "DELETE"):
                refused = await client.request(method, "/retrieve")
                assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
            page = await client.get("/docs")
            assert "POST /retrieve" in page.text
            assert (await client.get("/")).text == page.text
            assert "http" not in page.text  # Nothing is loaded from elsewhere.

    asyncio.run(main())


def test_a_cached_answer_is_the_same_bytes(world_index, tmp_path):
    settings = Settings(cache_folder=str(tmp_path / "cache"), cache_bytes=1 << 20)
    body = {"queries": ["film directed city", "東京", ""], "topk": 7, "return_scores": True}
    fresh = ask(world_index, body)

    async def main() -> list[Any]:
        async with serving(world_index, settings) as (client, service):
            contents = []
            for _ in range(2):
                contents.append((await client.post("/retrieve", json=body)).content)
                await _stored(service, 3)
            bare = await client.post("/retrieve", json={**body, "return_scores": False})
            assert bare.json()["result"][0][0] == json.loads(contents[0])["result"][0][0]["document"]
            return [*contents, service.metrics.misses._value.get()]

    assert asyncio.run(main()) == [fresh.content, fresh.content, 3]
    assert asyncio.run(main()) == [fresh.content, fresh.content, 0]  # After a restart.


def test_a_whole_turn_of_search_r1s_training_is_one_request(world_index):
    """512 questions with 5 rollouts each."""
    body = {"queries": [f"city {number}" for number in range(2560)], "topk": 5, "return_scores": True}
    answer = ask(world_index, body, Settings(cache_bytes=0), opened=NumberRetriever())
    assert (answer.status_code, len(answer.json()["result"])) == (200, 2560)


def test_an_answer_that_would_be_too_large_is_refused(world_index):
    settings = Settings(cache_bytes=0, max_answer_bytes=4000)
    assert ask(world_index, {"queries": ["city"], "topk": 2}, settings).status_code == 200
    refused = ask(world_index, {"queries": ["city"], "topk": 50}, settings)
    assert refused.status_code == 422
    assert refused.json()["detail"].endswith("bytes, expected at most 4000. Ask for less at once.")


@pytest.mark.parametrize(("memory_bytes", "kept"), [(1 << 20, 30), (8192, 14), (100, 0)])
def test_what_was_asked_last_is_kept_in_memory(world_index, tmp_path, memory_bytes, kept):
    settings = Settings(cache_folder=str(tmp_path / "cache"), cache_memory_bytes=memory_bytes)
    bodies = [{"queries": [f"q{number}"], "topk": 1} for number in range(30)]

    async def main() -> None:
        async with serving(world_index, settings, NumberRetriever()) as (client, service):
            first = [(await client.post("/retrieve", json=body)).content for body in bodies]
            await _stored(service, 30)
            assert len(service._recent) == kept
            service._cache = None  # Memory alone answers now.
            again = [(await client.post("/retrieve", json=body)).content for body in reversed(bodies)]
            assert again == first[::-1]
            assert service.metrics.hits._value.get() == kept

    asyncio.run(main())


def test_another_index_does_not_meet_these_answers(world_index, tmp_path, corpus_of):
    settings = Settings(cache_folder=str(tmp_path / "cache"), cache_bytes=1 << 20)
    body = {"queries": ["city"], "topk": 1}
    other = corpus_of([("Bern", "A city.")])
    first, second, again = (ask(index, body, settings).json() for index in (world_index, other, world_index))
    assert second["result"][0][0]["title"] == "Bern"
    assert first == again
    assert first != second


def test_metrics_count_what_happened(world_index, tmp_path):
    async def main() -> str:
        settings = Settings(cache_folder=str(tmp_path / "cache"))
        async with serving(world_index, settings, NumberRetriever()) as (client, service):
            for body in ({"queries": ["a", "b"]}, {"queries": ["a", "a"]}, {"queries": [3]}):
                await client.post("/retrieve", json=body)
                await _stored(service, 2)
            await client.get("/secret/path")
            return (await client.get("/metrics")).text

    text = asyncio.run(main())
    for line in (
        'search_requests_total{path="/retrieve",status="200"} 2.0',
        'search_requests_total{path="/retrieve",status="422"} 1.0',
        'search_requests_total{path="other",status="404"} 1.0',
        "search_cache_hits_total 1.0",
        "search_cache_misses_total 2.0",
        "search_batch_queries_sum 2.0",
        "search_queue_queries 0.0",
        "search_requests_in_work 0.0",
        "search_request_seconds_count 3.0",
    ):
        assert line in text, line


def test_a_torn_index_is_refused(world_index, tmp_path):
    with pytest.raises(DataError, match="no search index here"):
        ask(tmp_path, {"queries": ["a"]})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"port": 70_000}, "port=70000: expected 0 or more and 65535 or less"),
        ({"max_batch": 0}, "max_batch=0: expected a number above 0"),
        ({"cache_bytes": -1}, "cache_bytes=-1: expected 0 or more"),
        ({"default_top_k": 2000}, "default_top_k=2000: expected at most 1000"),
        ({"max_top_k": 10**6}, "max_top_k=1000000: expected at most max_hits=20480"),
        ({"max_queries": 10**6}, "max_queries=1000000: expected at most 16384"),
    ],
)
def test_settings_out_of_bounds(values, told):
    with pytest.raises(ValueError, match=told):
        conf.fill(Settings, values, "conf/server/mine.yaml")
