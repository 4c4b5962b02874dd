"""Playing in steps: the same as `play`, candidates from one row, and rows that may not be asked."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.agent.rollout import Player
from tasks.agent.row import Row
from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.store import DataError
from tests.tiny import Script, Shelf, make_model, make_player, question

SAMPLING = Sampling(1.0, 1.0, (), 3)
SEARCH, ANSWER = "<search> Avenor </search>", "<answer> Bristow </answer>"


def real_player(tokenizer: Any, **changes: Any) -> Player:
    """A player of a random policy that is made anew each time."""
    budgets = {"max_turns": 3, "max_call_tokens": 9, "max_total_tokens": 500} | changes
    return make_player(PlainGenerator(make_model(tokenizer), tokenizer, True), tokenizer, **budgets)


def to_the_end(player: Player, rows: list[Row]) -> None:
    while playing := [row for row in rows if not row.is_over]:
        player.observe(playing, player.act(playing))


def test_steps_by_hand_are_a_play(merging: Any) -> None:
    """In batches of two questions; trajectories, group ids and costs are the same."""
    questions = [question(i) for i in range(5)]
    whole, stepped = (real_player(merging, batch_rows=4) for _ in range(2))
    expected = whole.play(questions, 2, SAMPLING)
    found = []
    for batch in stepped.batches(len(questions), 2):
        rows = stepped.start(questions, 2, SAMPLING, batch)
        to_the_end(stepped, rows)
        found += stepped.finish(rows)
    assert found == expected
    assert vars(stepped.cost) == vars(whole.cost)


def test_rows_may_be_played_apart(merging: Any) -> None:
    """Which rows act together changes no draw."""
    questions = [question(i) for i in range(2)]
    expected = real_player(merging).play(questions, 2, SAMPLING)
    player = real_player(merging)
    rows = player.start(questions, 2, SAMPLING)
    for row in reversed(rows):
        to_the_end(player, [row])
    found = player.finish(rows)
    assert [t.response_ids for t in found] == [t.response_ids for t in expected]
    assert [t.turns for t in found] == [t.turns for t in expected]


def test_candidates_of_one_row(tokenizer: Any) -> None:
    """Three candidates are written from one prefix; one is kept and plays on, the others end unobserved."""
    shelf = Shelf()
    script = Script(tokenizer, [[SEARCH, "so"], [ANSWER], ["<search> Hask </search>", ANSWER], [SEARCH]])
    player = make_player(script, tokenizer, shelf)
    (row,) = player.start([question()], 1, SAMPLING)
    player.observe([row], player.act([row]))
    shared = list(row.response)
    candidates = player.fork(row, 3)
    assert [candidate.number for candidate in candidates] == [1, 2, 3]
    actions = player.act(candidates)
    assert [action.kind for action in actions] == ["answer", "search", "search"]
    assert [candidate.is_over for candidate in candidates] == [True, False, False]
    assert len(shelf.asked) == 1  # Nothing is searched before a candidate is observed.

    so_far = [candidate.trajectory() for candidate in candidates]
    assert [(t.status, t.answer) for t in so_far] == [("answered", "Bristow"), ("open", None), ("open", None)]
    assert all(list(t.response_ids[: len(shared)]) == shared for t in so_far)
    assert [t.turns[1].action for t in so_far] == actions
    assert all(t.turns[0] == row.turns[0] for t in so_far)

    kept = candidates[1]
    with pytest.raises(ValueError, match=r"question 'q0', row 2: its last call has no observation. Call observe first"):
        player.act([kept])
    player.observe([kept], [actions[1]])
    with pytest.raises(ValueError, match=r"question 'q0', row 2: it has not acted. Call act first"):
        player.observe([kept], [actions[1]])
    player.finish([row, candidates[2]])
    assert script.closed == {0, 1, 3}
    to_the_end(player, [kept])
    (played,) = player.finish([kept])
    assert (played.status, played.num_searches, len(played.turns)) == ("answered", 2, 3)
    assert list(played.prompt_ids + played.response_ids) == script.rows[2]
    assert row.response == shared  # A fork's text is its own.
    assert len(row.turns) == 1


def test_rows_that_may_not_be_asked(tokenizer: Any) -> None:
    script = Script(tokenizer, [[ANSWER], [SEARCH, ANSWER]])
    player = make_player(script, tokenizer)
    done, going = player.start([question()], 2, SAMPLING)
    actions = player.act([done, going])
    player.observe([done, going], actions)  # A row that is over is left as it is.
    assert len(done.turns) == 1
    for request in (lambda: player.act([going, done]), lambda: player.fork(done, 2)):
        with pytest.raises(
            ValueError, match=r"question 'q0', row 0: it is over \(answered\), expected a row that is being played"
        ):
            request()
    player.finish([going])
    with pytest.raises(ValueError, match=r"row 1: it is over \(open\)"):
        player.fork(going, 2)
    assert player.act([]) == []


def test_rows_of_two_sessions_do_not_act_together(merging: Any) -> None:
    player = real_player(merging)
    rows = [player.start([question(i)], 1, SAMPLING)[0] for i in range(2)]
    with pytest.raises(ValueError, match="questions 'q0' and 'q1': their rows belong to two sessions"):
        player.act(rows)


def test_a_prompt_over_its_budget_opens_no_session(tokenizer: Any) -> None:
    script = Script(tokenizer, [[ANSWER], [ANSWER]])
    with pytest.raises(DataError, match="question 'q1': its prompt has"):
        make_player(script, tokenizer).start([question(0), question(1, "Hask " * 100)], 1, SAMPLING)
    assert script.opened == 0
