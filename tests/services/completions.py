"""A real HTTP server on this machine that speaks the chat-completions protocol and answers as told."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tasks.services.endpoint import Endpoint

KEY = "tk-7f3a-never-shown"
KEY_VARIABLE = "AUGMENT_TEST_KEY"
PROMPT = "Q: {question}\nA: {answer}\nHops:\n{hops}\nQueries: {num_queries}\n"

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, body (JSON-ready, or bytes as they are; None ends the connection without a word), headers."""


class Completions:
    """The server; `answer` gets a request's body and may be replaced."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = lambda body: (200, completion(good(body)))
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer.lock:
                    outer.asked.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
                    outer.in_flight += 1
                    outer.most_in_flight = max(outer.most_in_flight, outer.in_flight)
                try:
                    status, tree, *more = outer.answer(body)
                finally:
                    with outer.lock:
                        outer.in_flight -= 1
                if tree is None:
                    self.close_connection = True
                    return
                data = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **(more[0] if more else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # A client that leaves is part of these tests.

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def conf(self, **changes: Any) -> Endpoint:
        """Settings for this server, quick and without a key unless told otherwise."""
        values: dict[str, Any] = {
            "base_url": self.url, "model": "writer-1", "key_variable": "", "request": {"seed": 1},
            "max_in_flight": 3, "timeout_s": 20.0, "retries": 2, "backoff_s": 0.001, "max_backoff_s": 0.002,
            "max_retry_after_s": 5.0, "max_refused_in_a_row": 3, "max_requests": 1000, "max_total_tokens": 100_000,
        }  # fmt: skip
        return Endpoint(**values | changes)


@contextmanager
def serving() -> Iterator[Completions]:
    """The server, while the block runs."""
    server = Completions()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


def hops_in(body: dict[str, Any]) -> list[tuple[str, str]]:
    """The resolved (question, answer) pairs that stand in a request."""
    prompt = body["messages"][0]["content"]
    return re.findall(r"(?m)^\d+\. (.*) -> (.*)$", prompt)


def good(body: dict[str, Any]) -> dict[str, Any]:
    """A coherent reply: every hop in other words, with two queries."""
    hops = [
        {
            "hop": i,
            "question": f"Tell me: {question}",
            "answer": answer,
            "queries": [f"{question} ?", f"find {question}"],
        }
        for i, (question, answer) in enumerate(hops_in(body), 1)
    ]
    return {"hops": hops}


def completion(content: Any, tokens: int | None = 50, finish_reason: str = "stop") -> dict[str, Any]:
    """A chat completion around `content`, which is spelt as JSON unless it is text or None."""
    text = content if isinstance(content, str) or content is None else json.dumps(content)
    usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}], **usage}
