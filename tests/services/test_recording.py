"""Recorded replies of a real server: what is written, that nothing is sent in a replay, and what a bad file says."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import services
from tasks.records.usage import WORK
from tasks.services import Judged, Refusal, Reply, Resources, ServiceError
from tasks.services.endpoint import Endpoint
from tasks.services.recording import Recording, request_sha256
from tasks.store import DataError, sha256
from tasks.types import Action, Trajectory, Turn
from tests.services.completions import completion, serving
from tests.tiny import question

ROOT = Path(__file__).parents[2]
FILE = "recordings/chat.jsonl"
ASKED = [[{"role": "user", "content": f"question {i} of\u2028lines\n"}] for i in range(6)]


def _answer(body: dict[str, Any]) -> tuple[int, Any]:
    """A refusal for every third question, a reply with a line break and half a surrogate pair for the others."""
    content = body["messages"][0]["content"]
    number = int(content.split()[1])
    return (
        (400, {"error": "not this one"}) if number % 3 == 2 else (200, completion(f"a\n{number} \ud83d", 10 + number))
    )


def _asked(conf: Endpoint, root: Path, asked: Any = ASKED) -> tuple[list[Reply | Refusal], Any]:
    with conf.opened(Resources(root, root)) as chat:
        return list(chat.replies(asked, {"temperature": 0.5})), chat.usage


def test_a_recorded_run_is_repeated_without_the_server(tmp_path: Path, capsys: Any) -> None:
    with serving() as server:
        server.answer = _answer
        conf = server.conf(recorded=FILE, max_in_flight=1)
        first, used = _asked(conf, tmp_path / "a")
        assert len(server.asked) == 6
        again, _ = _asked(conf, tmp_path / "a")
        assert (again, len(server.asked)) == (first, 6)  # Refusals, too, are not asked for again.
    digits = sha256(tmp_path / "a" / FILE)
    assert f"set replayed_sha256: {digits}" in capsys.readouterr().out

    moved = tmp_path / "b" / FILE  # Without the cache of replies, and without the server.
    moved.parent.mkdir(parents=True)
    moved.write_bytes((tmp_path / "a" / FILE).read_bytes())
    replay = Endpoint(**{**vars(conf), "replayed_sha256": digits, "base_url": "http://127.0.0.1:9/v1"})
    found, replayed = _asked(replay, tmp_path / "b")
    assert found == first
    assert replayed.named(("calls", "tokens", "failures", "hits")) == {
        "calls": 6,
        "tokens": 48,
        "failures": 2,
        "hits": 6,
    }
    assert used.named(("calls", "tokens", "failures", "hits")) == {"calls": 6, "tokens": 48, "failures": 2, "hits": 0}
    assert sha256(moved) == digits
    assert sorted(path.name for path in (tmp_path / "b").rglob("*") if path.is_file()) == ["chat.jsonl"]


TURN = Turn(Action("search", "x"), text="<search> x </search>", observation="Bristow is the capital.", executed=True)
PLAYED = Trajectory("q", "g", (), (), (), (), (TURN,), "open")
KINDS: dict[str, tuple[str, Any, str]] = {  # File of conf/service/ -> role, what is asked, and what a server replies.
    "chat_judge": (
        "judge",
        lambda it: it.judge([Judged("thought", question(), (), "so")]),
        "<explanation> so </explanation> <score> 1 </score>",
    ),
    "chat_labeller": (
        "labeller",
        lambda it: list(it.label([(question(), [TURN])])),
        '{"reason": "so", "labels": ["+"]}',
    ),
    "chat_reader": ("reader", lambda it: it.answers([("Who?", "Bristow rules.")]), "Bristow"),
    "remote_pica": (
        "reward_model",
        lambda it: it.probabilities([PLAYED], [question()]),
        '{"head": "success", "before": 0.5, "after": [0.625]}',
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_service_behind_http_is_repeated_from_a_recording(tmp_path: Path, name: str) -> None:
    role, ask, replied = KINDS[name]
    kind: Any = services.load(role, name, ROOT)

    def asked(chat: Endpoint, root: Path) -> tuple[Any, dict[str, float]]:
        with replace(kind, chat=chat).opened(Resources(root, root)) as service:
            return ask(service), service.usage.named(WORK)

    with serving() as server:
        server.answer = lambda body: (200, completion(replied))
        conf = server.conf(recorded=FILE)
        first = asked(conf, tmp_path / "a")
        assert len(server.asked) == first[1]["calls"] == 1

    moved = tmp_path / "b" / FILE
    moved.parent.mkdir(parents=True)
    moved.write_bytes((tmp_path / "a" / FILE).read_bytes())
    replay = replace(conf, replayed_sha256=sha256(moved), base_url="http://127.0.0.1:9/v1")
    assert asked(replay, tmp_path / "b") == first
    with pytest.raises(ServiceError, match=r"no reply to .*, expected one for every request"):
        asked(replace(replay, model="another"), tmp_path / "b")


def test_replies_that_came_from_the_cache_are_recorded(tmp_path: Path) -> None:
    with serving() as server:
        plain, _ = _asked(server.conf(), tmp_path)
        recorded, _ = _asked(server.conf(recorded=FILE), tmp_path)
        assert len(server.asked) == 6
    assert plain == recorded
    assert len((tmp_path / FILE).read_text().splitlines()) == 6


def test_a_request_that_was_not_recorded_ends_a_replay_in_one_line(tmp_path: Path) -> None:
    with serving() as server:
        _asked(server.conf(recorded=FILE), tmp_path, ASKED[:2])
        replay = server.conf(recorded=FILE, replayed_sha256=sha256(tmp_path / FILE))
        num_sent = len(server.asked)
        with pytest.raises(
            ServiceError, match=r"recordings/chat.jsonl: no reply to .*question 2.*, expected one"
        ) as caught:
            _asked(replay, tmp_path)
        assert "\n" not in str(caught.value)
        assert len(server.asked) == num_sent


@pytest.mark.parametrize("content", [None, b"", b'{"request": "x"}\n'])
def test_a_replayed_file_is_the_one_that_was_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "replies.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServiceError, match=r"replies.jsonl: found .*, expected sha256 0{64}, which replayed_sha256"):
        Recording(path, "0" * 64)


@pytest.mark.parametrize(
    "line",
    ["", "[]", "{}", '{"request": "x"}', '{"request": 1, "refusal": "no"}', '{"request": "x", "refusal": null}',
     '{"request": "x", "reply": {"content": "a"}}', '{"request": "x", "reply": {"content": 1, "tokens": 1}}',
     '{"request": "x", "refusal": "a", "reply": {}}', "{" * 9000],
)  # fmt: skip
def test_a_row_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_text(f'{{"request": "a", "refusal": "no"}}\n{line}\n')
    with pytest.raises(DataError, match=r"replies.jsonl: row 2 from byte 0: found b.*, expected {") as caught:
        Recording(path)
    assert "\n" not in str(caught.value)


def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    Recording(path).add("a", Reply("x", "stop", 3))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    recording = Recording(path)
    assert recording.get("a") == Reply("x", "stop", 3)
    recording.add("b", Refusal("no"))
    assert [json.loads(line)["request"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_a_last_row_without_its_line_break_is_kept(tmp_path: Path) -> None:
    """An editor dropped it; the reply was paid for."""
    Recording(tmp_path / "r.jsonl").add("a" * 64, Reply("paid", "stop", 3))
    whole = (tmp_path / "r.jsonl").read_bytes()
    (tmp_path / "r.jsonl").write_bytes(whole.rstrip(b"\n"))
    again = Recording(tmp_path / "r.jsonl")
    assert again.get("a" * 64) == Reply("paid", "stop", 3)
    assert (tmp_path / "r.jsonl").read_bytes() == whole
    again.add("b" * 64, Refusal("no"))
    assert Recording(tmp_path / "r.jsonl").get("b" * 64) == Refusal("no")


@pytest.mark.parametrize("content", [b"weights", b"a: 1\nb: 2", b'{"re": 1}', b'{"reply": 1', b"\n", b"[]"])
def test_a_file_that_is_no_recording_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    if content == b'{"reply": 1':  # So begins a row whose writer was killed.
        assert Recording(path).get("x") is None
        return
    with pytest.raises(DataError, match="row 1 from byte 0: found"):
        Recording(path)
    assert path.read_bytes() == content


def test_a_folder_is_no_place_for_a_recording(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"cannot record there \(Is a directory\)"):
        Recording(tmp_path)


def test_the_first_of_two_answers_counts_for_both_processes(tmp_path: Path) -> None:
    one, other = Recording(tmp_path / "x.jsonl"), Recording(tmp_path / "x.jsonl")
    assert one.add("a", Reply("first", "stop", 1)) == Reply("first", "stop", 1)
    assert other.add("a", Reply("second", "stop", 1)) == Reply("first", "stop", 1)
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 1


def test_the_hash_of_a_request_holds_all_its_fields() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], "temperature": 0.3}
    assert request_sha256(body) == request_sha256(dict(reversed(body.items())))
    for changed in ({"model": "n"}, {"temperature": 0.0}, {"messages": []}):
        assert request_sha256(body | changed) != request_sha256(body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replayed_sha256": "0" * 64}, "recorded='': expected the file to replay"),
        ({"recorded": FILE, "replayed_sha256": "yes"}, "replayed_sha256='yes': expected 64 hex digits"),
    ],
)
def test_settings_that_say_nothing_whole_are_refused(changes: dict[str, str], message: str) -> None:
    with serving() as server, pytest.raises(ValueError, match=message):
        server.conf(**changes)


def test_a_replay_reads_no_key(tmp_path: Path) -> None:
    with serving() as server:
        _asked(server.conf(recorded=FILE), tmp_path)
        digits = sha256(tmp_path / FILE)
        assert "NO_SUCH_KEY" not in os.environ
        _asked(server.conf(recorded=FILE, replayed_sha256=digits, key_variable="NO_SUCH_KEY"), tmp_path)
