"""The answer's potential: slow likelihoods by a plain forward of the tiny model, telescoping, and where it lands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.rewards.potential import AnswerPotential
from tasks.rewards.shaping import potential_differences
from tasks.services import Pair, Resources, Services, opened
from tasks.services.start_policy import StartPolicy
from tasks.types import Trajectory
from tests.papers import golden
from tests.tiny import PLACES, Library, hit, logprobs_of, make_model, make_trainer, play_script, question

REWARD = AnswerPotential(0.1)
END = "<think> so </think> <answer> Hask </answer>"
LIBRARY = {place: [hit(f"{place} rules Hask .", place)] for place in PLACES}


def search(query: str) -> str:
    return f"<think> so </think> <search> {query} </search>"


def play(tokenizer: Any, *lines: str | list[int], **more: Any) -> Trajectory:
    return play_script(tokenizer, lines, shelf=Library(by_query=LIBRARY), **more)


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """A frozen policy that is the tiny model; two rows fit a micro-batch, so there are several."""
    trainer = make_trainer(tmp_path)
    resources = Resources(tmp_path, tmp_path, trainer.policy, trainer.player.tokenizer, max_batch_tokens=400)
    with opened({"log_probs": StartPolicy()}, resources) as running:
        yield running


def slow_potential(model: Any, tokenizer: Any, t: Trajectory, end: int) -> float:
    """Mean logprob of " Bristow" after everything up to `end` and an opened answer."""
    context = [*t.prompt_ids, *t.response_ids[:end], *tokenizer.encode("<answer>")]
    answer = tokenizer.encode(" Bristow")
    return float(logprobs_of(model, [*context, *answer], len(context)).mean())


TRAJECTORIES: list[list[str | list[int]]] = [
    [search("Avenor"), search("Elvane"), END],
    [search("Avenor"), "so", search("Avenor"), END],  # an invalid turn causes an observation, too
    [END],
    ["so", "so"],
    [[], search("Calmere"), END],  # a call that ended at once
]


def test_agrees_with_plain_forwards(tokenizer: Any, services: Services) -> None:
    model = make_model(tokenizer)
    played = [play(tokenizer, *lines, max_turns=len(lines) - 1) for lines in TRAJECTORIES]
    scores = REWARD(played, [question()] * len(played), services)
    for t, score in zip(played, scores, strict=True):
        wanted: dict[int, float] = {}
        before = slow_potential(model, tokenizer, t, 0)
        for turn in t.turns:
            if not turn.observation:
                continue
            after = slow_potential(model, tokenizer, t, turn.observation_end)
            if turn.end > turn.start:
                wanted[turn.end - 1] = 0.1 * (after - before)
            before = after
        assert dict(score.placed) == {place: pytest.approx(value, abs=1e-5) for place, value in wanted.items()}
        assert all(t.loss_mask[place] for place in wanted)
        assert score.outcome == 0.0
    assert [len(score.placed) for score in scores] == [2, 3, 0, 1, 1]
    assert any(abs(value) > 1e-4 for score in scores for _, value in score.placed)  # so that it shows something


@pytest.mark.parametrize("row", golden("tips", "Differences of a potential"))
def test_golden_differences(row: dict[str, Any]) -> None:
    found = potential_differences(row["potentials"])
    assert found == row["differences"]
    assert sum(found) == row["potentials"][-1] - row["potentials"][0]


def test_turns_telescope(tokenizer: Any, services: Services) -> None:
    """Their sum is scale * (last - first): what was said in between cannot pay."""
    model = make_model(tokenizer)
    for lines in (TRAJECTORIES[0], TRAJECTORIES[1], [search(place) for place in PLACES]):
        t = play(tokenizer, *lines, max_turns=7)
        (score,) = REWARD([t], [question()], services)
        last = max(turn.observation_end for turn in t.turns if turn.observation)
        gained = slow_potential(model, tokenizer, t, last) - slow_potential(model, tokenizer, t, 0)
        assert sum(value for _, value in score.placed) == pytest.approx(0.1 * gained, abs=1e-5)
        assert score.components["potential"] == pytest.approx(gained, abs=1e-4)


def test_all_likelihoods_are_asked_for_in_one_call_and_only_of_the_main_gold(tokenizer: Any) -> None:
    asked: list[list[tuple[list[int], str]]] = []

    class Reader:
        def encode(self, text: str) -> list[int]:
            return list(tokenizer.encode(text))

        def mean_logprobs(self, pairs: Sequence[Pair]) -> list[float]:
            asked.append([(list(context), tokenizer.decode(list(ids))) for context, ids in pairs])
            return [float(len(context)) for context, _ in pairs]

    t = play(tokenizer, search("Avenor"), END)
    other = question(1, answers=("Hask", "Elvane"))
    scores = REWARD([t, t], [question(), other], {"log_probs": Reader()})
    (pairs,) = asked
    assert [answer for _, answer in pairs] == [" Bristow", " Bristow", " Hask", " Hask"]
    assert all(tokenizer.decode(context).rstrip().endswith("<answer>") for context, _ in pairs)
    grown = t.turns[0].observation_end
    assert [score.placed for score in scores] == [((t.turns[0].end - 1, pytest.approx(0.1 * grown)),)] * 2


def test_an_opening_that_opens_no_answer_is_refused(tokenizer: Any) -> None:
    t = play(tokenizer, END)
    with pytest.raises(ValueError, match=r"opening='<reply>': found an answer without it .* in this method's grammar"):
        AnswerPotential(0.1, "<reply>")([t], [question()], {"log_probs": Never()})


class Never:
    def encode(self, text: str) -> list[int]:
        raise AssertionError

    def mean_logprobs(self, pairs: Sequence[Pair]) -> list[float]:
        raise AssertionError


@pytest.mark.parametrize(
    ("means", "message"),
    [
        ([-1.0], "found a list of 1, expected a list of 2, one entry for each pair. Mend"),
        ([-1.0] * 3, "found a list of 3, expected a list of 2"),
        (None, "found None, expected a list of 2"),
        ([-1.0, float("nan")], "pair 2: found nan, expected a finite number"),
        ([-1.0, None], "pair 2: found None, expected a finite number"),
    ],
)
def test_a_finite_number_for_each_pair_or_an_error_of_one_line(tokenizer: Any, means: Any, message: str) -> None:
    class Returned:
        def encode(self, text: str) -> list[int]:
            return [1]

        def mean_logprobs(self, pairs: Sequence[Pair]) -> Any:
            return means

    with pytest.raises(ValueError) as caught:
        REWARD([play(tokenizer, search("Avenor"), END, max_turns=1)], [question()], {"log_probs": Returned()})
    assert str(caught.value).startswith(f"services: log_probs: {message}")
    assert "\n" not in str(caught.value)
