"""Stage `augment`: by rules and by a model behind a real server, in a clone and in a context of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import retrieval, store
from tasks.augment.records import read_hops
from tasks.plan import RunSettings
from tasks.retrieval import RetrievalError
from tasks.runner import ledger
from tasks.stages import augment
from tests.data.rows import lines, passage, question
from tests.services.completions import KEY, KEY_VARIABLE, Completions, completion, good, serving
from tests.stages.clone import PATIENCE, Clone

RULES = """writer: rules
splits: [train]
num_queries: 3
sources: [index, exact]
top_k: 2
validity: nonempty
"""
PROMPT = """chat: mine
prompt: |
  {question} {answer} {num_queries}
  {hops}
"""
SERVICE = (
    """kind: endpoint
base_url: %s
model: writer-1
key_variable: %s
max_in_flight: 2
"""
    + PATIENCE
    + """max_requests: %d
max_total_tokens: 100000
request: {}
"""
)
Context = Callable[..., Any]


def decomposed(number: int, **changes: Any) -> dict[str, Any]:
    hops = [
        {"question": f"thing {number} >> owner", "answer": f"Title {number}", "support_passage_id": f"p{number % 5}"},
        {"question": "Where is #1?", "answer": f"Name {number}", "support_passage_id": None},
    ]
    return question(number, decomposition=hops, **changes)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A stage context over five passages and an index of them."""
    for place, text in (
        ("retriever/exact.yaml", "backend: bm25\nstopwords: none\n"),
        ("augment/mine.yaml", RULES),
    ):
        path = tmp_path / "conf" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    data = tmp_path / "artifacts" / "data"
    data.mkdir(parents=True)
    (data / "corpus.jsonl").write_text(lines([passage(n) for n in range(5)]))
    settings = retrieval.settings_of({"backend": "bm25"}, "x")
    retrieval.build(data / "corpus.jsonl", tmp_path / "artifacts" / "index", settings)

    def make(rows: list[dict[str, Any]], conf: str = RULES) -> Any:
        (data / "questions.jsonl").write_text(lines(rows))
        splits = {split: sum(row["split"] == split for row in rows) for split in ("train", "test")}
        store.write_json(data / "manifest.json", {"data_sha256": "abc", "questions": {"d": {"splits": splits}}})
        (tmp_path / "conf/augment/mine.yaml").write_text(conf)
        params: Any = SimpleNamespace(augment="mine", retriever="exact", scale="laptop")
        settings = augment.settings(RunSettings(tmp_path, params))
        return SimpleNamespace(
            settings=settings, root=tmp_path, scratch=tmp_path / "scratch", data_sha256="abc",
            progress=lambda items, *_: iter(items), log=lambda step, metrics: None,
            track_data=lambda purpose, num_rows: None, measured={},
        )  # fmt: skip

    return make


def _folder(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "artifacts/augment").iterdir())}


def test_training_questions_alone_in_their_order(context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    ctx = context([*(decomposed(n) for n in range(6)), question(8)])
    augment.body(ctx)
    made = _folder(ctx.root)
    assert list(made) == ["hops.jsonl", "rejected.jsonl", "summary.json"]
    found = read_hops(ctx.root / "artifacts/augment/hops.jsonl")
    assert list(found) == ["d/0", "d/2", "d/4"]
    first, second = found["d/2"]
    assert first.question == "What is the owner of thing 2?"
    assert second.question == "Where is Title 2?"
    assert (first.queries, second.queries) == ((), ("Title 2", "Where is Title 2"))  # No passage has a thing.
    summary = json.loads(made["summary.json"])
    assert summary["questions"] == {
        "read": 4, "without_decomposition": 1, "written": 3, "kept": 3, "rejected": {},
    }  # fmt: skip
    assert summary["hops"] == {"kept": 6, "without_query": 3}
    assert (summary["writer"], summary["data_sha256"], summary["settings"]["top_k"]) == ("rules", "abc", 2)
    assert not {"note", "services"} & summary.keys()
    assert "3 of 4 questions kept, 6 sub-questions" in capsys.readouterr().out
    augment.body(ctx)
    assert _folder(ctx.root) == made
    assert str(ctx.root).encode() not in b"".join(made.values())


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ([question(n) for n in range(4)], "none of the 2 questions of split train has a decomposition"),
        ([decomposed(n, answers=["other"]) for n in range(4)], "all 2 questions of split train with a decomposition"),
    ],
)
def test_where_nothing_is_left_the_summary_says_why(context: Context, rows: list[dict[str, Any]], note: str) -> None:
    ctx = context(rows)
    augment.body(ctx)
    made = _folder(ctx.root)
    assert made["hops.jsonl"] == b""
    assert json.loads(made["summary.json"])["note"].startswith(note)


