"""`python -m tasks.reward_model --model pica --seed 0`: serve a trained reward model until SIGTERM or Ctrl-C.

It answers chat completions, one trajectory a request (`tasks/reward_model/wire.py`), on the loopback address unless
`--host` names another one: it asks for no key, so only a network that is trusted may reach it. A request must name the
model with the hash of its weights, as the server prints it, so that nobody gets scores of another one.
`conf/service/remote_pica.yaml` asks it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace

from tasks import conf, parts, program, trained
from tasks.reward_model import wire
from tasks.reward_model.card import read_card
from tasks.server.__main__ import add_settings, address_of, settings_of
from tasks.server.guard import GoneError, RefusedError, answer, read_body
from tasks.server.listening import Server, listening
from tasks.server.origins import App, Message, Receive, Send
from tasks.server.problems import error_object
from tasks.server.settings import Settings, port
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
    add_settings(parser)
    given = parser.parse_args(words)
    try:
        return _serve(given.model, given.seed, replace(settings_of(given), max_body_bytes=MAX_BYTES))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1


def _serve(model: str, seed: int, settings: Settings) -> int:
    root = conf.ROOT.resolve()
    with listening(settings) as listener:
        models = trained.find(root, [model], seed)
        head = read_card(root / models[model].folder).head
        kind = parts.make("services", {"kind": "reward_model", "model": model, "head": head}, "--model")
        with kind.opened(Resources(root, root, models=models)) as opened:
            name = f"{model}-{seed}@{models[model].sha256[:16]}"
            address = f"{address_of(settings, listener)}/v1"
            ready = f"ready: model {name} at {address}. Ctrl-C ends it."
            app = make_app(opened, name, head, settings)
            Server(app, settings, problem=error_object).answer(listener, lambda: print(ready, flush=True))
    return 0


def make_app(opened: RewardModel, name: str, head: Head, settings: Settings) -> App:
    """What answers requests for this model with its numbers and their meaning; scores one trajectory at a time."""
    free, in_work = asyncio.Lock(), 0

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        nonlocal in_work
        if scope["type"] != "http":
            return

        in_work += 1
        try:
            if (scope["method"], scope["path"]) != ("POST", PATH):
                raise RefusedError(404, f"expected POST {PATH}")
            if in_work > settings.max_requests:
                raise RefusedError(503, f"at most {settings.max_requests} requests may be in work")
            played, question = wire.play(_content(await read_body(scope, receive, settings), name))

            async with free:
                (found,) = await asyncio.to_thread(opened.probabilities, [played], [question])
            message = {"role": "assistant", "content": wire.answer(found, head)}
            await answer(send, 200, {"choices": [{"message": message, "finish_reason": "stop"}]})
        except RefusedError as refused:
            await answer(send, refused.status, error_object(refused.status, str(refused)), refused.headers)
        except (ValueError, RecursionError) as error:
            await answer(send, 400, error_object(400, str(error)[:300]))
        except GoneError:
            pass
        finally:
            in_work -= 1

    return app


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
    program.run(main)
