"""The application of the chat server: `POST /v1/chat/completions`, `GET /v1/models` and `/health`.

One question is played at a time, in a thread of its own; the others wait for their turn, and one that finds too many
waiting is refused (503 with Retry-After). A play ends with its next token once its client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tasks.server.guard import RETRY_AFTER_S, GoneError, RefusedError, check_key, read_body, require_no_parameters
from tasks.server.origins import Message, Receive, Send
from tasks.server.settings import Settings
from tasks.tool.asking import Asker, Played
from tasks.tool.chat_protocol import ApiError, ChatRequest, Completion, parsed, unknown_model
from tasks.tool.live import Part
from tasks.tool.questions import QuestionError
from tasks.tool.script import Script, harmless
from tasks.tool.turns import BusyError, Turns
from tasks.types import Question

_GONE = 499  # The status that web servers log for a client that has left; there is nobody to answer.
_THOUGHTS: tuple[Part, ...] = ("thought", "search", "evidence")
Scope = Message


class Plays:
    """The plays of one asker, one after another.

    Attributes:
        in_work: questions that are played or wait for their turn.
        state: `ready` or `stopping`; the second takes no further question.
    """

    def __init__(self, asker: Asker, max_in_work: int, max_reading: int) -> None:
        """Prepare the thread.

        Args:
            asker: plays.
            max_in_work: questions that are played or wait.
            max_reading: requests whose bodies are read at once; many more, so that slow ones keep no question out.
        """
        self.state = "ready"
        self._asker, self._turns, self._max_reading = asker, Turns(max_in_work), max_reading
        self._reading = 0

    @property
    def in_work(self) -> int:
        """See the class."""
        return self._turns.in_work

    def close(self) -> None:
        """Play nothing more."""
        self._turns.close()

    @contextlib.asynccontextmanager
    async def begun(self, question: Question) -> AsyncIterator[AsyncIterator[str | Played]]:
        """What a play says, piece by piece, and at last its record; the end of the block ends the play.

        Raises:
            ApiError: 503, the server stops or too many wait already.
        """
        self._require_room()
        loop, said = asyncio.get_running_loop(), asyncio.Queue[str | Played | Exception]()
        script = Script(shows=_THOUGHTS)

        def tell(item: str | Played | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # The event loop has ended in the meantime.
                loop.call_soon_threadsafe(said.put_nowait, item)

        def play(is_wanted: Callable[[], bool]) -> None:
            try:
                played = self._asker.ask(question, lambda event: tell(script.text(event)), is_wanted)
                tell(script.end())
                tell(played)
            except Exception as error:
                tell(error)

        with self._turns.begun(play):
            yield _items(said)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Room for the body of one request.

        Raises:
            ApiError: 503, as `begun`.
        """
        self._require_room()
        if self._reading >= self._max_reading:
            raise _busy(f"{self._reading} requests are read, at most {self._max_reading} may be. Ask again later.")
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    def _require_room(self) -> None:
        if self.state != "ready":
            raise _busy(f"the server is {self.state}")
        try:
            self._turns.require_room()
        except BusyError as error:
            raise _busy(str(error)) from None


def _busy(message: str) -> ApiError:
    return ApiError(503, message, retry_after=str(RETRY_AFTER_S))


async def _items(said: asyncio.Queue[str | Played | Exception]) -> AsyncIterator[str | Played]:
    while True:
        item = await said.get()
        if isinstance(item, Exception):
            raise item
        if item:
            yield item
        if isinstance(item, Played):
            return


