"""The chat server: OpenAI's client over a real socket, and the application with plays that end when they may."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tasks.server.protocol import MAX_HEAD_BYTES
from tasks.server.settings import Settings
from tasks.tool import chat_server
from tasks.tool.asking import Played
from tasks.tool.chat_app import Plays, make_app
from tasks.tool.chat_protocol import ApiError, parsed
from tasks.tool.live import Event, Found, StoppedError, Wrote
from tasks.types import Cost, Episode, Question
from tests.server.attacks import (
    H2C,
    exchange,
    get,
    reads_all_that_was_sent,
    refuses_foreign_requests,
    refuses_headers_without_end,
    sent,
)
from tests.server.running import ROOT, ServerProcess, ends_with_make
from tests.tiny import hit
from tests.tool.conftest import Learned

SECONDS = 60.0
MODEL = "train"


@pytest.fixture(scope="module")
def server(learned: Learned) -> Iterator[ServerProcess]:
    words = ["--policy", str(learned.folder), "--corpus", str(learned.corpus), "--port", "0"]
    words += ["--set", "read_timeout_s=1.5", "--set", "names=[host.docker.internal]"]
    with ServerProcess(learned.index, *words, module="tasks.tool.chat_server", cwd=Path("/")) as running:
        yield running


@pytest.fixture(scope="module")
def openai() -> Any:
    """OpenAI's library, which is installed with vLLM."""
    return pytest.importorskip("openai", reason="no build of torch for vLLM, with which OpenAI's client comes")


@pytest.fixture(scope="module")
def client(openai: Any, server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=SECONDS) as made:
        yield made


def said_by(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]


def test_the_client_of_openai_gets_an_answer(client: Any, learned: Learned) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    for question in learned.questions:
        messages: Any = [*said_by("What else?"), {"role": "assistant", "content": "x"}, *said_by(question.question)]
        made = client.chat.completions.create(model=MODEL, messages=messages, temperature=0.7, max_tokens=3)
        (choice,) = made.choices
        assert (choice.message.content, choice.finish_reason) == (question.answers[0], "stop")
        thoughts: str = choice.message.reasoning_content  # type: ignore[attr-defined]
        assert thoughts.count("\nsearch: ") + thoughts.startswith("search: ") == 2
        assert thoughts.count("\n  [1] ") == 2
        assert "answer" not in thoughts
        assert made.usage is not None
        assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens > 100


def test_a_stream_says_the_same_piece_by_piece(client: Any, learned: Learned) -> None:
    messages: Any = said_by(learned.questions[0].question)
    whole: Any = client.chat.completions.create(model=MODEL, messages=messages)
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, stream=True, stream_options=options))
    *spoken, end, usage = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    deltas: list[Any] = [chunk.choices[0].delta for chunk in spoken]
    assert (deltas[0].role, usage.choices, usage.usage) == ("assistant", [], whole.usage)
    assert [chunk.choices[0].finish_reason for chunk in (*spoken, end)] == [None] * len(spoken) + ["stop"]

    thoughts = [text for delta in deltas if (text := getattr(delta, "reasoning_content", None))]
    words = [delta.content for delta in deltas if delta.content]
    assert "".join(thoughts) == whole.choices[0].message.reasoning_content
    assert "".join(words) == whole.choices[0].message.content
    assert len(thoughts) > 20
    assert len(words) == len(learned.questions[0].answers[0].split()) > 1


def test_an_index_of_another_corpus_is_refused(
    learned: Learned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "p", "title": "T", "text": "x"}\n')
    given = ["--index", str(learned.index), "--policy", str(learned.folder), "--corpus", str(other), "--port", "0"]
    assert chat_server.main(given) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error:")
    assert "corpus" in line


def test_events_end_as_clients_expect_it(server: ServerProcess, learned: Learned) -> None:
    body = {"model": MODEL, "messages": said_by(learned.questions[0].question), "stream": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2])


