"""The application: `POST /retrieve`, `/health`, `/metrics`, `/docs` and `/openapi.json` over one opened index.

Request and answer of `/retrieve` are those of Search-R1's `search_r1/search/retrieval_server.py`, with two
differences: unknown fields are refused (422) instead of ignored, so that a misspelt `top_k` cannot pass as the
default, and a document has `title` and `text` beside the `contents` that Search-R1's client reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cachetools import LRUCache
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from tasks import conf, store
from tasks.retrieval import RetrievalError, Retriever, open_retriever
from tasks.retrieval import manifest as manifests
from tasks.retrieval.remote import INDEX_HEADER, PROTOCOL, contents
from tasks.server.batching import OF_A_QUERY, Batcher, QueueFullError
from tasks.server.cache import AnswerCache
from tasks.server.guard import Guard, RefusedError, require_no_parameters
from tasks.server.metrics import Metrics
from tasks.server.page import docs_page
from tasks.server.settings import Settings
from tasks.types import Hit

State = Literal["starting", "ready", "stopping"]
_JSON = "application/json"
_READS_AT_ONCE = 32
_LOOK_S = 0.02
_ENTRY_BYTES = 512  # Memory of an entry besides its answer: a key, two objects and their places in two dictionaries.
_MAX_SHOWN = 80
_MAX_ERRORS = 3
_DESCRIPTION = (
    "The best passages of one index for each query, best first. Request and answer as in Search-R1's retrieval server."
)


class Document(BaseModel):
    """A passage; `contents` is `"title"`, a line break and `text`."""

    id: str
    title: str
    text: str
    contents: str


class ScoredDocument(BaseModel):
    """A passage and its score; a higher one is better."""

    document: Document
    score: float


class Answer(BaseModel):
    """One list per query, in the order of the queries; passages have scores if the request wants them."""

    result: list[list[ScoredDocument]] | list[list[Document]]


class Problem(BaseModel):
    """Every error: what was found and what was expected."""

    detail: str


class Health(BaseModel):
    """The index that is served and the limits of a request; fields of the index are null until it is open."""

    status: State
    protocol: int
    max_queries: int
    max_hits: int
    max_top_k: int
    backend: str | None = None
    index_sha256: str | None = None
    corpus_sha256: str | None = None
    num_passages: int | None = None


class SearchService:
    """One index with its batcher and its cache.

    Attributes:
        state: requests are answered when it is `ready`.
        failure: the error of opening the index, None without one.
        health: the content of `/health`.
    """

    def __init__(
        self,
        index_dir: Path,
        settings: Settings,
        corpus: Path | None = None,
        on_change: Callable[[SearchService], None] = lambda service: None,
        opened: Retriever | None = None,
    ) -> None:
        """Prepare the service; `start` opens the index.

        Args:
            index_dir: a folder made by `tasks.retrieval.build`.
            settings: limits and sizes.
            corpus: when given, must be the corpus the index was built from.
            on_change: called when the index is open, and when that failed.
            opened: a retriever that is used instead of opening `index_dir`, whose manifest is still read.
        """
        self.state: State = "starting"
        self.failure: Exception | None = None
        self.health = Health(
            status="starting",
            protocol=PROTOCOL,
            max_queries=settings.max_queries,
            max_hits=settings.max_hits,
            max_top_k=settings.max_top_k,
        )
        self.metrics = Metrics()
        self._index_dir, self._corpus, self._settings = index_dir, corpus, settings
        self._on_change, self._opened = on_change, opened
        self._batcher: Batcher | None = None
        self._cache: AnswerCache | None = None
        memory_bytes = settings.cache_memory_bytes if settings.cache_bytes else 0
        self._recent: LRUCache[str, bytes] = LRUCache(memory_bytes, getsizeof=_stored_bytes)

    def start(self) -> None:
        """Open the index in a thread of its own; call from the event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._open, args=(loop,), name="open index", daemon=True).start()

    async def opened(self) -> None:
        """Wait until the index is open, cannot be opened, or the server stops."""
        while self.state == "starting" and self.failure is None:
            await asyncio.sleep(_LOOK_S)

    def stop(self) -> None:
        """End the search thread; the server calls this after its last request."""
        self.state = "stopping"
        if self._batcher is not None:
            self._batcher.stop(self._settings.stop_timeout_s)
        if self._cache is not None:
            self._cache.close()

    async def answers(self, queries: Sequence[str], top_k: int) -> list[bytes]:
        """The encoded hits of each query, from the cache or from a search.

        Raises:
            RefusedError: 422 if a query is refused, 503 if too many wait or the search fails, 504 if it takes too long.
        """
        assert self._batcher is not None
        keys = {query: self._key(query, top_k) for query in queries}
        found = {query: answer for query, key in keys.items() if (answer := self._recent.get(key)) is not None}
        if self._cache is not None:
            for number, query in enumerate([query for query in keys if query not in found], 1):
                if (answer := self._cache.get(keys[query])) is not None:
                    found[query] = answer
                    self._keep(keys[query], answer)
                # Yield to the event loop: other requests must not wait for many reads.
                if number % _READS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        self.metrics.hits.inc(len(found))
        missing = [query for query in keys if query not in found]
        self.metrics.misses.inc(len(missing))
        try:
            await self.admit(missing)
            searched = await self._batcher.ask(missing, top_k, self._settings.request_timeout_s)
        except QueueFullError as error:
            raise RefusedError(503, str(error)) from None
        except TimeoutError as error:
            raise RefusedError(504, str(error)) from None
        except OF_A_QUERY as error:
            raise RefusedError(422, f"body.queries: {error}") from None
        except RetrievalError as error:
            raise RefusedError(503, f"the search failed: {error}") from error
        for query, answer in zip(missing, searched, strict=True):
            found[query] = answer
            self._keep(keys[query], answer)
        return [found[query] for query in queries]

    async def admit(self, queries: Sequence[str]) -> None:
        """Refuse what cannot be searched before it waits among the queries of others.

        Raises:
            QueryError: one of them cannot be.
        """

    def measure(self) -> bytes:
        """The metrics in Prometheus' format."""
        self._measure_queue()
        return self.metrics.text()

    def load(self) -> tuple[Retriever, dict[str, Any]]:
        """What answers the searches, and what `/health` says of it; called once, in a thread of its own."""
        retriever = self._opened or open_retriever(self._index_dir, self._corpus, self._settings.num_threads)
        manifest = manifests.read(self._index_dir)
        return retriever, {
            "backend": manifest.backend,
            "index_sha256": store.sha256(self._index_dir / manifests.NAME),
            "corpus_sha256": manifest.corpus_sha256,
            "num_passages": manifest.num_passages,
        }

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        result: tuple[Retriever, Health] | Exception
        try:
            retriever, served = self.load()
            health = self.health.model_copy(update=served)
            first = retriever.search([""], 1)[0][0]
            # Libraries load and compile now instead of in the first request.
            retriever.search([first.text[: self._settings.max_query_chars]], 1)
            if self._settings.cache_bytes:
                self._cache = AnswerCache(conf.ROOT / self._settings.cache_folder, self._settings.cache_bytes)
            result = (retriever, health)
        except Exception as error:
            result = error
        with contextlib.suppress(RuntimeError):  # The event loop has ended in the meantime.
            loop.call_soon_threadsafe(self._take, result)

    def _take(self, result: tuple[Retriever, Health] | Exception) -> None:
        if self.state != "starting":
            return
        if isinstance(result, Exception):
            self.failure = result
        else:
            retriever, self.health = result
            settings = self._settings
            self._batcher = Batcher(
                retriever.search,
                encode_hits,
                settings.max_batch,
                settings.max_wait_ms / 1000,
                settings.max_queue,
                self._after_batch,
            )
            self._batcher.start()
            self.state = "ready"
        self._on_change(self)

    def _after_batch(self, size: int, top_k: int, queries: list[str], answers: list[bytes]) -> None:
        self.metrics.batch.observe(size)
        self._measure_queue()  # Also now, because the metrics may be asked of another process.
        if self._cache is not None:
            self._cache.put({self._key(q, top_k): answer for q, answer in zip(queries, answers, strict=True)})

    def _measure_queue(self) -> None:
        self.metrics.queue.set(0 if self._batcher is None else self._batcher.queued)
        self.metrics.drops.set(0 if self._cache is None else self._cache.num_drops)

    def _keep(self, key: str, answer: bytes) -> None:
        with contextlib.suppress(ValueError):  # An answer larger than the whole cache.
            self._recent[key] = answer

    def _key(self, query: str, top_k: int) -> str:
        return hashlib.sha256(json.dumps([self.health.index_sha256, query, top_k]).encode()).hexdigest()