def test_rows_that_break_the_suite_are_not_published(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context([decomposed(n) for n in range(6)])
    augment.body(ctx)
    made = _folder(ctx.root)

    def spoil(*given: Any) -> Any:
        counts = real(*given)
        path = given[-1] / "hops.jsonl"
        path.write_text(path.read_text().replace("Where is Title 2?", "Where is #1?").replace('"p4"', '"p7"'))
        return counts

    real = augment.augment
    monkeypatch.setattr(augment, "augment", spoil)
    with pytest.raises(store.DataError) as caught:
        augment.body(ctx)
    message = str(caught.value)
    assert "new hops.jsonl: row 2: column 'hop_fault': found \"hop 2: unresolved 'Where is #1?'\"" in message
    assert "new hops.jsonl: row 3: column 'unknown_passage_id': found 'p7'" in message
    assert str(ctx.root) not in message
    assert _folder(ctx.root) == made
    assert [path.name for path in (ctx.root / "artifacts").iterdir() if path.name.startswith(".")] == []


def test_an_outage_of_a_source_is_an_error(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.retrieval import bm25

    def fail(*_: Any) -> None:
        raise RetrievalError("down")

    ctx = context([decomposed(n) for n in range(6)])
    monkeypatch.setattr(bm25.Bm25Retriever, "search", fail)
    with pytest.raises(RetrievalError, match="down"):
        augment.body(ctx)
    assert not (ctx.root / "artifacts/augment").exists()


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (RULES.replace("exact", "exakt"), "unknown retriever 'exakt'. Did you mean 'exact'?"),
        (RULES.replace("rules", "rule"), "writer: found 'rule', expected one of 'rules', 'openai'"),
        (RULES.replace("rules", "openai"), "mine.yaml: chat=None: expected a value with writer: openai"),
        (RULES + "chat: openai\n", "mine.yaml: chat='openai': expected a value with writer: openai, and none with"),
        (RULES.replace("rules", "openai") + PROMPT, "unknown service 'mine'"),
        (RULES.replace("top_k", "topk"), "mine.yaml: unknown key 'topk'. Did you mean 'top_k'?"),
        (RULES.replace("[train]", "[trian]"), "splits[0]: found 'trian', expected one of 'train', 'dev', 'test'"),
    ],
)
def test_misspelt_settings_are_found_when_the_stage_is_planned(context: Context, conf: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        context([decomposed(n) for n in range(6)], conf)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["rules", "openai"])
def test_the_configurations_of_the_house_can_be_read(name: str) -> None:
    from tasks import conf
    from tasks.augment.settings import AugmentConf

    assert conf.load(AugmentConf, "augment", name, root=Path(__file__).parents[2]).writer == name


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone whose data and index are made; not to be changed."""
    clone = Clone.make(tmp_path_factory.mktemp("ready") / "clone")
    clone.must("data", "validate", "index")
    return clone


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Completions]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with serving() as one:
        yield one


def _by_model(clone: Clone, server: Completions, max_requests: int = 1000) -> None:
    conf = RULES.replace("rules", "openai").replace("exact", "bm25_exact")
    (clone.root / "conf/augment/mine.yaml").write_text(conf + PROMPT, encoding="utf-8")
    service = SERVICE % (server.url, KEY_VARIABLE, max_requests)
    (clone.root / "conf/service/mine.yaml").write_text(service, encoding="utf-8")
    clone.set("augment", "mine")


@pytest.mark.slow
def test_the_rules_in_a_clone(ready: Clone, tmp_path: Path) -> None:
    clone = ready.copy(tmp_path / "clone")
    clone.must("augment")
    summary = store.read_json(clone.root / "artifacts/augment/summary.json")
    found = read_hops(clone.root / "artifacts/augment/hops.jsonl")
    assert summary["questions"]["kept"] == len(found) == 120
    assert summary["hops"] == {"kept": sum(map(len, found.values())), "without_query": 0}
    assert summary["data_sha256"] == store.read_json(clone.root / "artifacts/data/manifest.json")["data_sha256"]
    assert not list((clone.root / ".scratch/work").glob("augment-*"))
    clone.set("augment", "ruled")
    done = clone.stage("augment")
    assert done.returncode == 1
    assert "params.yaml: unknown augment 'ruled'. Did you mean 'rules'?" in done.stderr


@pytest.mark.slow
def test_a_model_killed_in_a_clone_and_asked_for_the_rest(
    ready: Clone, tmp_path: Path, server: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key; killed; over its budget; finished; finished again: every reply was paid for once."""
    clone = ready.copy(tmp_path / "clone")
    _by_model(clone, server)
    monkeypatch.delenv(KEY_VARIABLE)
    done = clone.stage("augment")
    assert done.returncode == 1
    assert f"error: environment variable {KEY_VARIABLE} is empty, expected the key of http://127.0.0.1" in done.stderr
    assert not server.asked
    monkeypatch.setenv(KEY_VARIABLE, KEY)

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.02)
        return 200, completion(good(body))

    server.answer = slow
    killed = clone.start("tasks.stages.augment")
    until = time.monotonic() + 60
    while len(server.asked) < 20:
        assert killed.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    time.sleep(0.2)
    asked = len(server.asked)
    kept = len(list((clone.root / ".scratch/replies").glob("*/*.json")))
    assert asked - 2 <= kept <= asked < 120
    assert not (clone.root / "artifacts/augment").exists()

    _by_model(clone, server, max_requests=asked + 10)
    done = clone.stage("augment")
    assert done.returncode == 1
    assert f"the budget is spent: {asked + 10} of max_requests={asked + 10} of the file of conf/service/" in done.stderr
    assert not (clone.root / "artifacts/augment").exists()

    _by_model(clone, server)
    clone.must("augment")
    assert 120 <= len(server.asked) <= 122  # Two were in flight when it was killed.
    assert server.most_in_flight <= 2 + 2
    made = _folder(clone.root)
    summary = json.loads(made["summary.json"])
    assert (summary["writer"], summary["questions"]["kept"]) == ("openai: writer-1", 120)
    assert summary["writer_tokens"] == 120 * 50
    assert summary["services"] == {"chat": {"calls": 120, "tokens": 120 * 50, "failures": 0}}
    assert summary["hops"]["without_query"] == 0
    total = len(server.asked)
    again = clone.stage("augment")
    assert "0 requests sent, 120 replies from the cache" in again.stdout
    assert ledger.read(clone.root)["augment"]["services"]["chat"]["hits"] == 120
    assert len(server.asked) == total
    assert _folder(clone.root) == made
    files = [path for path in clone.root.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in done.stdout + done.stderr + again.stdout + again.stderr
