"""The variance of advantages, by turn, with complete and with truncated sampling."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.records import schema
from tasks.records.variance import VarianceRow
from tasks.report.variance import ratio
from tasks.rewards import on_turns
from tasks.train import variance
from tasks.types import Question, Scores, Trajectory, Turn
from tests.rl.candidates import Candidates
from tests.tiny import Script, make_model, make_player, make_tokenizer, make_trainer, question

SAMPLING = Sampling(1.0, 1.0, (), 5)


def score(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
    """The reward of an action depends on its own tokens alone, so that steps are independent of each other."""
    return [on_turns(t, {i: reward(t, turn) for i, turn in enumerate(t.turns)}) for t in trajectories]


def reward(trajectory: Trajectory, turn: Turn) -> float:
    return float(sum(trajectory.response_ids[turn.start : turn.end]) % 2)


@dataclass(frozen=True)
class ByTokens:
    """The same as a reward of a method."""

    reads: tuple[Any, ...] = ()
    services: tuple[Any, ...] = ()
    components: tuple[str, ...] = ()

    def __call__(self, trajectories: Any, questions: Any, services: Any = None) -> list[Scores]:
        return score(trajectories, questions)


def measured(num_questions: int = 12, size: int = 4, **budgets: Any) -> list[VarianceRow]:
    tokenizer = make_tokenizer()
    budgets = {"max_turns": 2, "max_call_tokens": 5} | budgets
    player = make_player(PlainGenerator(make_model(tokenizer), tokenizer, True), tokenizer, **budgets)
    asked = [question(i) for i in range(num_questions)]
    rows = variance.measure("start", player, score, asked, size, SAMPLING)
    assert (player.cost.generated, player.cost.prefilled, player.cost.searches) == (0, 0, 0)
    return rows


def test_rewards_that_are_alike_and_independent_have_the_ratio_of_the_theorem() -> None:
    """Draws of a real policy, rewards of 0 or 1 by chance: 1/T of the variance, within what so few questions admit.

    `test_golden_variance` of SLATE has the theorem's numbers exactly, the next test every factor by hand.
    """
    rows = [row for row in measured(48, 5) if row.turn == 0]
    assert len(rows) == 48
    truncated, full = (statistics.mean(getattr(row, name) for row in rows) for name in ("truncated", "full"))
    num_turns = statistics.mean(row.num_turns for row in rows)
    assert 2 <= num_turns <= 3
    # Three standard errors of the ratio.
    assert truncated / full == pytest.approx(1 / num_turns, abs=0.18)
    assert truncated < full


def test_the_rows_of_a_question_by_hand() -> None:
    """Two candidates a step; complete trajectories of other lengths, of which two count, and three at equal tokens.

    Rewards are those of the words: a search 2 or 0, an answer 1 or -3.
    """
    search, other = "<search> Avenor </search>", "<search> Bristow </search>"
    answer, wrong = "<answer> Bristow </answer>", "<answer> Avenor </answer>"
    earned = {search: 2.0, other: 0.0, answer: 1.0, wrong: -3.0}

    def by_text(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
        return [on_turns(t, {i: earned[turn.text.strip()] for i, turn in enumerate(t.turns)}) for t in trajectories]

    # First the candidates: rows 1 and 2 continue row 0, rows 3 and 4 row 1, rows 5 and 6 row 3. Then the plays.
    lines: list[list[str | list[int]]] = [[], [search], [other], [other], [answer], [answer], [wrong]]
    for row, play in enumerate([[search, answer], [wrong], [other, search, answer], [search, wrong]]):
        lines[row] += play
    tokenizer = make_tokenizer()
    player = make_player(Script(tokenizer, lines), tokenizer, max_total_tokens=900)
    rows = variance.measure("trained", player, by_text, [question()], 2, SAMPLING)

    # Step means 1, 0.5, -1. Sums of the plays 3, -3, 3: their mean is 0 of two, 1 of three. The plays have 2, 1, 3
    # turns and the candidates 6 texts of the same length: three plays cost as much, the fourth is too much.
    assert len({len(tokenizer.encode(text)) for text in earned}) == 1
    found = [(row.turn, row.truncated, row.full, row.full_at_tokens) for row in rows]
    assert found == [
        (0, pytest.approx((1 + 0.25 + 4) / 3), 9.0, pytest.approx((4 + 16 + 4) / 3)),
        (1, 1.0, 9.0, pytest.approx((4 + 16 + 4) / 3)),
        (2, 0.25, 9.0, 4.0),
        (3, 4.0, None, 4.0),
    ]
    assert {(row.policy, row.question_id, row.num_turns, row.group) for row in rows} == {("trained", "q0", 3, 3)}


def test_both_samplings_draw_with_seeds_of_their_own() -> None:
    """Equal seeds would make the complete trajectories begin as the candidates do."""
    seeds: list[int] = []
    tokenizer = make_tokenizer()
    generator = PlainGenerator(make_model(tokenizer), tokenizer, True)
    opened = generator.open

    def remembering(prompts: Any, copies: int, sampling: Sampling, longest: int) -> Any:
        seeds.append(sampling.seed)
        return opened(prompts, copies, sampling, longest)

    generator.open = remembering  # type: ignore[method-assign]
    player = make_player(generator, tokenizer, max_call_tokens=5)
    variance.measure("start", player, score, [question()], 2, SAMPLING)
    assert len(seeds) == len(set(seeds)) == 2


def test_rows_of_turns() -> None:
    rows = measured()
    assert rows == measured()
    by_turn = {turn: [row for row in rows if row.turn == turn] for turn in (0, 1, 2, 3)}
    assert len(by_turn[0]) == len(by_turn[1]) == 12
    for row in by_turn[1]:
        assert row.truncated is not None
        assert row.full is not None
        assert row.full_at_tokens is not None
        assert 2 <= row.group <= 8
        if row.num_turns == 1:
            whole = next(one for one in by_turn[0] if one.question_id == row.question_id)
            assert row.truncated == whole.truncated


def test_the_rewards_of_actions_are_those_of_their_prefixes() -> None:
    tokenizer = make_tokenizer()
    player = make_player(PlainGenerator(make_model(tokenizer), tokenizer, True), tokenizer, max_call_tokens=5)
    (played,) = player.play([question()], 1, SAMPLING)
    assert len(played.turns) > 1
    cut = variance.until(played, 0)
    assert cut.response_ids == played.response_ids[: played.turns[0].end]
    assert (len(cut.turns), cut.turns[0].hits, cut.answer) == (1, (), None)
    (rewards,) = variance._rewards_by_turn([played], [question()], 1, score)
    whole = score([played], [question()])[0]
    assert rewards == [value for _, value in whole.placed]


def test_an_action_has_the_rewards_on_its_own_tokens_also_on_its_first() -> None:
    scores = Scores(0.0, ((1, 5.0), (2, 1.0), (3, 2.0)))
    assert [variance._earned(scores, start) for start in (0, 2, 3, 4)] == [8.0, 3.0, 2.0, 0.0]


def test_equal_tokens() -> None:
    assert variance._group_at(10, [4, 4, 4]) == 2
    assert variance._group_at(12, [4, 4, 4]) == 3
    assert variance._group_at(1, [4, 4, 4]) == 2


def test_training_measures_before_and_after_and_a_cut_run_measures_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "sampler": Candidates(3),
        "rewards": (ByTokens(),),
        "variance_questions": 4,
        "num_steps": 2,
        "checkpoint_every": 1,
    }
    whole = make_trainer(tmp_path / "whole", **options)
    whole.run()
    rows = whole.variances()
    assert {row["policy"] for row in rows} == {"start", "trained"}
    for row in rows:
        schema.parse(VarianceRow, row, "row")

    make_trainer(tmp_path / "cut", **(options | {"num_steps": 1})).run()
    (tmp_path / "cut" / "variance" / "trained.jsonl").unlink()  # That of the first step, where this run ended.
    rest = make_trainer(tmp_path / "cut", **options)
    rest.run()
    assert rest.variances() == rows

    without = make_trainer(tmp_path / "without", **(options | {"variance_questions": 0}))
    assert without.run().history == whole.progress.history  # Measuring moves nothing.
    assert without.variances() == []


def test_the_interval_of_a_ratio() -> None:
    one, two = np.ones(4), 2 * np.ones(4)
    assert ratio(one, two, np.array([0, 0, 0, 0]), 100) == "0.500 [0.500, 0.500]"
    assert ratio(one, two, np.array([0, 0, 1, 1]), 100) == "0.500 [0.500, 0.500]"
    assert ratio(one, np.zeros(4), np.zeros(4), 100) == "no variance"


def test_seeds_that_differ_widen_the_interval_of_a_ratio() -> None:
    """Ratios of 0.5, 0.6 and 0.7: 0.6 -+ 4.303 * 0.1 / sqrt(3); resampled alone 0.5 to 0.7."""
    above = np.array([1.0, 1.0, 1.2, 1.2, 1.4, 1.4])
    assert ratio(above, 2 * np.ones(6), np.repeat([0, 1, 2], 2), 200) == "0.600 [0.352, 0.848]"
    assert ratio(above, 2 * np.ones(6), np.zeros(6), 2000).startswith("0.600 [0.5")


def test_two_seeds_say_nothing_about_seeds() -> None:
    """Only the questions of each are resampled, and those of one seed are alike here."""
    above = np.array([1.0, 1.0, 1.4, 1.4])
    assert ratio(above, 2 * np.ones(4), np.array([0, 0, 1, 1]), 200) == "0.600 [0.600, 0.600]"
