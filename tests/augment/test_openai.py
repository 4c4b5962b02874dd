"""The writer that asks a model, against a real server: what it accepts, rejects, waits for, pays, keeps and hides."""

from __future__ import annotations

import datetime
import email.utils
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.augment import Written
from tasks.augment.coherence import fault
from tasks.augment.openai import OpenAIWriter
from tasks.augment.settings import AugmentConf
from tasks.services import Reply, ServiceError
from tasks.services.endpoint import ChatEndpoint, Endpoint
from tasks.types import Hop, Question
from tests.services.completions import KEY, KEY_VARIABLE, PROMPT, Completions, completion, good, hops_in, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Completions]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with serving() as one:
        yield one


def question(number: int = 1) -> Question:
    """Two hops, the second of which refers to the first."""
    hops = (Hop(f"film {number} >> director", f"Ann{number}", "p1"), Hop("Where was #1 born?", "Bern", None))
    text = f"Where was the director of film {number} born?"
    return Question(f"q{number}", "d", "train", text, ("Bern", "Berne"), 2, decomposition=hops)


def write(conf: Endpoint, cache: Path, questions: list[Question]) -> list[Written]:
    with closing(ChatEndpoint(conf, cache)) as endpoint:
        return list(OpenAIWriter(endpoint, PROMPT, 3).write(questions))


def one(server: Completions, cache: Path, content: Any, **more: Any) -> Written:
    """What is written of one question when the model says this."""
    server.answer = lambda body: (200, completion(content, **more))
    (found,) = write(server.conf(), cache, [question()])
    return found


GOOD = {
    "hops": [
        {"hop": 1, "question": "Who directed film 1?", "answer": "Ann1", "queries": ["film 1 director"]},
        {"hop": 2, "question": "Where was Ann1 born?", "answer": "Berne", "queries": ["Ann1 born", "Ann1 birthplace"]},
    ]
}


def changed(hop: int, **changes: Any) -> dict[str, Any]:
    return {"hops": [{**one, **changes} if one["hop"] == hop else one for one in GOOD["hops"]]}


def test_a_reply_that_cannot_be_used_is_a_failure_of_the_model(server: Completions, tmp_path: Path) -> None:
    replies = iter([GOOD, "Sure!", GOOD])
    server.answer = lambda body: (200, completion(next(replies)))
    with closing(ChatEndpoint(server.conf(max_in_flight=1), tmp_path)) as endpoint:
        written = list(OpenAIWriter(endpoint, PROMPT, 3).write([question(n) for n in (1, 2, 3)]))
    assert [one.rejection is None for one in written] == [True, False, True]
    assert (endpoint.usage.calls, endpoint.usage.failures) == (3, 1)


def test_a_good_reply_becomes_hops_with_the_supports_of_the_decomposition(server: Completions, tmp_path: Path) -> None:
    found = one(server, tmp_path, GOOD)
    assert found.rejection is None
    assert found.tokens == 50
    assert found.hops == (
        Hop("Who directed film 1?", "Ann1", "p1", ("film 1 director",)),
        Hop("Where was Ann1 born?", "Berne", None, ("Ann1 born", "Ann1 birthplace")),
    )
    assert fault(found.question, found.hops) is None
    ((path, body, headers),) = server.asked
    assert path == "/v1/chat/completions"
    assert (body["model"], body["seed"]) == ("writer-1", 1)
    assert hops_in(body) == [("film 1 >> director", "Ann1"), ("Where was Ann1 born?", "Bern")]
    assert "Queries: 3" in body["messages"][0]["content"]
    assert "authorization" not in headers


@pytest.mark.parametrize("fence", ["```json\n%s\n```", "```\n%s```\n", " ```JSON \n%s\n ``` "])
def test_one_fenced_block_is_json_too(server: Completions, tmp_path: Path, fence: str) -> None:
    assert one(server, tmp_path, fence % json.dumps(GOOD, indent=1)).hops == one(server, tmp_path / "b", GOOD).hops


