"""When a run has collapsed, and what a batch of rollouts looks like."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.rl.samples import whole_trajectories
from tasks.text import normalize
from tasks.train.health import CollapseConf, repeated_query_rate, rollout_metrics
from tasks.types import Action, Scores, Trajectory, Turn
from tests.tiny import make_grammar, play_script

OFF: dict[str, Any] = {
    "patience": 2, "min_valid_action_rate": None, "max_approx_kl": None, "max_validation_drop": None,
    "max_skipped": None,
}  # fmt: skip


def history(**columns: list[float | None]) -> list[dict[str, Any]]:
    """Steps 1, 2, ... with these metrics; None where a step does not report one."""
    length = max(map(len, columns.values()))
    return [
        {"step": i + 1, "metrics": {name: v[i] for name, v in columns.items() if v[i] is not None}}
        for i in range(length)
    ]


@pytest.mark.parametrize(
    ("rule", "columns", "wanted"),
    [
        ({"min_valid_action_rate": 0.2}, {"valid_action_rate": [0.9, 0.1, 0.1]}, "valid_action_rate was below 0.2"),
        ({"min_valid_action_rate": 0.2}, {"valid_action_rate": [0.1, 0.1, 0.2]}, None),  # it has recovered
        ({"min_valid_action_rate": 0.2}, {"valid_action_rate": [0.1]}, None),  # not for two steps yet
        ({"max_approx_kl": 1.0}, {"approx_kl": [0.0, 1.1, 2.0]}, "approx_kl was above 1 for 2 steps"),
        ({"max_approx_kl": 1.0}, {"approx_kl": [2.0, 1.0]}, None),
        ({"max_approx_kl": 1.0}, {"approx_kl": [2.0, None, 2.0], "x": [0, 0, 0]}, None),  # a step without an update
        ({"max_skipped": 3}, {"skipped_update": [None, 1.0, 1.0, 1.0]}, "3 updates in a row were skipped"),
        ({"max_skipped": 3}, {"skipped_update": [1.0, None, 1.0, 1.0]}, None),
        ({"max_skipped": 3}, {"skipped_update": [1.0, 1.0]}, None),
        ({"max_validation_drop": 0.6}, {"validation_em": [0.5, 0.19, 0.1]}, "validation EM fell from 0.500 to 0.190"),
        ({"max_validation_drop": 0.6}, {"validation_em": [0.5, 0.19, 0.2]}, None),  # 0.4 * 0.5 is not below itself
        ({"max_validation_drop": 0.6}, {"validation_em": [0.5, 0.1, None, 0.1]}, "validation EM fell"),
        ({"max_validation_drop": 0.6}, {"validation_em": [0.5, 0.1]}, None),
        ({"max_validation_drop": 0.6}, {"validation_em": [0.0, 0.0, 0.0]}, None),
        ({}, {"valid_action_rate": [0.0] * 9, "approx_kl": [9.0] * 9, "skipped_update": [1.0] * 9}, None),
    ],
)  # fmt: skip
def test_collapse(rule: dict[str, Any], columns: dict[str, list[float | None]], wanted: str | None) -> None:
    found = CollapseConf(**(OFF | rule)).reason(history(**columns))
    assert (found is None) if wanted is None else (found is not None and found.startswith(wanted))


def test_step_0_is_no_step_of_training() -> None:
    rows = [{"step": 0, "metrics": {"valid_action_rate": 0.0}}, *history(valid_action_rate=[0.0])]
    assert CollapseConf(**(OFF | {"min_valid_action_rate": 0.2})).reason(rows) is None


@pytest.mark.parametrize(
    "change",
    [{"patience": 0}, {"min_valid_action_rate": 1.0}, {"max_validation_drop": 0.0}, {"max_approx_kl": 0.0},
     {"max_skipped": 0}],
)  # fmt: skip
def test_bounds(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        CollapseConf(**(OFF | change))


# Repeated queries -----------------------------------------------------------------------------------------------------


def asking(*turns: tuple[str, ...], executed: bool = True) -> Trajectory:
    """A trajectory whose turns ask these queries."""
    made = tuple(Turn(Action("search", "; ".join(q), q), 0, 1, 1, executed=executed) for q in turns)
    return Trajectory("q", "g", (1,), (2,), (True,), (0.0,), made, "open")


def slow_rate(queries: list[list[str]]) -> float:
    pairs = [(i, j) for i, row in enumerate(queries) for j in range(len(row))]
    again = [1 for i, j in pairs if any(normalize(queries[i][k]) == normalize(queries[i][j]) for k in range(j))]
    return len(again) / len(pairs) if pairs else 0.0


@given(
    st.lists(
        st.lists(st.lists(st.sampled_from(["a b", "A  b!", "the a b", "c", ""]), min_size=1, max_size=3), max_size=4),
        max_size=4,
    )
)
def test_repeated_queries_agree_with_the_slow_rate(trajectories: list[list[list[str]]]) -> None:
    played = [asking(*(tuple(turn) for turn in turns)) for turns in trajectories]
    assert repeated_query_rate(played) == pytest.approx(
        slow_rate([list(itertools.chain(*turns)) for turns in trajectories])
    )


def test_repeats_are_counted_inside_a_trajectory_and_of_executed_queries() -> None:
    assert repeated_query_rate([asking(("x",)), asking(("x",))]) == 0.0
    assert repeated_query_rate([asking(("x", "y", "The X."))]) == pytest.approx(1 / 3)
    assert repeated_query_rate([asking(("x",), ("x",), executed=False)]) == 0.0


# Rollout metrics ------------------------------------------------------------------------------------------------------


def member(group: str, em: float, extra: float = 0.0) -> tuple[Trajectory, Scores]:
    return (
        Trajectory("q", group, (1,), (2,), (True,), (0.0,), (), "answered"),
        Scores(em + extra, ((0, em + extra),), {"em": em}),
    )


def metrics(*members: tuple[Trajectory, Scores]) -> dict[str, float]:
    played = [t for t, _ in members]
    return rollout_metrics(played, whole_trajectories(played), [s for _, s in members], len(members))


def test_shares_of_groups() -> None:
    """a fails, b succeeds, c is mixed, d fails with different penalties: a signal, and still all zero."""
    rows = [("a", 0, 0), ("a", 0, 0), ("b", 1, 0), ("b", 1, 0), ("c", 1, 0), ("c", 0, 0), ("d", 0, 0), ("d", 0, -0.5)]
    found = metrics(*(member(*row) for row in rows))
    assert found["share_all_zero"] == 0.5
    assert found["share_all_one"] == 0.25
    assert found["share_with_signal"] == 0.5
    assert found["em_mean"] == 3 / 8
    assert found["reward_mean"] == (3 - 0.5) / 8


def test_groups_of_one_have_no_shares() -> None:
    found = metrics(member("a", 1), member("b", 0))
    assert not {"share_all_zero", "share_all_one", "share_with_signal"} & set(found)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0])), min_size=2, max_size=12))
def test_shares_are_disjoint_and_add_up(drawn: list[tuple[str, float]]) -> None:
    found = metrics(*(member(group, em) for group, em in drawn))
    if len({group for group, _ in drawn}) == len(drawn):
        assert "share_all_zero" not in found
        return
    groups = {group: [em for other, em in drawn if other == group] for group, _ in drawn}
    mixed = sum(0 < sum(own) < len(own) for own in groups.values()) / len(groups)
    assert found["share_with_signal"] == pytest.approx(mixed)
    assert found["share_all_zero"] + found["share_all_one"] + mixed == pytest.approx(1)


def test_counts_of_played_trajectories(tokenizer: Any) -> None:
    """By hand: 7 turns, one invalid; 3 executed searches; one trajectory left open; one of four failed."""
    grammar = make_grammar("search_r1", tokenizer)
    search, end = "<search> Hask </search>", "<answer> Hask </answer>"
    played = [
        play_script(tokenizer, ["so", search, end], grammar),
        play_script(tokenizer, [search, "<search> hask ! </search>"], grammar, max_turns=1),
        play_script(tokenizer, [search, end], grammar),
    ]
    scores = [Scores(value, ((0, value),), {"f1": value}) for value in (1.0, 0.0, 0.5)]
    found = rollout_metrics(played, whole_trajectories(played), scores, 4)
    assert found["num_searches"] == 1.0
    assert found["valid_action_rate"] == pytest.approx(6 / 7)
    assert found["repeated_query_rate"] == 0.0  # the second was the last call's: not executed
    assert found["truncated_rate"] == pytest.approx(1 / 3)
    assert found["usable_rate"] == 0.75
    assert found["reward_mean"] == 0.5
    assert found["reward_std"] == pytest.approx(0.5)
    assert found["f1_mean"] == 0.5
    assert found["generated_tokens"] == pytest.approx(sum(t.num_generated for t in played) / 3)
    assert found["response_tokens"] > found["generated_tokens"]