def test_what_the_client_is_told_of_its_errors(openai: Any, client: Any) -> None:
    messages: Any = said_by("Who?")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt", messages=messages)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert "found 'gpt', expected 'train', the only one here" in str(unknown.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    for text, code, told in (
        ("what " * 400, "context_length_exceeded", "tokens, expected at most 200 (max_prompt_tokens of train)"),
        ("what " * 9000, "context_length_exceeded", "found 45000 characters, expected at most 16384"),
        (" ", None, "question: found nothing"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model=MODEL, messages=said_by(text), stream=stream)  # type: ignore
            assert refused.value.code == code
            assert told in str(refused.value)


def test_pages_large_bodies_and_endless_headers_are_refused(server: ServerProcess) -> None:
    refuses_foreign_requests(server.port, "/v1/models")
    refuses_headers_without_end(server.port, server.process.pid, "/v1/chat/completions")
    large = httpx.post(f"{server.url}/v1/chat/completions", content=b" " * (5 << 20), timeout=SECONDS)
    assert large.status_code == 413
    assert "expected at most 4194304" in large.json()["error"]["message"]
    nowhere = httpx.get(f"{server.url}/v1/completions", timeout=SECONDS)
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "invalid_request_error")
    slashed = httpx.post(f"{server.url}/v1/chat/completions/", json={}, timeout=SECONDS)
    assert (slashed.status_code, slashed.json()["error"]["type"]) == (404, "invalid_request_error")
    assert httpx.get(f"{server.url}/health", timeout=SECONDS).json()["model"] == MODEL


def test_what_a_server_may_ignore_costs_no_body(server: ServerProcess, learned: Learned) -> None:
    unread = json.dumps({"model": "x" * 300 + "gpt", "messages": said_by("Who?")}).encode()
    reads_all_that_was_sent(server.port, "/v1/chat/completions", unread, (404, "xgpt"))
    body = json.dumps({"model": MODEL, "messages": said_by(learned.questions[0].question)}).encode()
    status, told = sent(server.port, "/v1/chat/completions", body, H2C)
    assert (status, learned.questions[0].answers[0] in told) == (200, True)


@pytest.mark.parametrize(
    "begun",
    ["content-length: 900\r\n\r\n{", "transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", "x-half-a-header: "],
)
def test_forty_requests_without_end_keep_no_question_out(server: ServerProcess, learned: Learned, begun: str) -> None:
    path, question = "/v1/chat/completions", learned.questions[0]
    body = {"model": MODEL, "messages": said_by(question.question), "stream": True}
    with contextlib.ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(40)]
        for one in slow:
            one.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost:{server.port}\r\n{begun}".encode())
        answer = opened.enter_context(httpx.stream("POST", f"{server.url}{path}", json=body, timeout=SECONDS))
        assert answer.status_code == 200
        assert select.select(slow, [], [], 0)[0] == [], "none of them had ended"
        events = answer.read().decode().split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == question.answers[0]


def test_every_refusal_is_an_error_object(server: ServerProcess) -> None:
    """Also those of the parser and the guards, which come before any route."""
    path, own = "/v1/chat/completions", f"host: localhost:{server.port}\r\n"
    start = f"POST {path} HTTP/1.1\r\n{own}"
    for status, request in {
        403: get(server.port, "host: evil.example\r\n", path, "POST"),
        404: get(server.port, own, "/v1/completions"),
        405: get(server.port, own, path, "PUT"),
        408: exchange(server.port, f"{start}content-length: 9\r\n\r\n{{".encode()),
        413: exchange(server.port, f"{start}content-length: 5000000\r\n\r\n".encode()),
        415: exchange(server.port, f"{start}content-encoding: br\r\ncontent-length: 1\r\n\r\n{{".encode()),
        431: exchange(server.port, f"{start}x: {'a' * MAX_HEAD_BYTES}\r\n\r\n".encode()),
        400: exchange(server.port, b"nonsense\r\n\r\n"),
    }.items():
        first, _, body = request.partition(b"\r\n\r\n")
        assert first.startswith(f"HTTP/1.1 {status} ".encode()), first
        (error,) = json.JSONDecoder().raw_decode(body.decode())[0].values()
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)
    refused = httpx.post(f"{server.url}{path}?stream=true", content=body_of("a"), timeout=SECONDS).json()
    assert "address: found the parameters 'stream=true'" in refused["error"]["message"]
    assert b"HTTP/1.1 200 " in get(server.port, "host: host.docker.internal:8001\r\n"), "a name of --set names"
    unknown = get(server.port, "host: host.containers.internal:8001\r\n", path, "POST").decode()
    assert "found 'host.containers.internal:8001', expected the address of this server or a name that" in unknown
    assert "Allow a name with --set names=[NAME]" in unknown