@pytest.mark.parametrize(
    ("content", "reason", "detail"),
    [
        ("Sure! Here they are.", "not_json", "Sure! Here"),
        (f"Sure:\n```json\n{json.dumps(GOOD)}\n```", "not_json", "Sure:"),
        ("[" * 100_000, "not_json", ""),
        ("", "empty_reply", "stop"),
        (None, "empty_reply", "stop"),
        ([GOOD], "wrong_schema", "expected a mapping"),
        ({"hop": []}, "wrong_schema", "unknown key 'hop'. Did you mean 'hops'?"),
        (changed(1, answer=7), "wrong_schema", "hops[0]: answer: found 7 (int), expected text"),
        (changed(2, queries="Ann1 born"), "wrong_schema", "hops[1]: queries: found 'Ann1 born'"),
        (changed(2, queries=[None]), "wrong_schema", "queries[0]: found None"),
        (changed(2, sources=["web"]), "wrong_schema", "unknown key 'sources'"),
        ({"hops": [{"hop": 1, "question": "Who?"}]}, "wrong_schema", "'answer' is missing"),
        (changed(1, question="\ud800"), "wrong_schema", "surrogate"),
        ({"hops": GOOD["hops"][::-1]}, "wrong_order", "[2, 1]"),
    ],
)
def test_a_reply_of_another_shape_rejects_the_question(
    server: Completions, tmp_path: Path, content: Any, reason: str, detail: str
) -> None:
    found = one(server, tmp_path, content)
    assert found.hops == ()
    assert found.rejection is not None
    assert (found.rejection.stage, found.rejection.reason) == ("write", reason)
    assert detail in found.rejection.detail
    assert found.tokens == 50


def test_a_reply_cut_off_is_not_read(server: Completions, tmp_path: Path) -> None:
    found = one(server, tmp_path, GOOD, finish_reason="length")
    assert found.rejection is not None
    assert found.rejection.reason == "cut_off"


@pytest.mark.parametrize(
    ("content", "reason", "hop"),
    [
        (GOOD, None, None),
        ({"hops": GOOD["hops"][:1]}, "hop_count", None),
        (changed(2, answer="Basel"), "final_answer", 2),
        (changed(2, answer="the BERN!"), None, None),
        (changed(2, question="Where was she born?"), "missing_link", 2),
        (changed(2, question="What is Ann1's birthplace?"), None, None),
        (changed(2, question="Where was Joann1 born?"), "missing_link", 2),
        (changed(2, queries=["#1 born"]), "unresolved", 2),
        (changed(2, question="Where was Ann1 (#1) born?"), "unresolved", 2),
        (changed(1, answer="the"), "empty_text", 1),
        (changed(1, question=" ?"), "empty_text", 1),
        (changed(1, queries=[]), "empty_text", 1),
    ],
)
def test_coherence(server: Completions, tmp_path: Path, content: Any, reason: str | None, hop: int | None) -> None:
    found = one(server, tmp_path, content)
    assert found.rejection is None
    rejection = fault(found.question, found.hops)
    if reason is None:
        assert rejection is None
    else:
        assert rejection is not None
        assert (rejection.stage, rejection.reason, rejection.hop) == ("coherence", reason, hop)


def test_replies_come_in_the_order_of_the_questions_and_never_too_many_at_once(
    server: Completions, tmp_path: Path
) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.01 if "film 1 " in body["messages"][0]["content"] else 0.002)
        return 200, completion(good(body))

    server.answer = slow
    questions = [question(n) for n in range(40)]
    found = write(server.conf(max_in_flight=4), tmp_path, questions)
    assert [one.question for one in found] == questions
    assert all(fault(one.question, one.hops) is None for one in found)
    assert 2 <= server.most_in_flight <= 4


def test_a_second_run_asks_nothing(server: Completions, tmp_path: Path) -> None:
    questions = [question(n) for n in range(6)]
    first = write(server.conf(), tmp_path, questions)
    assert len(server.asked) == 6
    assert write(server.conf(), tmp_path, questions) == first
    assert write(server.conf(max_in_flight=1, retries=0), tmp_path, questions) == first
    assert len(server.asked) == 6
    write(server.conf(request={"seed": 2}), tmp_path, questions)
    assert len(server.asked) == 12
    write(server.conf(model="writer-2"), tmp_path, questions)
    assert len(server.asked) == 18


