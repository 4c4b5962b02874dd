"""A server of the shape of Search-R1's `retrieval_server.py`: what ours is measured against.

Same framework, same index, same engine; a handler per request that FastAPI runs in its pool of 40 threads, one
query after the other, no batches over requests, no cache, no limits. Written anew from the shape of the original.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from tasks.retrieval import Retriever, open_retriever
from tasks.retrieval.remote import contents


class QueryRequest(BaseModel):
    """The original's request."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def make_app(retriever: Retriever, default_top_k: int = 3) -> FastAPI:
    """`POST /retrieve` over a retriever."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: QueryRequest) -> dict[str, Any]:
        results = []
        for query in request.queries:
            (hits,) = retriever.search([query], request.topk or default_top_k)
            documents = [{"id": hit.passage_id, "contents": contents(hit.title, hit.text)} for hit in hits]
            if request.return_scores:
                results.append([{"document": d, "score": h.score} for d, h in zip(documents, hits, strict=True)])
            else:
                results.append(documents)
        return {"result": results}

    return app


def main() -> None:
    """Serve `--index` on a free port."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--index", type=Path, required=True)
    retriever = open_retriever(parser.parse_args().index)
    retriever.search(["the city"], 1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        print(f"ready: http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        server = uvicorn.Server(uvicorn.Config(make_app(retriever), log_level="warning", access_log=False))
        server.run(sockets=[listener])


if __name__ == "__main__":
    main()
