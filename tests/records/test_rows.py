"""Rows of scores, trajectories, metrics and systems: what is written is read again, and a fault names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.records import schema, systems
from tasks.records.metrics import MetricRow
from tasks.records.scores import ScoreRow
from tasks.records.systems import SystemRecord
from tasks.records.trajectories import TrajectoryRow, trajectory_row
from tasks.store import DataError, dump, write_json
from tasks.types import Action, Cost, Episode, Hit, Note, Question, Scores, Trajectory, Turn

QUESTION = Question("d/1", "d", "test", "Who?", ("Bristow",), 2, gold_passage_ids=("p1",))
HITS = (Hit("p1", 1.23456, "Avenor", "A town."), Hit("p2", 1, "Tes", "Another."))
SCORE: dict[str, Any] = {
    "question_id": "d/1", "dataset": "d", "split": "test", "hops": 2, "type": None, "mode": "greedy", "em": 1.0,
    "f1": 1.0, "subem": 1.0, "searches": 1, "actions": 2, "valid_actions": 2, "recall": 0.5, "status": "answered",
    "answer_in_passage": 1.0, "answer_shown": 1.0,
    "generated_tokens": 9, "prefill_tokens": 20, "answer": "Name",
}  # fmt: skip
RECORD = SystemRecord(
    name="base",
    seed=0,
    kind="policy",
    policy="artifacts/base/0/policy",
    policy_sha256="x",
    made_by="base@0",
    is_trained=False,
)


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def _trajectory() -> Trajectory:
    """A search of two tokens that shows one, an answer of one."""
    turns = (Turn(Action("search", "x"), 0, 2, 3, executed=True, hits=HITS), Turn(Action("answer", "y"), 3, 4, 4))
    ids, own = tuple(map(ord, "abcd")), (True, True, False, True)
    return Trajectory("d/1", "d/1#0", (ord("Q"),), ids, own, (-0.5, -0.25, 0.0, -1.0), turns, "answered", "y")


def test_a_trajectory_is_an_episode_whose_tokens_give_its_cost() -> None:
    played = _trajectory()
    assert isinstance(played, Episode)
    assert played.cost == Cost(generated_tokens=3, prefill_tokens=2)
    assert (played.num_generated, played.num_searches, played.last_generated) == (3, 1, 3)


def test_the_row_of_a_trajectory_by_hand() -> None:
    scores = Scores(1.0, ((1, 0.5), (3, 1.0)))
    advantages = [0.1234567, 0.2, 0.0, -0.3]
    row = trajectory_row(
        _trajectory(), QUESTION, policy="m", seed=3, mode="sampled", step=2, tokenizer=Letters(), scores=scores,
        advantages=advantages,
    )  # fmt: skip
    tree = schema.plain(row)
    assert (tree["prompt"], tree["outcome"], tree["step"], tree["policy"]) == ("Q", 1.0, 2, "m")
    search, answer = tree["turns"]
    assert (search["tokens"], search["logprobs"], search["advantages"]) == (["a", "b"], [-0.5, -0.25], [0.123457, 0.2])
    assert (search["reward"], answer["reward"]) == (0.5, 1.0)
    assert [(hit["score"], hit["is_gold"]) for hit in search["hits"]] == [(1.2346, True), (1.0, False)]
    assert "text" not in search
    assert schema.parse(TrajectoryRow, tree, "x") == row


def test_the_notes_of_a_trajectory_are_in_its_row_by_turn() -> None:
    notes = (
        Note(1, "judge", -1.0, "guessed \ud800"),
        Note(-1, "f", 0.123456789),
        Note(0, "candidate", 0.5, "<search>y</search>", taken=False),
    )
    scores = Scores(1.0, (), notes=notes)
    row = trajectory_row(
        _trajectory(), QUESTION, policy="m", seed=0, mode="sampled", tokenizer=Letters(), scores=scores
    )
    tree = json.loads(dump(schema.plain(row)).encode())
    assert tree["notes"] == [
        {"turn": -1, "name": "f", "value": 0.123457},
        {"turn": 0, "name": "candidate", "value": 0.5, "text": "<search>y</search>", "taken": False},
        {"turn": 1, "name": "judge", "value": -1.0, "text": "guessed ?"},
    ]
    assert schema.parse(TrajectoryRow, tree, "x") == row


def test_a_row_without_notes_has_no_field_for_them() -> None:
    row = trajectory_row(_trajectory(), QUESTION, policy="m", seed=0, mode="sampled", tokenizer=Letters())
    assert "notes" not in schema.plain(row)
    assert schema.parse(TrajectoryRow, schema.plain(row), "x") == row


@pytest.mark.parametrize("fields", [(0, "f", float("nan")), (0, "f", float("inf")), (-2, "f", 0.5), (0, " ", 0.5)])
def test_a_note_that_no_reader_could_read_is_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"^note .* of turn .*: found value .*, expected a name, a turn"):
        Note(*fields)


def test_a_note_of_a_turn_that_was_not_played_is_refused() -> None:
    scores = Scores(0.0, (), notes=(Note(2, "f", 0.5),))
    with pytest.raises(ValueError, match="note 'f': turn=2: expected -1 to 1"):
        trajectory_row(_trajectory(), QUESTION, policy="m", seed=0, mode="sampled", tokenizer=Letters(), scores=scores)


def test_a_row_without_rewards_has_the_integer_0_and_no_advantages() -> None:
    row = trajectory_row(_trajectory(), QUESTION, policy="m", seed=3, mode="greedy", outcome=0.0, tokenizer=Letters())
    assert '"advantages":null' in dump(schema.plain(row))
    assert '"reward":0,' in dump(schema.plain(row))


def test_an_episode_without_tokens_has_text_in_their_place() -> None:
    turn = Turn(Action("answer", "Bristow"), text="It is Bristow.")
    episode = Episode("d/1", (turn,), "answered", "Bristow", cost=Cost(4, 30))
    tree = schema.plain(trajectory_row(episode, QUESTION, policy="s", seed=0, mode="greedy", outcome=1.0))
    assert (tree["prompt"], tree["outcome"]) == (None, 1.0)
    assert {key: tree["turns"][0][key] for key in ("text", "tokens", "logprobs", "advantages")} == {
        "text": "It is Bristow.", "tokens": None, "logprobs": None, "advantages": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "tree", "message"),
    [
        (ScoreRow, SCORE | {"em": 0.5}, "x: em: found 0.5 (float), expected 0 or 1"),
        (ScoreRow, SCORE | {"mode": "beam"}, "x: mode: found 'beam', expected 'greedy' or 'sampled'"),
        (ScoreRow, SCORE | {"hops": 5}, "x: hops: found 5 (int), expected 4 or less"),
        (ScoreRow, SCORE | {"searches": True}, "x: searches: found True, expected a whole number"),
        (ScoreRow, SCORE | {"question_id": " "}, "x: question_id: found ' ', expected text that is not blank"),
        (ScoreRow, {k: v for k, v in SCORE.items() if k != "f1"}, "x: field 'f1' is missing"),
        # A row of an older version: every error would be unclear.
        (
            ScoreRow,
            {k: v for k, v in SCORE.items() if k != "answer_in_passage"},
            "x: field 'answer_in_passage' is missing",
        ),
        (MetricRow, {"step": -1, "metrics": {}}, "x: step: found -1 (int), expected 0 or more"),
        (MetricRow, {"step": 1, "metrics": {"loss": float("nan")}}, "x: metrics.loss: found nan (float), expected a f"),
        (MetricRow, {"step": 1, "metrics": {}, "mteric": 1}, "x: unknown field 'mteric'"),
        (MetricRow, [], "x: found [], expected a JSON object"),
    ],
)
def test_a_fault_names_field_found_and_expected(cls: type, tree: object, message: str) -> None:
    with pytest.raises(DataError) as caught:
        schema.parse(cls, tree, "x")
    assert str(caught.value).startswith(message)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    rows = [MetricRow(step=0, metrics={"loss": 0.5, "kl": None}), MetricRow(step=1, metrics={})]
    assert schema.write(tmp_path / "metrics.jsonl", rows) == 2
    assert [row for _, row in schema.read(MetricRow, tmp_path / "metrics.jsonl")] == rows
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"metrics":{"kl":null,"loss":0.5},"step":0}\n{"metrics":{},"step":1}\n'
    )


def test_a_system_is_read_from_its_own_folder_alone(tmp_path: Path) -> None:
    systems.write(tmp_path / "base-0", RECORD)
    assert systems.read(tmp_path / "base-0") == RECORD
    write_json(tmp_path / "other-0" / systems.FILE, schema.plain(RECORD))
    with pytest.raises(DataError, match=r"system\.json: found base-0, expected other-0: run `train` again"):
        systems.read(tmp_path / "other-0")