def test_a_reply_is_kept_for_its_own_request_alone(server: Completions, tmp_path: Path) -> None:
    """Whatever a reply may depend on is part of its name: server, model, messages, and every field of a request."""
    server.answer = lambda body: (200, completion(f"reply {len(server.asked)}"))
    said, asks = {"role": "user", "content": "Who?"}, {"role": "system", "content": "Be brief."}
    other = server.conf(base_url=f"{server.url}/other")
    requests: list[tuple[Endpoint, list[dict[str, str]], dict[str, Any]]] = [
        (server.conf(), [said], {}),
        (other, [said], {}),
        (server.conf(model="writer-2"), [said], {}),
        (server.conf(request={"seed": 2}), [said], {}),
        (server.conf(request={"seed": 1, "max_tokens": 9}), [said], {}),
        (server.conf(), [said], {"temperature": 0.3}),
        (server.conf(), [said], {"temperature": 0.7}),
        (server.conf(), [said | {"content": "Who ?"}], {}),
        (server.conf(), [said | {"role": "assistant"}], {}),
        (server.conf(), [asks, said], {}),
        (server.conf(), [said, asks], {}),
    ]

    def contents() -> list[str]:
        found = []
        for conf, messages, request in requests:
            with closing(ChatEndpoint(conf, tmp_path)) as endpoint:
                (reply,) = endpoint.replies([messages], request)
            assert isinstance(reply, Reply)
            found.append(reply.content)
        return found

    first = contents()
    assert first == [f"reply {number}" for number in range(1, len(requests) + 1)]
    assert contents() == first
    assert len(server.asked) == len(requests)


def test_a_torn_file_of_the_cache_is_asked_again(server: Completions, tmp_path: Path) -> None:
    first = write(server.conf(), tmp_path, [question()])
    (path,) = tmp_path.glob("*/*.json")
    for text in ('{"content": "x', "[]", '{"content": 1, "finish_reason": "stop", "tokens": 3}',
                 '{"content": "x", "finish_reason": 1, "tokens": 3}',
                 '{"content": "x", "finish_reason": "", "tokens": -3}',
                 "[" * 100_000, '{"tokens": ' + "9" * 6_000 + "}"):  # fmt: skip
        path.write_text(text)
        (path.parent / "spent").unlink()  # What was spent is counted anew from such files, too.
        assert write(server.conf(), tmp_path, [question()]) == first
    assert len(server.asked) == 8


Fails = Callable[[int], Any]


def answers_after(server: Completions, fails: int, answer: Any) -> None:
    """Let the first requests meet `answer` (called if it can be) and the others a good reply."""

    def reply(body: dict[str, Any]) -> Any:
        if len(server.asked) <= fails:
            return answer() if callable(answer) else answer
        return 200, completion(good(body))

    server.answer = reply


@pytest.mark.parametrize(
    "answer",
    [
        (500, {"error": {"message": "overloaded"}}),
        (503, b"<html>busy</html>"),
        (429, {"error": "slow down"}),
        (408, {}),
        (200, b"not json"),
        (200, {"choices": []}),
        (200, {"choices": [{"message": None}]}),
        (0, None),
    ],
)
def test_what_may_pass_is_tried_again(server: Completions, tmp_path: Path, answer: Any) -> None:
    answers_after(server, 2, answer)
    (found,) = write(server.conf(), tmp_path, [question()])
    assert found.rejection is None
    assert len(server.asked) == 3
    assert len(list(tmp_path.glob("*/*.json"))) == 1


def test_a_pause_that_the_server_asks_for_is_kept(server: Completions, tmp_path: Path) -> None:
    answers_after(server, 1, (429, {}, {"Retry-After": "1"}))
    started = time.monotonic()
    write(server.conf(), tmp_path / "a", [question()])
    assert time.monotonic() - started >= 1.0
    server.asked.clear()
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    answers_after(server, 1, (503, {}, {"Retry-After": email.utils.format_datetime(soon, usegmt=True)}))
    write(server.conf(), tmp_path / "b", [question()])
    assert datetime.datetime.now(datetime.UTC) >= soon.replace(microsecond=0)


