"""The trained agent as a tool: what it finds, what clients of a retriever get, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks import conf, store
from tasks.agent.grammars.r_search import RSearchGrammar
from tasks.retrieval import RetrievalError
from tasks.store import DataError
from tasks.tool.agent import Found, open_search, opened
from tasks.tool.answers import sources
from tasks.tool.gains import EVIDENCE, PASSAGES_READ, plain
from tasks.tool.measure import main
from tasks.tool.retriever import TITLE, EvidenceRetriever, ranked
from tasks.types import Hit
from tests.reader.small import write_reader
from tests.tool.conftest import BUDGET, ROOT, Learned, write_summary


@pytest.fixture(scope="module")
def agent(learned: Learned) -> Any:
    search = open_search(learned.index, learned.corpus)
    with opened(learned.folder, search, root=ROOT) as made:
        yield made


def test_it_finds_the_evidence_of_questions_that_need_two_searches(agent: Any, learned: Learned) -> None:
    found = agent.find([question.question for question in learned.questions])
    for question, one in zip(learned.questions, found, strict=True):
        assert len(one.queries) == 2
        assert question.answers[0] in one.evidence
        assert [hit.passage_id for hit in one.passages] == list(question.gold_passage_ids)
        assert one.evidence == one.passages[-1].text
    assert agent.find([]) == []
    assert agent.find([learned.questions[0].question] * 5) == [found[0]] * 5, "more than one batch"


def test_a_client_of_a_retriever_gets_evidence_first_and_as_many_hits_as_it_asks_for(
    agent: Any, learned: Learned
) -> None:
    count = 40
    retriever = EvidenceRetriever(agent, count)
    asked = [question.question for question in learned.questions]
    for top_k in (1, 3, 5):
        for question, hits in zip(learned.questions, retriever.search(asked, top_k), strict=True):
            assert len(hits) == top_k
            assert (hits[0].title, hits[0].passage_id[:9]) == (TITLE, "evidence:")
            assert question.answers[0] in hits[0].text
            assert [hit.score for hit in hits] == [1 / rank for rank in range(1, top_k + 1)]
            assert len({hit.passage_id for hit in hits}) == top_k
            assert [hit.passage_id for hit in hits[1:3]] == list(question.gold_passage_ids)[: top_k - 1]
    assert retriever.search([], 1) == []
    with pytest.raises(ValueError, match="top_k=0"):
        retriever.search(["x"], 0)


def test_ranks_without_evidence() -> None:
    read, other = Hit("a", 9.0, "A", "a"), Hit("b", 8.0, "B", "b")
    hits = ranked("q", Found("", ("x",), (read,), False), [other, read], 3)
    assert [(hit.passage_id, hit.score) for hit in hits] == [("a", 1.0), ("b", 0.5)]
    assert ranked("q", Found("e", (), (), False), [other], 1)[0].text == "e"


def test_a_failed_search_is_an_error_and_no_empty_evidence(agent: Any, learned: Learned) -> None:
    class Away:
        def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
            raise RetrievalError("the index is away")

    search = Away()
    with opened(learned.folder, search, root=ROOT) as lost:
        lost.system.player.sleep = lambda seconds: None
        with pytest.raises(RetrievalError, match="a search of the agent failed: the index is away"):
            lost.find([learned.questions[0].question])


def test_a_question_that_is_too_long_is_refused(agent: Any) -> None:
    with pytest.raises(RetrievalError, match=r"the agent cannot take this question: .*max_prompt_tokens is 200"):
        agent.find(["what " * 400])


def test_half_of_a_surrogate_pair_is_no_question(agent: Any, learned: Learned) -> None:
    with pytest.raises(RetrievalError, match="this question: found half of a surrogate pair at character 2"):
        agent.find([learned.questions[0].question, "x \ud800"])


def test_a_policy_that_writes_no_evidence_is_refused(learned: Learned, tmp_path: Path) -> None:
    write_summary(tmp_path, RSearchGrammar(evidence=False))
    search = open_search(learned.index, None)
    with pytest.raises(DataError, match="this policy writes no evidence"), opened(tmp_path, search, root=ROOT):
        pass
    with pytest.raises(DataError, match=r"summary\.json: the file is missing"), opened(ROOT, search, root=ROOT):
        pass


def test_another_policy_or_setting_has_another_identity(agent: Any, learned: Learned, tmp_path: Path) -> None:
    shutil.copytree(learned.folder, tmp_path / "train")
    summary = store.read_json(tmp_path / "train" / "summary.json")
    summary["settings"]["rollout"] = conf.plain(BUDGET) | {"max_turns": 1}
    store.write_json(tmp_path / "train" / "summary.json", summary)
    with opened(tmp_path / "train", agent.retriever, root=ROOT) as other:
        assert other.identity != agent.identity
    with opened(learned.folder, agent.retriever, root=ROOT) as same:
        assert same.identity == agent.identity


# Measured -------------------------------------------------------------------------------------------------------------


def test_what_the_other_model_reads(agent: Any, learned: Learned) -> None:
    shown: list[int] = []
    read = sources(learned.questions, agent, agent.retriever, [1, 3], shown.append)
    assert set(read) == {plain(1), plain(3), EVIDENCE, PASSAGES_READ}
    assert shown[-1] == len(learned.questions)
    for number, question in enumerate(learned.questions):
        assert question.answers[0] in read[EVIDENCE][number]
        assert read[plain(3)][number].startswith(read[plain(1)][number])


def test_the_command_prints_and_writes_a_table(learned: Learned, tmp_path: Path, capsys: Any) -> None:
    reader = write_reader(tmp_path / "reader")
    words = ["--policy", learned.folder, "--reader", reader, "--index", learned.index, "--corpus", learned.corpus]
    words += ["--questions", learned.corpus.parent / "questions.jsonl", "--out", tmp_path / "tool.json"]
    words += ["--max-questions", "4", "--split", "dev", "--passages", "1", "2"]
    assert main([str(word) for word in words]) == 0
    table = capsys.readouterr().out
    assert f"| {EVIDENCE} | all | 4 |" in table
    assert {row["source"] for row in store.read_json(tmp_path / "tool.json")} >= {EVIDENCE, plain(1), plain(2)}
    words[1] = tmp_path
    assert main([str(word) for word in words]) == 1
    assert "summary.json: the file is missing" in capsys.readouterr().err
