"""What `make score` shows: every reward of a method at work on recorded trajectories, the same as in training."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks import own
from tasks.methods import build, loader
from tasks.rl.experience import collate
from tasks.rl.method import Method
from tasks.rl.samples import whole_trajectories
from tasks.score import Scored, columns, placed, refused, score, show
from tasks.score.__main__ import main, newest
from tasks.score.read import Played, read
from tasks.store import DataError
from tests import shipped
from tests.docs.documents import documents
from tests.shipped import ROOT

QUESTION = {"question": "What is the capital of France?", "answers": ["Paris"]}
SEARCH = {"text": "<think> so </think> <search> capital of France </search>", "hits": [{"text": "Paris is big."}]}
TURNS = [SEARCH, {"text": "<answer> Paris </answer>"}]


def method_of(name: str) -> Method:
    return build(loader.load(name, "smoke", ROOT), None)


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read_all(path: Path, method: Method) -> list[Played]:
    return read(path, method.grammar, {})


@pytest.mark.parametrize(
    ("fields", "count"),
    [({"hits": []}, 1), ({"observation": "Nothing."}, 1), ({}, 0), ({"hits": [], "executed": False}, 0)],
)
def test_a_search_that_found_nothing_has_run_all_the_same(tmp_path: Path, fields: dict[str, Any], count: int) -> None:
    path = written(tmp_path, QUESTION | {"turns": [{"text": "<search> x </search>"} | fields]})
    (one,) = read_all(path, method_of("search_r1_grpo"))
    assert one.trajectory.num_searches == count


def test_a_short_row_is_a_whole_trajectory(tmp_path: Path) -> None:
    method = method_of("search_r1_grpo")
    path = written(
        tmp_path, QUESTION | {"answer": "paris"}, QUESTION | {"turns": TURNS}, QUESTION | {"turns": [SEARCH]}
    )
    short, long, open_ = (one.trajectory for one in read_all(path, method))
    assert (short.answer, short.status, short.num_searches) == ("paris", "answered", 0)
    assert (long.answer, long.status, long.num_searches) == ("Paris", "answered", 1)
    assert (open_.answer, open_.status, open_.num_searches) == (None, "open", 1)
    assert [turn.end - turn.start for turn in long.turns] == [8, 3]
    assert len(long.response_ids) == len(long.loss_mask) == long.turns[-1].observation_end
    (first, second, third) = score(method, read_all(path, method), {})
    assert [placed(one.total) for one in (first, second, third)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answers": ["Paris"], "answer": "x"}, "row 2: field 'question' is missing"),
        ({"question": "Who?", "answer": "x"}, "row 2: field 'answers': found none"),
        ({"question": "Who?", "answers": "Paris", "answer": "x"}, "row 2: answers: found 'Paris', expected a list"),
        (QUESTION | {"anwser": "x"}, "row 2: unknown field 'anwser'"),
        (QUESTION, "row 2: found neither 'turns' nor 'answer'"),
        (QUESTION | {"turns": [{"hits": []}]}, r"row 2: turns\[0\]: found neither 'text' nor 'kind'"),
        (QUESTION | {"turns": [{"text": 3}]}, r"row 2: turns\[0\]\.text: found 3 \(int\), expected text"),
        (QUESTION | {"turns": [{"text": "x", "txt": ""}]}, r"row 2: unknown field 'turns\[0\]\.txt'"),
        (
            QUESTION | {"turns": [{"kind": "find", "content": "x"}]},
            r"row 2: turns\[0\]\.kind: found 'find', expected 's",
        ),
        ('{"question": "Who', "rows.jsonl: row 2"),
        ("[]", "row 2"),
    ],
)
def test_a_wrong_row_is_named_with_file_row_and_field(
    tmp_path: Path, row: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, QUESTION | {"answer": "Paris"}, row)
    with pytest.raises(DataError, match=told) as caught:
        read_all(path, method_of("search_r1_grpo"))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl: found no row"):
        read_all(written(tmp_path), method_of("search_r1_grpo"))


def test_rewards_of_sub_questions_read_them_from_the_row(tmp_path: Path) -> None:
    """StepSearch: reference queries, and the gain of each search about gold passages, on the turn that searched."""
    hop = {"question": "What is the capital of France?", "answer": "Paris", "queries": ["capital of France"]}
    gold = {"id": "p", "title": "", "text": "Paris is big."}
    answer = {"text": "<think> so </think> <answer> Paris </answer>"}
    row = QUESTION | {"turns": [SEARCH, SEARCH, answer], "decomposition": [hop], "gold_passages": [gold]}
    method = method_of("stepsearch")
    (one,) = score(method, read_all(written(tmp_path, row), method), {})
    assert one.by_reward["key"].components["key"] == 1.0
    first, second = (value for _, value in one.by_reward["search_turns"].placed)
    assert first > 0 > second, "the first search found all, the second found the same once more"
    lines = show.trajectory_lines(one)
    assert [re.search(r"on turn (\d)", line)[1] for line in lines if line.startswith("   search_turns")] == ["1", "2"]  # type: ignore[index]


def scored_pair(tmp_path: Path, name: str = "search_r1_grpo", **more: Any) -> tuple[Method, list[Scored]]:
    method = method_of(name)
    wrong = QUESTION | {"turns": [{"text": "<answer> Lyon \u001b[2J\u202e </answer>"}]}
    other = {"question": "Who?", "answers": ["Anne"], "answer": "Anne"}
    rows = [{**one, **more} for one in (QUESTION | {"answer": "Paris"}, wrong, other)]
    return method, score(method, read_all(written(tmp_path, *rows), method), {})


def test_the_advantage_is_that_of_training_where_a_question_stands_twice(tmp_path: Path) -> None:
    method, scored = scored_pair(tmp_path)
    pair = scored[:2]
    samples = whole_trajectories([one.played.trajectory for one in pair])
    trained = method.advantage(collate(samples, [one.total for one in pair])).advantages
    assert trained is not None
    for row, one in enumerate(pair):
        assert one.advantages == pytest.approx(trained[row, : len(one.played.pieces)].tolist())
    right, wrong = (show.trajectory_lines(one)[-2] for one in pair)
    assert "advantage +0.7" in right
    assert "advantage -0.7" in wrong
    assert scored[2].advantages is None, "nothing stands beside it"
    assert show.summary_tree(scored, 0)["groups"] == 1


def test_what_the_filter_of_a_method_leaves_out_is_said(tmp_path: Path) -> None:
    rows = [QUESTION | {"answer": answer} for answer in ("Paris", "Paris")]  # All alike: nothing to learn from.
    method = method_of("dapo")
    alike = score(method, read_all(written(tmp_path, *rows), method), {})
    assert [one.is_kept for one in alike] == [False, False]
    assert all("(the filter leaves it out)" in "\n".join(show.trajectory_lines(one)) for one in alike)
    _, scored = scored_pair(tmp_path, "dapo")
    assert [one.is_kept for one in scored[:2]] == [True, True]
    assert "of which the filter keeps 2." in "\n".join(show.summary_lines(method, scored, 0))


def test_plays_of_other_steps_and_policies_are_no_group(tmp_path: Path) -> None:
    method = method_of("search_r1_grpo")
    rows = [QUESTION | {"answer": name, "step": step, "policy": "mine"} for step, name in enumerate(("Paris", "Lyon"))]
    scored = score(method, read_all(written(tmp_path, *rows), method), {})
    assert [one.advantages for one in scored] == [None, None]
    assert "no advantage within a group" in show.summary_lines(method, scored, 0)[-1]


def test_the_table_has_mean_share_and_bounds(tmp_path: Path) -> None:
    method, scored = scored_pair(tmp_path)
    column = columns(scored)["answer"]
    assert (column.mean, column.nonzero, column.least, column.most) == (
        pytest.approx(2 / 3),
        pytest.approx(2 / 3),
        0,
        1,
    )
    table = "\n".join(show.summary_lines(method, scored, 2))
    assert re.search(r"^answer +0\.667 +0\.67 +0\.000 +1\.000$", table, re.MULTILINE)
    assert "2 failed ones left out" in table


@pytest.mark.parametrize("colours", [False, True])
def test_no_text_moves_the_cursor_and_no_line_is_wide(tmp_path: Path, colours: bool) -> None:
    method, scored = scored_pair(
        tmp_path,
        question="W" * 500 + "\u001b]0;x\u0007",
        policy="\u001b[31m",
        mode="x" * 300,
        answers=["Paris \r\n" * 99],
    )
    lines = [line for one in scored for line in show.trajectory_lines(one, colours)]
    lines += show.summary_lines(method, scored, 0)
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) if colours else line for line in lines]
    assert all(line.isprintable() for line in plain)
    assert max(map(len, plain)) <= show.WIDTH
    assert any("\x1b" in line for line in lines) == colours


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A clone in which nothing has run."""
    root = tmp_path / "bare"
    root.mkdir()
    (root / "conf").symlink_to(ROOT / "conf")
    (root / "params.yaml").write_bytes((shipped.root() / "params.yaml").read_bytes())
    return root