def test_a_pause_longer_than_allowed_ends_the_run_at_once(server: Completions, tmp_path: Path) -> None:
    server.answer = lambda body: (429, {"error": {"message": "quota"}}, {"Retry-After": "3600"})
    with pytest.raises(ServiceError, match=r"quota: asks to wait 3600 s, more than max_retry_after_s=5\. Run again"):
        write(server.conf(), tmp_path, [question()])


def test_no_answer_in_time_is_tried_again_and_then_ends_the_run(server: Completions, tmp_path: Path) -> None:
    released = threading.Event()
    server.answer = lambda body: (200, completion(good(body))) if released.wait(5) else (500, {})
    with pytest.raises(ServiceError, match=r"ReadTimeout.* \(2 tries\)\. Every finished reply is kept"):
        write(server.conf(timeout_s=0.2, retries=1), tmp_path, [question()])
    released.set()
    assert len(server.asked) == 2


def test_a_server_that_is_not_there(tmp_path: Path, server: Completions) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        with pytest.raises(ServiceError, match=r"/v1/chat/completions: ConnectError: .*refused.* \(3 tries\)"):
            write(server.conf(base_url=url), tmp_path, [question()])


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_a_wrong_key_address_or_model_ends_the_run_without_another_try(
    server: Completions, tmp_path: Path, status: int
) -> None:
    server.answer = lambda body: (status, {"error": {"message": "no such thing"}})
    with pytest.raises(ServiceError, match=rf"status {status}: no such thing\. Correct base_url, model or the key"):
        write(server.conf(max_in_flight=1), tmp_path, [question(n) for n in range(5)])
    assert len(server.asked) == 1


def test_a_refused_question_is_rejected_and_many_in_a_row_end_the_run(server: Completions, tmp_path: Path) -> None:
    def picky(body: dict[str, Any]) -> Any:
        refused = "film 3 " in body["messages"][0]["content"]
        return (400, {"error": {"message": "content filter"}}) if refused else (200, completion(good(body)))

    server.answer = picky
    found = write(server.conf(), tmp_path, [question(n) for n in range(6)])
    assert [one.rejection.reason if one.rejection else None for one in found] == [None] * 3 + ["refused"] + [None] * 2
    server.answer = lambda body: (422, {"error": "unknown field seed"})
    with pytest.raises(ServiceError, match="4 requests in a row were refused, the last with status 422: unknown"):
        write(server.conf(max_in_flight=1), tmp_path / "b", [question(n) for n in range(9)])


@pytest.mark.parametrize(
    ("budget", "told"),
    [({"max_requests": 4}, r"4 of max_requests=4"), ({"max_total_tokens": 180}, r"200 of max_total_tokens=180")],
)
def test_a_budget_ends_the_run_and_keeps_what_was_paid_for(
    server: Completions, tmp_path: Path, budget: dict[str, int], told: str
) -> None:
    questions = [question(n) for n in range(8)]
    for _ in range(2):  # It holds over all runs.
        with pytest.raises(ServiceError, match=rf"the budget is spent: {told} of the file of conf/service/"):
            write(server.conf(max_in_flight=1, **budget), tmp_path, questions)
        assert len(server.asked) == 4
    assert len(write(server.conf(max_in_flight=1), tmp_path, questions)) == 8
    assert len(server.asked) == 8


def ask(endpoint: ChatEndpoint, text: str) -> Any:
    (reply,) = endpoint.replies([[{"role": "user", "content": text}]])
    return reply


def test_a_budget_holds_for_all_processes_together(server: Completions, tmp_path: Path) -> None:
    """Two endpoints share a folder and know nothing of one another; each would stay below the budget."""
    conf = server.conf(max_requests=6)
    with closing(ChatEndpoint(conf, tmp_path)) as first, closing(ChatEndpoint(conf, tmp_path)) as second:
        for number in range(3):
            for endpoint in (first, second):
                ask(endpoint, f"{number} {endpoint is first}")
        for endpoint in (first, second):
            with pytest.raises(ServiceError, match="6 of max_requests=6"):
                ask(endpoint, "one more")
        assert ask(first, "0 False").content  # The other's reply.
    assert len(server.asked) == 6