def test_make_leaves_nothing_behind(learned: Learned) -> None:
    ends_with_make("chat-server", f"POLICY={learned.folder}", f"INDEX={learned.index}")


def test_a_wrong_policy_or_address_is_one_line(
    learned: Learned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        (["--policy", str(tmp_path)], f"error: {tmp_path}/summary.json: the file is missing."),
        (["--policy", str(learned.folder), "--host", "0.0.0.0"], "error: host=0.0.0.0: others can reach this address"),
    ):
        assert chat_server.main(["--index", str(learned.index), "--port", "0", *words]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(told)


# The request ----------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "Who?"}


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "body: no JSON"),
        (b"[" * 100_000, 400, "body: no JSON"),
        (b"\xff", 400, "body: no JSON"),
        ([], 400, "body: found a value of type list"),
        ({"messages": [USER]}, 400, "model: found nothing, expected 'm'"),
        ({"model": "x", "messages": [USER]}, 404, "model: found 'x', expected 'm'"),
        ({"model": "m"}, 400, "messages: found nothing"),
        ({"model": "m", "messages": []}, 400, "messages: found an empty list"),
        ({"model": "m", "messages": ["x"]}, 400, "messages[0]: found a value of type str"),
        ({"model": "m", "messages": [{"role": "system", "content": "x"}]}, 400, "messages: found no message whose"),
        ({"model": "m", "messages": [{"role": "user"}]}, 400, "messages[0].content: found nothing, expected text"),
        (
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content: found a part of type 'image_url', expected text",
        ),
        ({"model": "m", "messages": [USER], "stream": 1}, 400, "stream: found 1, expected true or false"),
        ({"model": "m", "messages": [USER], "stream_options": 1}, 400, "stream_options: found a value of type int"),
        ({"model": "m", "messages": [USER], "n": 2}, 400, "n: found 2, expected 1 or nothing"),
        ({"model": "m", "messages": [USER], "tools": [{}]}, 400, "tools: found [{}], expected [] or nothing"),
        (
            {"model": "m", "messages": [USER], "tool_choice": "required"},
            400,
            "tool_choice: found 'required', expected 'none' or 'auto' or nothing",
        ),
        ({"model": "m", "messages": [USER], "audio": {}}, 400, "audio: found {}, expected nothing"),
    ],
)
def test_bad_bodies(body: Any, status: int, told: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(body if isinstance(body, bytes) else json.dumps(body).encode(), "m")
    assert (refused.value.status, told in str(refused.value)) == (status, True), str(refused.value)
    assert set(refused.value.tree["error"]) == {"message", "type", "param", "code"}


def test_no_field_passes_unseen(openai: Any) -> None:
    """Every field of OpenAI's schema is read, refused or ignored, and the documents say which; no other one passes."""
    body = {"model": "m", "messages": [USER]}
    schema = openai.types.chat.completion_create_params
    streaming, base = schema.CompletionCreateParamsStreaming, schema.CompletionCreateParamsBase
    known = {*streaming.__annotations__, *base.__annotations__}
    told = (ROOT / "docs/ask.md").read_text()
    for name in sorted(known - set(body) - {"stream", "stream_options"}):
        assert f"`{name}`" in told, name
        parsed(json.dumps(body | {name: None}).encode(), "m")
        refused = f"`{name}`" in told.partition("refused (400)")[0].splitlines()[-1]
        assert refused is not (f"`{name}`" in told.partition("| ignored")[0].splitlines()[-1]), name
        with pytest.raises(ApiError) if refused else contextlib.nullcontext() as found:
            parsed(json.dumps(body | {name: {"a": 1}}).encode(), "m")
        assert not refused or found.value.tree["error"]["param"] == name
    for wrong, hint in (
        ({"strem": True}, "strem: unknown field. Did you mean stream?"),
        ({"documents": []}, "documents: unknown field. Leave it out."),
        ({"Stop": "x"}, "Stop: unknown field. Did you mean stop?"),
        ({"stream_options": {"usage": True}}, "stream_options.usage: unknown field."),
        ({"n": True}, "n: found True, expected 1 or nothing"),
    ):
        with pytest.raises(ApiError, match=re.escape(hint)):
            parsed(json.dumps(body | wrong).encode(), "m")


def test_a_body_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "n": 1, "user": "u", "stream": None}
    asked = parsed(json.dumps(body).encode(), "m")
    assert (asked.question, asked.streams, asked.includes_usage) == ("a\nb", False, False)


