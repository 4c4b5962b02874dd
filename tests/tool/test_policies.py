"""Which policy a command means, and what it says of one that is not there."""

from __future__ import annotations

import importlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import conf, parts, planned, retrieval, store
from tasks.agent.grammars.r_search import RSearchGrammar
from tasks.records import systems
from tasks.records.systems import SystemRecord
from tasks.retrieval import manifest as manifests
from tasks.store import DataError
from tasks.tool import policies
from tests.tiny import PROMPT
from tests.tool.conftest import BUDGET, ROOT, Learned, write_summary

BASE = SystemRecord(
    name="base", seed=1, kind="policy", policy="artifacts/base/1/policy", policy_sha256="a" * 64, made_by="base@1",
    is_trained=False,
)  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a run leaves of two trained policies, a start policy and a prompted system."""
    for name in ("r_search-0", "search_r1_grpo-0"):
        (tmp_path / policies.FOLDER / name).mkdir(parents=True)
        write_summary(tmp_path / policies.FOLDER / name, RSearchGrammar())
    for record in (BASE, replace(BASE, name="chat", kind="chat_agent", policy=None)):
        folder = tmp_path / policies.FOLDER / f"{record.name}-1"
        folder.mkdir()
        systems.write(folder, record)
    grammar, rollout = parts.plain(RSearchGrammar()), conf.plain(replace(BUDGET, max_turns=1))
    playing = {"kind": "policy", "prompt": conf.plain(PROMPT), "grammar": grammar, "rollout": rollout, "services": {}}
    plan = planned.Plan({"playing": playing, "dtype": "bfloat16", "num_threads": 2}, {}, "")
    planned.write(tmp_path / planned.FOLDER, "evaluate@base-1", plan)
    return tmp_path


def test_a_name_and_a_folder_are_the_same_policy(clone: Path) -> None:
    by_name = policies.find("r_search-0", clone)
    assert by_name.weights == clone / "artifacts/train/r_search-0/policy"
    assert (by_name.name, by_name.kind().rollout) == ("r_search-0", BUDGET)  # type: ignore[attr-defined]
    assert policies.find(clone / "artifacts/train/r_search-0") == by_name


def test_a_start_policy_plays_as_in_its_evaluation_also_from_another_clone(clone: Path) -> None:
    for found in (policies.find("base-1", clone), policies.find(clone / "artifacts/train/base-1", Path("elsewhere"))):
        assert found.weights == clone / "artifacts/base/1/policy"
        assert found.kind().rollout.max_turns == 1  # type: ignore[attr-defined]
        assert (found.dtype, found.num_threads) == ("bfloat16", 2)
    (clone / planned.path_of("evaluate@base-1")).unlink()
    with pytest.raises(
        ValueError, match=r"evaluate/base-1\.json: the file is missing, so nothing says how 'base-1' plays"
    ):
        policies.find("base-1", clone)


def test_a_start_policy_outside_a_clone_is_named() -> None:
    folder = Path("/tmp") / f"base-{os.getpid()}"  # With too few folders above it.
    folder.mkdir()
    try:
        systems.write(folder, replace(BASE, seed=os.getpid()))
        with pytest.raises(
            DataError, match=f"{folder}: found a start policy outside a clone, expected it in artifacts/"
        ):
            policies.find(folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("serch_r1_grpo-0", "Did you mean 'search_r1_grpo-0'? Known: base-1, r_search-0, search_r1_grpo-0."),
        ("artifacts/train/r_search-9", "POLICY='r_search-9': there is no such policy. Did you mean 'r_search-0'?"),
        ("", "POLICY='': there is no such policy. Known: base-1"),
        ("chat-1", "POLICY='chat-1': there is no such policy."),
        ("\x1b[2J", r"POLICY='\x1b[2J': there is no such policy."),
        ("no/such/folder", "no/such/folder/summary.json: the file is missing. Expected a folder that a run has"),
    ],
)
def test_what_is_no_policy(clone: Path, named: str, told: str) -> None:
    with pytest.raises(DataError) as refused:
        policies.find(named, clone)
    assert told in str(refused.value)


def test_a_folder_that_holds_no_policy(clone: Path) -> None:
    (clone / "artifacts/train/r_search-0/policy").mkdir()
    with pytest.raises(DataError, match=r"Name \S+/artifacts/train/r_search-0, the folder above"):
        policies.find(clone / "artifacts/train/r_search-0/policy")
    with pytest.raises(DataError, match="'chat' plays no policy, it asks a server"):
        policies.find(clone / "artifacts/train/chat-1")
    for broken in ([], {"settings": None}, {"settings": {"method": 7}}, {"settings": {"method": {}, "train": 7}}):
        store.write_json(clone / "artifacts/train/r_search-0/summary.json", broken)
        with pytest.raises(DataError, match="found no settings of a training"):
            policies.find("r_search-0", clone)


def test_a_clone_where_nothing_is_trained(clone: Path, tmp_path: Path) -> None:
    shutil.rmtree(clone / "artifacts/train")
    for _ in range(2):
        with pytest.raises(DataError, match="nothing is trained yet, artifacts/train has no policy"):
            policies.find("r_search-0", clone)
        (clone / "artifacts/train").mkdir(exist_ok=True)


def test_a_policy_without_evidence_is_named(clone: Path) -> None:
    policies.find("r_search-0", clone).require_evidence()
    write_summary(clone / "artifacts/train/r_search-0", RSearchGrammar(evidence=False))
    without: Any = policies.find("r_search-0", clone)
    with pytest.raises(DataError, match="this policy writes no evidence"):
        without.require_evidence()


@pytest.mark.parametrize("name", ["r_search-0", "base-1"])
def test_a_policy_whose_weights_have_changed_does_not_play(name: str, clone: Path) -> None:
    policy = policies.find(name, clone)
    policy.weights.mkdir(parents=True)
    file = policy.weights / "model.safetensors"
    file.write_bytes(b"as trained")
    if name == "base-1":
        systems.write(clone / policies.FOLDER / name, replace(BASE, policy_sha256=store.sha256(file)))
    else:
        summary = clone / policies.FOLDER / name / "summary.json"
        store.write_json(summary, {**store.read_json(summary), "policy_sha256": store.sha256(file)})
    assert policies.find(name, clone).checked_weights() == policy.weights
    file.write_bytes(b"as brained")
    with pytest.raises(DataError, match=r"found weights with sha256 \w+, expected \w+, those that were trained"):
        policies.find(name, clone).checked_weights()


@pytest.fixture
def worlds(learned: Learned, clone: Path) -> Path:
    """The clone with the index that its policies were taught with, one of other passages and one of another engine."""
    shutil.copytree(learned.index, clone / "index")
    manifest = clone / "index" / manifests.NAME
    hashes = {"index_sha256": store.sha256(manifest), "corpus_sha256": manifests.read(clone / "index").corpus_sha256}
    trained = replace(BASE, name="r_search", seed=0, is_trained=True, made_by="train@r_search-0", **hashes)
    systems.write(clone / policies.FOLDER / "r_search-0", trained)
    systems.write(clone / policies.FOLDER / "base-1", replace(BASE, **hashes))

    other = clone / "other.jsonl"
    other.write_text('{"id": "p", "title": "T", "text": "x"}\n')
    settings = retrieval.load_settings("bm25", ROOT)
    retrieval.build(other, clone / "smoke", settings)
    retrieval.build(learned.corpus, clone / "engine", replace(settings, k1=1.3))
    return clone


def test_a_policy_is_refused_over_another_index(worlds: Path) -> None:
    for name in ("r_search-0", "base-1", "search_r1_grpo-0"):  # Nothing says what the last was taught with.
        policies.find(name, worlds).require_index(worlds / "index")
    policies.find("search_r1_grpo-0", worlds).require_index(worlds / "smoke")
    known = store.sha256(worlds / "index" / manifests.NAME)[:12]
    for name in ("r_search-0", "base-1"):
        policy = policies.find(name, worlds)
        for folder, told in (("smoke", "`make smoke`, has replaced its index"), ("engine", "or name RETRIEVER=")):
            found = store.sha256(worlds / folder / manifests.NAME)[:12]
            with pytest.raises(DataError) as refused:
                policy.require_index(worlds / folder)
            for part in (f"found index {found} (bm25, ", f"expected {known} (corpus ", f"policy {name} was", told):
                assert part in str(refused.value)
        policy.require_index(worlds / "engine", is_another=True)
        with pytest.raises(DataError, match="has replaced its index"):
            policy.require_index(worlds / "smoke", is_another=True)


@pytest.mark.parametrize("module", ["ask", "chat_server", "mcp_server", "measure", "__main__"])
def test_every_command_that_plays_a_policy_refuses_it(
    worlds: Path, module: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(worlds)
    (worlds / "conf").symlink_to(ROOT / "conf")
    (worlds / "artifacts/data").mkdir()
    (worlds / "artifacts/data/questions.jsonl").symlink_to(worlds / "none")
    monkeypatch.setattr("tasks.tool.measure.choose", lambda *_: [])
    monkeypatch.setattr("tasks.tool.measure.read_questions", lambda _: [])
    port = ["--port", "0"]
    more = {"ask": ["--question", "who"], "measure": ["--reader", "x"], "chat_server": port, "__main__": port}
    words = ["--policy", "r_search-0", "--index", "smoke", *more.get(module, [])]
    main = importlib.import_module(f"tasks.tool.{module}").main
    for given, told in (
        (words, "policy r_search-0 was trained"),
        ([*words, "--any-index"], "policy: the model folder is missing"),
    ):
        assert main(given) == 1
        err = capfd.readouterr().err
        assert ("was trained" in err) == ("--any-index" not in given), err
        assert told in err, err
