"""`python -m tasks.tool.ask`: one question, questions from a pipe, a terminal, and everything that can be wrong."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import generate, store
from tasks.retrieval import RetrievalError
from tasks.tool import asking, policies
from tasks.tool.ask import main
from tasks.tool.asking import Asker, opened, search_opened
from tasks.tool.live import Event, Found, Wrote
from tasks.tool.questions import QuestionError
from tests.tool.conftest import ROOT, Learned

SECONDS = 60.0


@pytest.fixture(scope="module")
def asker(learned: Learned) -> Iterator[Asker]:
    with (
        search_opened(learned.index) as (search, about),
        opened(policies.find(learned.folder), search, about, "plain", ROOT) as made,
    ):
        yield made


def words(learned: Learned, *more: str) -> list[str]:
    return ["--policy", str(learned.folder), "--index", str(learned.index), *more]


def test_a_play_gives_what_an_evaluation_gives(asker: Asker, learned: Learned) -> None:
    """The same policy without anybody who is told, played as the stage `evaluate` plays it."""
    policy = policies.find(learned.folder)
    writer: Any = generate.load("plain", ROOT)
    with search_opened(learned.index) as (search, _):
        resources = asking.systems.Resources(policy.weights, search, 0, lambda f: writer.start(f, "float32"), {})
        with policy.kind().opened(resources) as system:
            for asked in learned.questions:
                question = asker.checked(asked.question)
                events: list[Event] = []
                played = asker.ask(question, events.append)
                (expected,) = system.play([question], "greedy", 0)
                assert played.episode == expected
                assert played.episode.answer == asked.answers[0]
                assert [event.queries for event in events if isinstance(event, Found)] == [
                    turn.action.searches for turn in expected.turns if turn.executed
                ]
                written = [event for event in events if isinstance(event, Wrote) and event.part == "answer"]
                assert len(written) > 1, "the answer comes piece by piece"
                assert "".join(event.text for event in written).strip() == played.episode.answer
                cost = expected.cost
                assert played.cost.startswith(
                    f"2 searches, {cost.generated_tokens} tokens written, {cost.prefill_tokens} tokens read, "
                )


def test_one_question_is_shown_while_it_is_played(learned: Learned, capsys: Any) -> None:
    asked = learned.questions[0]
    assert main(words(learned, "--question", asked.question)) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    starts = [line.partition(":")[0] for line in lines if re.match(r"[a-z]+:", line)]
    assert starts.count("search") == 2
    assert starts[-1] == "answer"
    assert f"answer: {asked.answers[0]}" in lines
    assert sum(line.startswith("  [1] ") for line in lines) == 2
    assert re.fullmatch(r"\(2 searches, \d+ tokens written, \d+ tokens read, \d+\.\d\d s\)", lines[-1])
    assert "\x1b" not in shown.out
    assert f"searches {learned.index} (bm25," in shown.err


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("", "question: found nothing, expected a question"),
        (" \n", "question: found nothing, expected a question"),
        ("what " * 400, r"question: its prompt has \d+ tokens, expected at most 200 \(max_prompt_tokens of train\)"),
        ("x \udcff", "question: found half of a surrogate pair, or a byte that is no UTF-8, at character 2"),
    ],
)
def test_what_is_no_question_is_one_line(learned: Learned, question: str, told: str, capsys: Any) -> None:
    assert main(words(learned, "--question", question)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.match(f"error: {told}", shown.err.splitlines()[-1])


@pytest.mark.parametrize("question", ["", " \n", "x \udcff"])
def test_what_is_no_question_is_refused_before_anything_is_loaded(question: str, tmp_path: Path, capsys: Any) -> None:
    """There is neither a policy nor an index, which would be errors of their own."""
    given = ["--policy", str(tmp_path / "none"), "--index", str(tmp_path / "none"), "--question", question]
    assert main(given) == 1
    assert capsys.readouterr().err.startswith("error: question: found ")


def test_a_model_that_reads_less_than_the_budget(learned: Learned, asker: Asker, tmp_path: Path) -> None:
    weights = tmp_path / "policy"
    weights.mkdir()
    tree = store.read_json(learned.folder / "policy" / "config.json")
    for positions, expected in ((150, (149, "max_position_embeddings - 1")), (4096, (200, "max_prompt_tokens"))):
        store.write_json(weights / "config.json", tree | {"max_position_embeddings": positions})
        assert asking._limit(200, weights) == expected
    with pytest.raises(QuestionError) as refused:
        asker.checked("what " * 400)
    assert refused.value.is_too_long


def test_what_is_missing_is_one_line(learned: Learned, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("SEARCH_SERVER_URL", "http://127.0.0.1:9")
    changed = ("--question", "x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    for given, told in (
        (["--policy", "base-0"], "POLICY='base-0': nothing is trained yet, artifacts/train has no policy. Train with"),
        ([*words(learned), "--index", "none"], "none: no search index here (manifest.json is missing)"),
        ([*words(learned), "--retriever", "bm52"], "params.yaml: unknown retriever 'bm52'. Did you mean 'bm25'?"),
        ([*words(learned), "--retriever", "dense"], "artifacts/data/corpus.jsonl: RETRIEVER=dense needs the corpus"),
        ([*words(learned), "--generator", "plane"], "params.yaml: unknown generator 'plane'. Did you mean 'plain'?"),
    ):
        assert main([*given, *changed]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert told in lines[-1], lines
        assert len(lines) == 1

    # A search server that is down; the pauses between the tries would take seconds.
    (tmp_path / "artifacts/data").mkdir(parents=True)
    (tmp_path / "artifacts/data/corpus.jsonl").symlink_to(learned.corpus)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main([*words(learned), "--retriever", "remote", *changed]) == 1
    assert "error: http://127.0.0.1:9/health: ConnectError" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / ".scratch").rglob("manifest.json"))


def test_another_retriever_has_an_index_of_its_own(learned: Learned, tmp_path: Path) -> None:
    (tmp_path / "artifacts/data").mkdir(parents=True)
    (tmp_path / "artifacts/data/corpus.jsonl").symlink_to(learned.corpus)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    with search_opened(learned.index, "bm25", tmp_path) as (search, about):
        assert about.startswith("bm25 (bm25,")
        assert not (tmp_path / ".scratch").exists(), "the index that is there has these settings"
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "p", "title": "T", "text": "x"}\n')
    with pytest.raises(store.DataError, match="corpus"), search_opened(learned.index, corpus=other):
        pass
    with search_opened(Path("none"), "bm25_exact", tmp_path) as (search, about):
        assert about.startswith("bm25_exact (bm25,")
        assert len(search.search(["mayor"], 3)[0]) == 3


def test_a_failed_search_is_an_error_and_no_answer(asker: Asker, learned: Learned, monkeypatch: Any) -> None:
    player: Any = asker.system.player  # type: ignore[attr-defined]

    class Away:
        def search(self, queries: list[str], top_k: int) -> Any:
            raise RetrievalError("the index is away")

    monkeypatch.setattr(player, "sleep", lambda seconds: None)
    monkeypatch.setattr(player.retriever, "retriever", Away())
    played = asker.ask(asker.checked(learned.questions[0].question), lambda event: None)
    assert played.episode.status == "failed"
    assert played.outcome == "a search failed: the index is away"
    monkeypatch.undo()
    assert asker.ask(asker.checked(learned.questions[0].question), lambda event: None).episode.answer is not None


# Processes ------------------------------------------------------------------------------------------------------------


def command(learned: Learned, *more: str) -> list[str]:
    return [sys.executable, "-m", "tasks.tool.ask", *words(learned, *more)]


def test_questions_come_through_a_pipe_and_a_wrong_one_stops_no_other(learned: Learned) -> None:
    lines = [learned.questions[0].question.encode(), b"", b"x \xff", learned.questions[1].question.encode()]
    done = subprocess.run(command(learned), cwd=ROOT, input=b"\n".join(lines), capture_output=True, timeout=SECONDS)
    assert done.returncode == 1
    shown = done.stdout.decode()
    assert [shown.count(f"answer: {question.answers[0]}\n") for question in learned.questions[:2]] == [1, 1]
    assert shown.count(" s)\n") == 2
    errors = done.stderr.decode().splitlines()[1:]
    assert len(errors) == 1
    assert errors[0].startswith("error: question: found half of a surrogate pair, or a byte that is no UTF-8")


def test_a_reader_that_leaves_ends_it_without_a_word(learned: Learned) -> None:
    with subprocess.Popen(
        command(learned), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write((learned.questions[0].question + "\n").encode())
        process.stdin.flush()
        assert process.stdout.readline().startswith(b"thought: "), "it comes before the end of the input"
        process.stdout.close()
        process.stdin.write((learned.questions[0].question + "\n").encode() * 20)
        process.stdin.close()
        assert process.wait(SECONDS) == 141
        assert process.stderr is not None
        assert len(process.stderr.read().splitlines()) == 1


@pytest.mark.parametrize(("key", "status"), [(b"\x04", 0), (b"\x03", 130)], ids=["Ctrl-D", "Ctrl-C"])
def test_somebody_types(learned: Learned, key: bytes, status: int) -> None:
    number, terminal = pty.fork()
    if number == 0:
        os.chdir(ROOT)
        os.environ.pop("NO_COLOR", None)
        os.environ["TERM"] = "xterm"
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Tests in the background ignore it, and so would their children.
        os.execv(sys.executable, command(learned))

    shown = _until(terminal, b"question> ")
    os.write(terminal, learned.questions[0].question.encode() + b"\n")
    shown += _until(terminal, b" s)\r\nquestion> ")
    time.sleep(0.5)  # Python's readline misses a signal between the prompt and its wait for a key.
    os.write(terminal, key)
    shown += _until(terminal, None)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == status
    os.close(terminal)
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    assert f"answer: {learned.questions[0].answers[0]}" in plain
    assert b"\x1b[1;32m" in shown
    assert "Traceback" not in plain


def _until(terminal: int, end: bytes | None) -> bytes:
    """What is shown up to `end`; None reads to the end of the program."""
    shown, latest = b"", time.monotonic() + SECONDS
    while end is None or end not in re.sub(rb"\x1b\[\?[0-9]+[hl]", b"", shown):
        assert time.monotonic() < latest, shown
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                block = os.read(terminal, 65536)
            except OSError:  # Linux reports the end of the program as an error of the terminal.
                block = b""
            if not block:
                assert end is None, shown
                return shown
            shown += block
    return shown


PROGRAMS = """
import sys
from tasks import conf, retrieval
from tasks.server.__main__ import main as search
from tasks.tool import __main__, ask, chat_server, mcp_server, measure

assert conf.ROOT.is_absolute() and retrieval.load_settings("bm25").backend == "bm25"
named = ["--policy", "nobody-0", "--index", "none"]
assert search(["--index", "none", "--port", "0"]) == 1
for program in (__main__, chat_server):
    assert program.main([*named, "--port", "0"]) == 1
for program in (ask, mcp_server):
    assert program.main(named + ["--question", "Who?"] * (program is ask)) == 1
assert measure.main([*named, "--reader", "none"]) == 1
"""


def test_every_program_finds_its_clone_from_elsewhere(tmp_path: Path) -> None:
    """Chat programs start tools in whatever folder they like: settings are found there, and nothing is written."""
    command, environment = [sys.executable, "-c", PROGRAMS], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 6, done.stderr
    assert not [line for line in errors if "root of the clone" in line or "unknown" in line]
    assert (done.stdout, list(tmp_path.iterdir())) == ("", [])