# The queue ------------------------------------------------------------------------------------------------------------


@dataclass
class Slow:
    """Plays until it is free to answer, or nobody wants the answer any more."""

    status: Any = "answered"
    answer: str | None = "Hask \x1b[2J"
    free: threading.Event = field(default_factory=threading.Event)
    ended: list[str] = field(default_factory=list)
    policy: Any = field(default_factory=lambda: SimpleNamespace(name="m"))
    about: str = "m searches nothing"

    def checked(self, text: str) -> Question:
        return Question("asked", "asked", "test", text, ("-",), 1)

    def ask(self, question: Question, tell: Callable[[Event], None], is_wanted: Callable[[], bool]) -> Played:
        tell(Found(("q",), ((hit("\x1b[2J", "T"),),)))
        while not self.free.is_set():
            tell(Wrote("thought", " x"))
            time.sleep(0.005)
            if not is_wanted():
                self.ended.append(f"stopped {question.question}")
                raise StoppedError
        self.ended.append(question.question)
        if self.answer == "fault":
            raise RuntimeError("a fault")
        return Played(Episode("asked", (), self.status, self.answer, "away", Cost(3, 4)), 0.1)


@contextlib.asynccontextmanager
async def running(
    asker: Slow, max_in_work: int = 2, key: str | None = None, max_reading: int = 9
) -> AsyncIterator[tuple[Any, Plays]]:
    plays = Plays(asker, max_in_work, max_reading)  # type: ignore[arg-type]
    app: Any = make_app(asker, plays, Settings(), key, 0)  # type: ignore[arg-type]
    try:
        yield app, plays
    finally:
        asker.free.set()
        plays.close()


def body_of(text: str, stream: bool = False) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}).encode()