def make_app(asker: Asker, plays: Plays, settings: Settings, api_key: str | None, created: int) -> Starlette:
    """The ASGI application.

    Args:
        asker: answers.
        plays: its plays.
        settings: limits.
        api_key: what clients must send; None lets everybody in.
        created: when the policy was made, in seconds of the epoch.
    """
    name = asker.policy.name
    model = {"id": name, "object": "model", "created": created, "owned_by": "breadcrumb"}

    async def chat(request: Request) -> Response:
        check_key(request.scope, api_key)
        require_no_parameters(request.scope)
        with plays.reading():
            body = await read_body(request.scope, request.receive, settings)
        wanted = parsed(body, name)
        question = _checked(asker, wanted.question, settings.max_query_chars)
        return _Answer(plays, question, wanted, Completion(name))

    async def models(request: Request) -> Response:
        check_key(request.scope, api_key)
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        check_key(request.scope, api_key)
        if (asked := request.path_params["name"]) != name:
            raise unknown_model(asked, name)
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        told = {"status": plays.state, "model": name, "in_work": plays.in_work, "about": asker.about}
        return JSONResponse(told, 200 if plays.state == "ready" else 503)

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name}", one_model),
        Route("/health", health),
    ]
    handlers: dict[Any, Callable[..., Any]] = dict.fromkeys((ApiError, RefusedError, HTTPException, GoneError), _refuse)
    app = Starlette(routes=routes, exception_handlers={**handlers, Exception: _fault})
    app.router.redirect_slashes = False  # A redirect is no answer to a client that sends a body.
    return app


def _checked(asker: Asker, text: str, max_chars: int) -> Question:
    if len(text) > max_chars:
        message = f"question: found {len(text)} characters, expected at most {max_chars}."
        raise ApiError(400, message, "messages", "context_length_exceeded")
    try:
        return asker.checked(text)
    except QuestionError as error:
        code = "context_length_exceeded" if error.is_too_long else None
        raise ApiError(400, str(error), "messages", code) from None


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, GoneError):
        return Response(status_code=_GONE)
    if isinstance(error, HTTPException):  # No such route, or not with this method.
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    if isinstance(error, RefusedError):
        code = "invalid_api_key" if error.status == 401 else None
        error = ApiError(error.status, f"{error}.", code=code, **error.headers)
    assert isinstance(error, ApiError)
    return JSONResponse(error.tree, error.status, error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    return JSONResponse(_of_play(error).tree, 500)


def _of_play(error: Exception) -> ApiError:
    """The error of a play, for its client; what is no error of a client is seen in the server's output."""
    if isinstance(error, ApiError):
        return error
    return ApiError(500, f"{type(error).__name__}: a fault of the server; see its output.")


class _Answer(Response):
    """Plays the question and sends what it gives, as one object or as server-sent events."""

    def __init__(self, plays: Plays, question: Question, wanted: ChatRequest, completion: Completion) -> None:
        super().__init__()
        self._plays, self._question, self._wanted, self._completion = plays, question, wanted, completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until the client leaves."""
        answering = asyncio.ensure_future(self._streamed(send) if self._wanted.streams else self._whole(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering

    async def _whole(self, send: Send) -> None:
        async with self._plays.begun(self._question) as items:
            thoughts = ""
            async for item in items:
                if isinstance(item, str):
                    thoughts += item
                else:
                    answer = _require_played(item)
                    await self._send(send, JSONResponse(self._completion.whole(item, thoughts, answer)))

    async def _send(self, send: Send, response: Response) -> None:
        headers = response.raw_headers
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _streamed(self, send: Send) -> None:
        async with self._plays.begun(self._question) as items:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_event(self._completion.chunk(role="assistant", content="")))
            fault = None
            try:
                async for item in items:
                    await self._send_chunks(send, item)
            except Exception as error:
                await send(_event(_of_play(error).tree))
                fault = None if isinstance(error, ApiError) else error
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            if fault is not None:
                raise fault  # For the server's output.

    async def _send_chunks(self, send: Send, item: str | Played) -> None:
        if isinstance(item, str):
            await send(_event(self._completion.chunk(reasoning_content=item)))
            return
        for chunk in self._completion.last(item, _require_played(item), self._wanted.includes_usage):
            await send(_event(chunk))


def _require_played(played: Played) -> str:
    """The answer of a play, empty without one.

    Raises:
        ApiError: 503, a search failed.
    """
    if played.episode.status == "failed":
        raise _busy(f"{played.outcome}. Ask again later.")
    return harmless(played.episode.answer or "")


def _event(tree: dict[str, Any]) -> Message:
    data = json.dumps(tree, ensure_ascii=False)
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