def make_app(service: SearchService, settings: Settings, api_key: str | None = None, is_alone: bool = True) -> Guard:
    """The ASGI application of a service, guarded; `api_key` None lets everybody in.

    If it `is_alone`, it starts at once and answers that the index is being opened. Otherwise its start waits for the
    index, because other processes answer meanwhile.
    """
    model, has_key = _request_model(settings), api_key is not None
    measured: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    if has_key:
        measured[401] = {"model": Problem, "description": "No key, or another one"}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        if not is_alone:
            await service.opened()
        yield
        service.stop()

    app = FastAPI(
        title="Breadcrumb search",
        version=str(PROTOCOL),
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/openapi.json",
    )

    @app.post("/retrieve", responses=_responses(has_key), openapi_extra=_request_body(model, has_key))
    async def retrieve(request: Request) -> Response:
        """The `topk` best passages for each query, at most all there are; `topk` null takes the server's default."""
        require_no_parameters(request.scope)
        wanted: Any = _parse(model, await request.body())
        top_k = settings.default_top_k if wanted.topk is None else wanted.topk
        if top_k * len(wanted.queries) > settings.max_hits:
            found = f"topk={top_k} times {len(wanted.queries)} queries"
            raise RefusedError(422, f"body: found {found}, expected a product of at most {settings.max_hits}")
        answers = await service.answers(wanted.queries, top_k)
        if (size := sum(map(len, answers))) > settings.max_answer_bytes:
            limit = settings.max_answer_bytes
            raise RefusedError(
                422, f"body: the answer has {size} bytes, expected at most {limit}. Ask for less at once."
            )
        headers = {INDEX_HEADER: str(service.health.index_sha256)}
        return Response(render(answers, wanted.return_scores), media_type=_JSON, headers=headers)

    @app.get("/health", response_model=Health, responses={503: {"model": Health, "description": "Not ready"}})
    async def health() -> Response:
        """What is served; 503 while the index is being opened and while the server stops."""
        content = service.health.model_copy(update={"status": service.state})
        return JSONResponse(content.model_dump(), 200 if service.state == "ready" else 503)

    @app.get("/metrics", responses=measured, response_class=Response, openapi_extra=_security(has_key))
    async def metrics() -> Response:
        """Requests, seconds, batch sizes, cache hits, queue length and memory, for Prometheus."""
        return Response(service.measure(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    _tell_errors(app)
    if api_key is not None:
        app.openapi().setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return Guard(app, settings, service.metrics, api_key, lambda: service.state)


def _tell_errors(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def tell_refusal(request: Request, refused: RefusedError) -> JSONResponse:
        return JSONResponse({"detail": str(refused)}, refused.status, refused.headers)

    @app.exception_handler(Exception)
    async def tell_fault(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"{type(error).__name__}: a fault of the server; see its output"}, 500)


def _stored_bytes(answer: bytes) -> int:
    return len(answer) + _ENTRY_BYTES


def encode_hits(hits: Sequence[Hit]) -> bytes:
    """One query's hits as lines of JSON: a document, its score, the next document and so on.

    With lines, answers with and without scores can be put together without parsing. The shortest spelling of a float
    reads back as the same float.
    """
    lines = []
    for hit in hits:
        document = {
            "id": hit.passage_id,
            "title": hit.title,
            "text": hit.text,
            "contents": contents(hit.title, hit.text),
        }
        lines.append(json.dumps(document, ensure_ascii=False, separators=(",", ":")))
        lines.append(json.dumps(hit.score, allow_nan=False))
    return "\n".join(lines).encode()


def render(answers: Sequence[bytes], return_scores: bool) -> bytes:
    r"""The body of an answer, put together from encoded hits.

    >>> from tasks.types import Hit
    >>> render([encode_hits([Hit("p", 0.5, "T", "x")])], True)
    b'{"result":[[{"document":{"id":"p","title":"T","text":"x","contents":"\\"T\\"\\nx"},"score":0.5}]]}'
    """
    results = []
    for answer in answers:
        lines = answer.split(b"\n")
        documents, scores = lines[0::2], lines[1::2]
        if return_scores:
            documents = [b'{"document":%b,"score":%b}' % pair for pair in zip(documents, scores, strict=True)]
        results.append(b"[%b]" % b",".join(documents))
    return b'{"result":[%b]}' % b",".join(results)


def _request_model(settings: Settings) -> type[BaseModel]:
    """The schema of a request with this server's limits, so that the description at `/docs` states them."""
    query = Annotated[str, Field(max_length=settings.max_query_chars)]
    return create_model(
        "RetrieveRequest",
        __config__=ConfigDict(extra="forbid", strict=True),
        queries=(Annotated[list[query], Field(max_length=settings.max_queries)], ...),  # type: ignore[valid-type]
        topk=(Annotated[int, Field(ge=1, le=settings.max_top_k), BeforeValidator(_whole)] | None, None),
        return_scores=(bool, False),
    )


def _whole(value: Any) -> Any:
    """2.0 as 2, because JSON has only one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _request_body(model: type[BaseModel], key: bool) -> dict[str, Any]:
    body = {"required": True, "content": {_JSON: {"schema": model.model_json_schema()}}}
    return {"requestBody": body, **_security(key)}


def _security(key: bool) -> dict[str, Any]:
    return {"security": [{"key": []}]} if key else {}


def _responses(key: bool) -> dict[int | str, dict[str, Any]]:
    told = {
        400: "Not JSON, or parameters in the address",
        408: "The body came too slowly",
        413: "The body is too large",
        415: "The body is compressed, or no UTF-8 by its headers",
        422: "JSON, but not a request: unknown field, wrong type or over a limit",
        500: "A fault of the server",
        503: "Starting, stopping, too much in work, or the search failed; try again after Retry-After seconds",
        504: "The search took too long",
    }
    if key:
        told[401] = "No key, or another one"
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem, "description": text} for status, text in sorted(told.items())
    }
    return {200: {"model": Answer, "description": "The passages"}, **refusals}


def _parse(model: type[BaseModel], body: bytes) -> BaseModel:
    """The request in a body.

    Raises:
        RefusedError: 400 if the body is no JSON, 422 if it is JSON of another schema.
    """
    try:
        wanted = model.model_validate_json(body)
        store.loads(body)  # Pydantic takes the last of two equal keys in silence.
        return wanted
    except ValidationError as error:
        told = []
        for one in error.errors(include_url=False, include_context=False)[:_MAX_ERRORS]:
            if one["type"] == "json_invalid":
                raise RefusedError(400, f"body: {one['msg']}; expected a JSON object") from None
            place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"])
            told.append(f"body{place:.{_MAX_SHOWN}}: {one['msg']}, found {_shown(one['input'])}")
        raise RefusedError(422, "; ".join(told)) from None
    except (ValueError, RecursionError) as error:
        raise RefusedError(422, f"body: {error}; expected each key once") from None


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, str | list | dict) else f"{type(value).__name__} of length {len(value)}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