async def call(
    app: Any, body: bytes, leave: asyncio.Event | None = None, more_body: bool = False, **headers: str
) -> tuple[int, Any, bytes]:
    """Status, headers and body of an answer; the client leaves when `leave` is set."""
    sent: list[dict[str, Any]] = []
    asked = iter([{"type": "http.request", "body": body, "more_body": more_body}])

    async def receive() -> Any:
        if (message := next(asked, None)) is not None:
            return message
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    listed = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": listed, "query_string": b"",
        "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "root_path": "",
    }  # fmt: skip
    with contextlib.suppress(RuntimeError):  # Starlette raises a fault again for the server's log.
        await app(scope, receive, send)
    if not sent:
        return 0, {}, b""
    answered = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(message["body"] for message in sent[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_play(stream: bool) -> None:
    async def session() -> None:
        asker, leave = Slow(), asyncio.Event()
        async with running(asker) as (app, plays):
            asking = asyncio.create_task(call(app, body_of("a", stream), leave))
            await until(lambda: plays.in_work == 1)
            waiting = asyncio.create_task(call(app, body_of("b", stream), leave))
            await until(lambda: plays.in_work == 2)
            leave.set()
            await asyncio.wait_for(asyncio.gather(asking, waiting), SECONDS)
            await until(lambda: plays.in_work == 0)
            assert asker.ended == ["stopped a"], "the one that waited was never begun"

    asyncio.run(session())


def test_too_many_questions_are_refused_and_the_others_are_played_in_turn() -> None:
    async def session() -> None:
        asker = Slow()
        async with running(asker) as (app, plays):
            asking = [asyncio.create_task(call(app, body_of(text))) for text in "ab"]
            await until(lambda: plays.in_work == 2)
            for stream in (False, True):
                status, headers, body = await call(app, body_of("c", stream))
                assert (status, headers["retry-after"]) == (503, "1")
                message = json.loads(body)["error"]["message"]
                assert message.startswith("2 questions are played or wait, at most 2 may.")
            asker.free.set()
            answers = await asyncio.wait_for(asyncio.gather(*asking), SECONDS)
            assert [status for status, _, _ in answers] == [200, 200]
            assert asker.ended == ["a", "b"]
            await until(lambda: plays.in_work == 0)
            plays.state = "stopping"
            assert (await call(app, body_of("d")))[0] == 503

    asyncio.run(session())


def test_slow_bodies_keep_no_question_out() -> None:
    """Forty clients that send nothing more leave room for a question; where too many are read, the next is refused."""

    async def session() -> None:
        asker = Slow()
        asker.free.set()
        async with running(asker, max_reading=41) as (app, plays):
            leave = asyncio.Event()
            slow = [asyncio.create_task(call(app, b"{", leave, more_body=True)) for _ in range(40)]
            await asyncio.sleep(0)
            assert (await call(app, body_of("a")))[0] == 200
            with plays.reading():
                status, headers, body = await call(app, body_of("b"))
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["error"]["message"] == "41 requests are read, at most 41 may be. Ask again later."
            leave.set()
            await asyncio.gather(*slow)
            assert asker.ended == ["a"]

    asyncio.run(session())


@pytest.mark.parametrize(
    ("ends", "status", "told"),
    [
        ({}, 200, '"content":"Hask \\\\x1b[2J"'),
        ({"status": "open", "answer": None}, 200, '"finish_reason":"length"'),
        ({"status": "failed", "answer": None}, 503, "a search failed: away"),
        ({"answer": "fault"}, 500, "RuntimeError: a fault of the server"),
    ],
)
def test_how_a_play_ends(ends: dict[str, Any], status: int, told: str) -> None:
    async def session() -> None:
        asker = Slow(**ends)
        asker.free.set()
        async with running(asker) as (app, _):
            found, _, body = await call(app, body_of("a"))
            assert (found, told in body.decode()) == (status, True), body
            assert b"\x1b" not in body
            found, _, body = await call(app, body_of("a", stream=True))
            assert found == 200, "a stream has begun when the play ends"
            *_, before, last, rest = body.decode().split("\n\n")
            assert (last, rest) == ("data: [DONE]", "")
            tree = json.loads(before.removeprefix("data: "))
            assert ("error" in tree) is (status != 200)
            assert r"\\x1b[2J" in body.decode()

    asyncio.run(session())


def test_a_key_is_demanded() -> None:
    async def session() -> None:
        asker = Slow()
        asker.free.set()
        async with running(asker, key="k") as (app, _):
            for headers in ({}, {"authorization": "Bearer x"}):
                status, answered, body = await call(app, body_of("a"), **headers)
                assert (status, answered["www-authenticate"]) == (401, "Bearer")
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
            assert (await call(app, body_of("a"), authorization="Bearer k"))[0] == 200

    asyncio.run(session())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(0.005)