def test_a_date_beyond_all_calendars_is_no_wish_to_wait(server: Completions, tmp_path: Path) -> None:
    answers_after(server, 1, (429, {}, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 +99999999999999999999"}))
    (found,) = write(server.conf(), tmp_path, [question()])
    assert found.rejection is None


def test_a_finish_reason_is_cleaned_as_the_text_is(
    server: Completions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    tree = completion("no JSON")
    tree["choices"][0]["finish_reason"] = f"\ud800 {KEY}"
    server.answer = lambda body: (200, json.dumps(tree).replace("tk-", "\\u0074k-").encode())
    (found,) = write(server.conf(key_variable=KEY_VARIABLE), tmp_path, [question()])
    assert found.rejection is not None
    (path,) = tmp_path.glob("*/*.json")
    assert json.loads(path.read_text())["finish_reason"] == "? [key]"


def test_tokens_are_estimated_where_the_server_does_not_tell(server: Completions, tmp_path: Path) -> None:
    found = one(server, tmp_path, GOOD, tokens=None)
    sent = len(json.dumps(server.asked[0][1], ensure_ascii=False, separators=(",", ":"), sort_keys=True))
    assert found.tokens == -(-(sent + len(json.dumps(GOOD))) // 4)


def test_a_run_that_is_stopped_goes_on_where_it_was(server: Completions, tmp_path: Path) -> None:
    questions = [question(n) for n in range(30)]
    with closing(ChatEndpoint(server.conf(), tmp_path)) as endpoint:
        writing = OpenAIWriter(endpoint, PROMPT, 3).write(questions)
        first = [next(writing) for _ in range(5)]
        writing.close()
    asked = len(server.asked)
    assert 5 <= asked < 30
    assert len(list(tmp_path.glob("*/*.json"))) == asked
    found = write(server.conf(), tmp_path, questions)
    assert found[:5] == first
    assert len(server.asked) == 30


def test_the_key_is_sent_and_nowhere_else(
    server: Completions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Not in the cache, a rejection, a message or a log, even where the server repeats it."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    caplog.set_level(logging.DEBUG)
    conf = server.conf(key_variable=KEY_VARIABLE)
    server.answer = lambda body: (200, completion(f"your key is {KEY}"))
    (said,) = write(conf, tmp_path, [question(1)])
    server.answer = lambda body: (400, {"error": {"message": f"refused {KEY}"}})
    (refused,) = write(conf, tmp_path, [question(2)])
    messages = []
    for status in (401, 500):
        server.answer = lambda body, status=status: (status, {"error": {"message": f"wrong key {KEY}"}})
        with pytest.raises(ServiceError) as caught:
            write(conf, tmp_path, [question(3)])
        messages.append(str(caught.value))
    assert all(headers["authorization"] == f"Bearer {KEY}" for _, _, headers in server.asked)
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3  # What was spent, its lock, one reply.
    captured = capfd.readouterr()
    shown = [*files, repr(said), repr(refused), *messages, caplog.text, captured.out, captured.err]
    assert not [text for text in shown if KEY in text]
    assert "wrong key [key]" in messages[0]
    assert any("your key is [key]" in file for file in files)


@pytest.mark.parametrize("status", [200, 400])
def test_a_reply_is_kept_whatever_its_text_hides(
    server: Completions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Half of a surrogate pair, which no file can hold, and the key in another spelling of JSON."""
    monkeypatch.setenv(KEY_VARIABLE, "tk/7f3a")
    text = "\ud800 and tk/7f3a"
    tree = completion(text) if status == 200 else {"error": {"message": text}}
    server.answer = lambda body: (status, json.dumps(tree).replace("tk/", "tk\\/").encode())
    (found,) = write(server.conf(key_variable=KEY_VARIABLE), tmp_path, [question()])
    assert found.rejection is not None
    assert "? and [key]" in found.rejection.detail
    assert not [path for path in tmp_path.rglob("*.json") if "7f3a" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("status", [200, 400, 401])
@pytest.mark.parametrize(
    "spelt", ["tk/7f3a+never=", r"tk\/7f3a+never=", r"\u0074\u006B/7f3a+\u006eever=", "a" * 190 + "tk/7f3a+never="]
)
def test_an_answer_that_spells_the_key_in_another_way_does_not_show_it(
    server: Completions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, spelt: str
) -> None:
    """In a form that is no chat completion and no error of the protocol, which is shown as it came, but shortened."""
    monkeypatch.setenv(KEY_VARIABLE, "tk/7f3a+never=")
    server.answer = lambda body: (status, f'{{"detail": "bad key {spelt}"}}'.encode())
    shown = ""
    try:
        shown = repr(
            write(server.conf(key_variable=KEY_VARIABLE, retries=0, recorded="r.jsonl"), tmp_path, [question()])
        )
    except ServiceError as error:
        shown = str(error)
    kept = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert "bad key" in shown
    assert not [text for text in (shown, *kept) if "7f3a" in text or "tk/" in text or "u006B" in text]


def test_an_address_that_is_none(server: Completions, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="base_url: not an address"):
        ChatEndpoint(server.conf(base_url="http://127.0.0.1:x/v1"), tmp_path)


@pytest.mark.parametrize("value", [None, "", "a\nb", "schl\u00fcssel", "x "])
def test_a_key_that_is_missing_or_cannot_be_sent(
    server: Completions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(KEY_VARIABLE, value)
    with pytest.raises(ServiceError, match=f"environment variable {KEY_VARIABLE}") as caught:
        write(server.conf(key_variable=KEY_VARIABLE), tmp_path, [question()])
    assert not value or value not in str(caught.value)
    assert not server.asked


def test_what_is_in_the_cache_needs_no_key(
    server: Completions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    conf = server.conf(key_variable=KEY_VARIABLE)
    first = write(conf, tmp_path, [question()])
    monkeypatch.delenv(KEY_VARIABLE)
    assert write(conf, tmp_path, [question()]) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": "ftp://x"}, "base_url='...': expected http"),
        ({"base_url": "http://me:secret@x/v1"}, "base_url='...': expected http"),
        ({"key_variable": "tk-7f3a"}, "key_variable='...': expected the name of an environment variable"),
        ({"request": {"model": "x"}}, "request='model'"),
        ({"max_in_flight": 0}, "max_in_flight=0: expected 1 to 1024"),
        ({"max_in_flight": 100_000}, "max_in_flight=100000: expected 1 to 1024"),
        ({"request": {"temperature": 5}}, "request.temperature=5: expected 0 to 2"),
        ({"request": {"temperature": "0"}}, "request.temperature='0': expected 0 to 2"),
        ({"request": {"top_p": -0.1}}, "request.top_p=-0.1: expected 0 to 1"),
        ({"request": {"max_tokens": -3}}, "request.max_tokens=-3: expected 1 to"),
        ({"request": {"max_tokens": 1.5}}, "request.max_tokens=1.5: expected 1 to"),
        ({"request": {"max_completion_tokens": True}}, "request.max_completion_tokens=True: expected 1 to"),
        ({"retries": -1}, "retries=-1: expected 0 to 100"),
        ({"timeout_s": 0.0}, "timeout_s=0.0: expected above 0, at most 86400"),
        ({"model": ""}, "model=''"),
    ],
)
def test_settings_out_of_bounds(server: Completions, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        server.conf(**changes)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "tk-7f3a" not in str(caught.value)


def test_braces_in_a_question_stay_text(server: Completions, tmp_path: Path) -> None:
    odd = replace(question(), question="What does {answer} mean in {hops}?")
    write(server.conf(), tmp_path, [odd])
    assert "Q: What does {answer} mean in {hops}?\nA: Bern" in server.asked[0][1]["messages"][0]["content"]


def test_a_prompt_without_its_placeholders_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected text with \{answer\}"):
        AugmentConf("openai", ("train",), 2, ("index",), 3, "nonempty", chat="openai", prompt="{question}")