def test_the_page_scores_its_own_reward(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files, written where it says, print what it shows."""
    page = next(one for one in documents() if one.path.name == "methods-of-yours.md")
    files = [block for language in ("python", "yaml") for block in page.blocks(language) if block.startswith("# ../")]
    assert len(files) == 2
    plays, shown = tmp_path / "my_parts/plays.jsonl", page.blocks("text")[-1]
    for block in files:
        place = tmp_path / block.splitlines()[0].removeprefix("# ../").replace("/mine.", "/of_the_page.")
        place.parent.mkdir(parents=True)
        place.write_text(block)
    plays.write_text(page.blocks("json")[0])
    monkeypatch.setenv(own.VARIABLE, str(tmp_path / "my_parts"))
    assert main(["--method", "of_the_page", "--file", str(plays)], bare) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert shown.strip() in out
    del sys.modules["tasks.rewards.searches_once"]


def test_programs_get_json(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, QUESTION | {"turns": TURNS}, QUESTION | {"status": "failed", "turns": [SEARCH]})
    assert main(["--method", "search_r1_grpo", "--file", str(path), "--json"], bare) == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["rewards"]["answer"]["components"] == {"em": 1.0}
    assert (first["row"], first["total"], last["summary"]["failed"]) == (1, 1.0, 1), (
        "training never scores a failed one"
    )


def test_what_cannot_be_shown_is_said_in_one_line(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, QUESTION | {"answer": "Paris"})
    assert refused(method_of("search_r1_grpo").rewards, method_of("search_r1_grpo")) is None
    for words, told in (
        (["--method", "tips"], "it asks log_probs of the policy under training"),
        (["--method", "sterch"], "METHOD=: unknown method 'sterch'"),
        (["--method", "r_search"], "make run METHODS=r_search"),
    ):
        assert main([*words, "--file", str(path)], bare) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert told in err
        assert err.count("\n") == 1


def test_without_a_file_the_newest_training_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run has recorded trajectories yet\. Run `make smoke"):
        newest(tmp_path, "mine")
    for name in ("mine-0", "base-0", "other-1"):
        folder = tmp_path / "artifacts/train" / name
        folder.mkdir(parents=True)
        if name != "base-0":
            (folder / "trajectories.jsonl").write_text("{}\n")
    assert newest(tmp_path, "mine").parent.name == "mine-0"
    assert newest(tmp_path, "third").parent.name == "other-1"
