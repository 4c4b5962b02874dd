"""`python -m tasks.reward_model --model pica --seed 0`: serve a trained reward model until SIGTERM or Ctrl-C.

It answers chat completions, one trajectory a request (`tasks/reward_model/wire.py`), on the loopback address unless
`--host` names another one: it asks for no key, so only a network that is trusted may reach it. A request must name the
model with the hash of its weights, as the server prints it, so that nobody gets scores of another one.
`conf/service/remote_pica.yaml` asks it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tasks import parts, trained
from tasks.reward_model import wire
from tasks.reward_model.card import read_card
from tasks.server.settings import port
from tasks.services import Head, Resources, RewardModel

PATH = "/v1/chat/completions"
MAX_BYTES = 16 << 20


def main(words: list[str] | None = None) -> int:
    """Read the command line and serve; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tasks.reward_model", description="Serve a trained reward model.")
    parser.add_argument("--model", required=True, help="name of a file of conf/reward_model")
    parser.add_argument("--seed", type=int, required=True, help="which of its seeds")
    parser.add_argument("--port", type=port, default=8001, help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; without a key, so in a trusted network"
    )
    given = parser.parse_args(words)
    try:
        return _serve(given.model, given.seed, given.host, given.port)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1


def _serve(model: str, seed: int, host: str, port: int) -> int:
    root = Path.cwd()
    models = trained.find(root, [model], seed)
    head = read_card(root / models[model].folder).head
    kind = parts.make("services", {"kind": "reward_model", "model": model, "head": head}, "--model")
    with kind.opened(Resources(root, root, models=models)) as opened:
        name = f"{model}-{seed}@{models[model].sha256[:16]}"
        with ThreadingHTTPServer((host, port), handler(opened, name, head)) as server:
            signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
            print(f"ready: model {name} at http://{host}:{server.server_port}/v1. Ctrl-C ends it.", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
    return 0


def handler(opened: RewardModel, name: str, head: Head) -> type[BaseHTTPRequestHandler]:
    """What answers requests for this model with its numbers and their meaning; scores one trajectory at a time."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = self.headers.get("content-length", "")
            if self.path != PATH or not size.isdecimal() or int(size) > MAX_BYTES:
                self.close_connection = True
                return self._send(404, {"error": {"message": f"expected POST {PATH} of at most {MAX_BYTES} bytes"}})
            try:
                content = _content(self.rfile.read(int(size)), name)
                played, question = wire.play(content)
                with lock:
                    (found,) = opened.probabilities([played], [question])
            except (ValueError, RecursionError) as error:
                return self._send(400, {"error": {"message": str(error)[:300]}})
            message = {"role": "assistant", "content": wire.answer(found, head)}
            return self._send(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

        def _send(self, status: int, tree: Any) -> None:
            data = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Requests hold texts of a run, which belong in no log."""

    return Handler


def _content(data: bytes, name: str) -> str:
    """The text of the one message of a request for this model.

    Raises:
        ValueError: no such request, or one for another model.
    """
    tree = json.loads(data)
    if not isinstance(tree, dict) or tree.get("model") != name:
        asked = tree.get("model") if isinstance(tree, dict) else tree
        raise ValueError(f"found model {str(asked)[:80]!r}, expected {name!r}, which this server has")
    match tree.get("messages"):
        case [{"content": str(content)}]:
            return content
    raise ValueError("expected one message with the text of a trajectory")


if __name__ == "__main__":
    raise SystemExit(main())
