"""A filter that goes on sampling: rounds, surplus, skipped updates; dropped groups change nothing (dspo 4 and 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.checkpoint import read_state
from tasks.rewards import on_last_token
from tasks.rl.filters.keep_all import KeepAll
from tasks.rl.filters.mixed_outcomes import MixedOutcomes
from tasks.rl.filters.successful import Successful
from tasks.rl.samplers import Draw, draw_of_trajectories
from tasks.train.health import CollapseConf
from tasks.train.loop import Trainer
from tasks.train.order import Order
from tasks.types import Action, Question, Scores, Trajectory, Turn
from tests.tiny import make_trainer

PATTERNS = {"m": ("1", "0"), "z": ("0", "0"), "o": ("1", "1")}


@dataclass
class Planned:
    """Draw n's groups come out as the n-th word says: m mixed, z all wrong, o all right; the last word stays."""

    plan: Sequence[str]
    size: int = 2
    from_start: bool = False
    has_logprobs: bool = True
    drawn: list[list[str]] = field(default_factory=list)

    def draw(self, player: Any, questions: Sequence[Question], sampling: Any, score: Any) -> Draw:
        word = self.plan[min(len(self.drawn), len(self.plan) - 1)]
        self.drawn.append([q.id for q in questions])
        rows = [
            played(question, i, member, answer)
            for i, (question, letter) in enumerate(zip(questions, word, strict=False))
            for member, answer in enumerate(PATTERNS[letter])
        ]
        return draw_of_trajectories(rows, self.size, questions, score)


def played(question: Question, number: int, member: int, answer: str) -> Trajectory:
    """Ids that depend on the question and the member alone; three to five tokens."""
    seed = int(question.id[1:])
    ids = tuple((31 * seed + 17 * member + 7 * j) % 250 for j in range(3 + member + seed % 2))
    turn = Turn(Action("answer", answer), 0, len(ids), len(ids))
    name = f"{question.id}#{number}"
    return Trajectory(
        question.id, name, (5, 6), ids, (True,) * len(ids), (-5.8,) * len(ids), (turn,), "answered", answer
    )


@dataclass(frozen=True)
class Said:
    """The reward is the answer, a number."""

    reads: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    components: tuple[str, ...] = ("em",)

    def __call__(self, trajectories: Any, questions: Any, services: Any = None) -> list[Scores]:
        return [on_last_token(t, float(t.answer), em=float(t.answer)) for t in trajectories]


def trainer(scratch: Path, plan: Sequence[str], keep: Any = None, **changes: Any) -> tuple[Trainer, Planned]:
    sampler = Planned(plan)
    base: dict[str, Any] = {"num_steps": 1, "prompts_per_step": 2, "rollouts_per_step": None, "validate_every": 100}
    made = make_trainer(scratch, sampler=sampler, rewards=(Said(),), **(base | changes))
    made.method = replace(made.method, filter=keep or MixedOutcomes("em"))
    made.validation = []
    return made, sampler


def steps(made: Trainer) -> list[dict[str, float]]:
    made.run()
    return [row["metrics"] for row in made.progress.history if row["step"] > 0]


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    made.policy.save(folder := made.scratch / "weights")
    tensors, _ = read_state(folder)
    return tensors


def test_it_samples_until_it_has_its_groups(tmp_path: Path) -> None:
    """Of draws mz, oz, mm two groups are trained on, the third mixed one is surplus; the report tells of all six."""
    made, sampler = trainer(tmp_path / "a", ["mz", "oz", "mm", "zz"])
    (found,) = steps(made)
    assert len(sampler.drawn) == 3
    assert len({name for draw in sampler.drawn for name in draw}) == 6  # filtered prompts are used up
    assert (found["sampling_rounds"], found["filter_kept_share"]) == (3, 0.5)
    assert (found["share_all_zero"], found["share_all_one"]) == (pytest.approx(2 / 6), pytest.approx(1 / 6))
    assert found["reward_mean"] == pytest.approx((3 + 2) / 12)
    assert made.progress.num_trajectories == 12
    assert made.progress.num_draws == 3
    assert found["skipped_update"] == 0.0


def test_dropped_groups_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is, bit for bit, that of the kept groups played alone."""
    filtered, sampler = trainer(tmp_path / "a", ["mz", "oz", "mm"])
    start = weights(filtered)
    steps(filtered)
    alone, other = trainer(tmp_path / "b", ["mm"], KeepAll())
    wanted = [sampler.drawn[0][0], sampler.drawn[2][0]]
    alone.questions = [q for name in wanted for q in filtered.questions if q.id == name]
    monkeypatch.setattr(Order, "draw", lambda order, number: list(order.questions))
    steps(alone)
    assert other.drawn == [wanted]
    assert weights(filtered).keys() == weights(alone).keys()
    assert all(torch.equal(value, weights(alone)[name]) for name, value in weights(filtered).items())
    assert any(not torch.equal(value, start[name]) for name, value in weights(filtered).items() if name in start)


def test_no_group_survives(tmp_path: Path) -> None:
    """The rounds are bounded; the update is skipped, counted, and the weights stay."""
    made, sampler = trainer(tmp_path, ["zo"], MixedOutcomes("em", 4), num_steps=2)
    before = weights(made)
    found = steps(made)
    assert [metrics["skipped_update"] for metrics in found] == [1.0, 1.0]
    assert [metrics["sampling_rounds"] for metrics in found] == [4, 4]
    assert [metrics["filter_kept_share"] for metrics in found] == [0.0, 0.0]
    assert len(sampler.drawn) == 8
    model = {name: value for name, value in weights(made).items() if name in before}
    assert all(torch.equal(value, before[name]) for name, value in model.items())
    assert "loss" not in found[0]


def test_a_run_of_skipped_updates_ends(tmp_path: Path) -> None:
    rule = CollapseConf(9, None, None, None, max_skipped=3)
    made, _ = trainer(tmp_path, ["zz"], MixedOutcomes("em", 1), num_steps=9, collapse=rule)
    assert len(steps(made)) == 3
    assert made.progress.stopped is not None
    assert "3 updates in a row were skipped" in made.progress.stopped


@pytest.mark.parametrize(
    ("plan", "is_enough"),
    [(["mzzz", "mzzz"], True), (["mzzz", "zzzz"], False), (["mmzz", "mzzz"], True), (["mmmm"], True)],
)
def test_at_least_one_mini_batch(tmp_path: Path, plan: list[str], is_enough: bool) -> None:
    """Four groups are wanted in two mini-batches: two are enough after the last round, one is not."""
    made, _ = trainer(tmp_path, plan, MixedOutcomes("em", 2), prompts_per_step=4, minibatches=2)
    (found,) = steps(made)
    assert found["skipped_update"] == 1.0 - is_enough
    assert found["sampling_rounds"] == (1 if plan == ["mmmm"] else 2)


def test_a_filter_that_does_not_refill_draws_once(tmp_path: Path) -> None:
    made, sampler = trainer(tmp_path, ["oz"], Successful("em"))
    (found,) = steps(made)
    assert len(sampler.drawn) == 1
    assert "sampling_rounds" not in found
    assert "skipped_update" not in found
    made, _ = trainer(tmp_path / "none", ["zz"], Successful("em"))
    assert steps(made)[0]["skipped_update"] == 1.0


def test_the_same_question_in_two_rounds_is_two_groups(tmp_path: Path) -> None:
    """Two questions, all of them in every draw: a group of round one and its namesake of round two stay apart."""
    made, sampler = trainer(tmp_path, ["mz", "mz"])
    made.questions = list(made.questions[:2])
    (found,) = steps(made)
    assert found["sampling_rounds"] == 2
    assert [sorted(draw) for draw in sampler.drawn] == [["q0", "q1"]] * 2
    assert found["filter_kept_share"] == 0.5  # two of four groups
    assert found["skipped_update"] == 0.0


@dataclass
class Told(Planned):
    """A sampler whose samples all have this weight, and of which `spoil` makes something else."""

    weight: float = 1.0
    spoil: Callable[[Draw], Draw] = lambda draw: draw

    def draw(self, player: Any, questions: Sequence[Question], sampling: Any, score: Any) -> Draw:
        draw = super().draw(player, questions, sampling, score)
        return self.spoil(replace(draw, samples=[replace(sample, weight=self.weight) for sample in draw.samples]))


def told(scratch: Path, keep: Any = None, rewards: Any = (Said(),), **changes: Any) -> Trainer:
    base: dict[str, Any] = {"num_steps": 1, "prompts_per_step": 2, "rollouts_per_step": None, "validate_every": 100}
    made = make_trainer(scratch, sampler=Told(["mm"], **changes), rewards=rewards, **base)
    made.method = replace(made.method, filter=keep or KeepAll())
    made.validation = []
    return made


@pytest.mark.parametrize("keep", [KeepAll(), MixedOutcomes("em")])
def test_the_weight_of_a_sample_reaches_the_update(tmp_path: Path, keep: Any) -> None:
    """Samples of weight 0 teach nothing, with and without a filter that samples on."""
    for weight in (0.0, 1.0):
        made = told(tmp_path / str(weight), keep, weight=weight)
        before = weights(made)
        made.run()
        after = weights(made)
        model = [name for name in before if name.startswith("weights/")]
        assert all(torch.equal(after[name], before[name]) for name in model) == (weight == 0)


def spoiled(**changes: Any) -> Callable[[Draw], Draw]:
    """The first sample with other values."""
    return lambda draw: replace(draw, samples=[replace(draw.samples[0], **changes), *draw.samples[1:]])


def scored(scores: Scores) -> Callable[[Draw], Draw]:
    """Other scores for the first sample."""
    return lambda draw: replace(draw, scores=[scores, *draw.scores[1:]])


NAN = float("nan")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled(sampler_logprobs=(-1.0,)), "length of sampler_logprobs=1: expected {size}, one entry for each token"),
        (spoiled(trained=(True,)), "length of trained=1: expected {size}, one entry for each token of ids"),
        (spoiled(trained=(False,) * 4), "trained='no token': expected one or more; leave out a sample without any"),
        (spoiled(sampler_logprobs=(NAN,) * 4), "sampler_logprobs='nan or inf': expected numbers"),
        (spoiled(weight=NAN), "weight=nan: expected a finite number"),
        (spoiled(question_id="elsewhere"), "question_id='elsewhere': expected that of a question it was given to play"),
        (scored(Scores(1.0, ((-1, 1.0),))), "place of a reward=-1: expected 0 to {last}, a token of ids"),
        (scored(Scores(1.0, ((99, 1.0),))), "place of a reward=99: expected 0 to {last}, a token of ids"),
        (scored(Scores(1.0, ((0, NAN),))), "reward=nan: expected a finite number"),
        (lambda draw: replace(draw, owners=[7, *draw.owners[1:]]), "owner=7: expected None or 0 to 3"),
        (lambda draw: replace(draw, trajectories=[], samples=[], scores=[], owners=[]), "the sampler played nothing"),
    ],
)
def test_a_draw_that_would_be_trained_otherwise_than_it_says_is_refused(
    tmp_path: Path, spoil: Callable[[Draw], Draw], message: str
) -> None:
    """Before the update, with the last checkpoint kept."""
    made = told(tmp_path, spoil=lambda draw: spoil(cut_to_four(draw)))
    before = weights(made)
    with pytest.raises(ValueError) as caught:
        made.run()
    assert message.format(size=4, last=3) in str(caught.value)
    assert "sampler" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in weights(made).items() if name in before)
    assert made.progress.step == 0


def cut_to_four(draw: Draw) -> Draw:
    """The first sample with four tokens, so that cases can name lengths."""
    first = replace(draw.samples[0], ids=(1, 2, 3, 4), trained=(True,) * 4, sampler_logprobs=(-5.0,) * 4, weight=1.0)
    first_score = Scores(1.0, ((3, 1.0),), {"em": 1.0})
    return replace(draw, samples=[first, *draw.samples[1:]], scores=[first_score, *draw.scores[1:]])


@dataclass(frozen=True)
class Wrong(Said):
    """Gives a wrong score to the second trajectory, or none."""

    score: Scores | None = None

    def __call__(self, trajectories: Any, questions: Any, services: Any = None) -> list[Scores]:
        right = super().__call__(trajectories, questions, services)
        return [right[0], *([self.score] if self.score else []), *right[2:]]


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (Scores(1.0, ((0, NAN),)), "score for question 'q.*'=nan: expected a finite number"),
        (Scores(float("inf"), ()), "score for question 'q.*'=inf: expected a finite number"),
        (Scores(1e39, ()), "score for question 'q.*'=1e\\+39: expected a finite number"),
        (Scores(None, ()), "score for question 'q.*'=None: expected a finite number"),  # type: ignore[arg-type]
        (Scores(1.0, (), {"em": NAN}), "score for question 'q.*'=nan: expected a finite number"),
        (None, "number of scores=3: expected 4, one each"),
    ],
)
def test_a_reward_without_a_finite_score_for_each_ends_the_run(
    tmp_path: Path, score: Scores | None, message: str
) -> None:
    made = told(tmp_path, rewards=(Wrong(score=score),))
    with pytest.raises(ValueError, match=f"^rewards: test_refill: {message}"):
        made.run()


@pytest.mark.parametrize("filter_", [MixedOutcomes("em"), Successful("em")])
def test_a_score_without_the_component_that_the_filter_reads_ends_the_run(tmp_path: Path, filter_: Any) -> None:
    made = told(tmp_path, spoil=lambda draw: scored(replace(draw.scores[0], components={"f1": 1.0}))(draw))
    made.method = replace(made.method, filter=filter_)
    message = r"^filter: \w+: sample 0 \(question 'q\d+'\): component='em': expected one of its score's \(f1\); mend"
    with pytest.raises(ValueError, match=message):
        made.run()


def test_rewards_get_the_services_and_each_draw_announces_a_seed_of_its_own(tmp_path: Path) -> None:
    seen: list[Any] = []
    announced: list[str] = []

    @dataclass(frozen=True)
    class Asking(Said):
        def __call__(self, trajectories: Any, questions: Any, services: Any = None) -> list[Scores]:
            seen.append(services)
            return super().__call__(trajectories, questions, services)

    class Announced:
        services = ()
        depends_on_budget = False

        def announce(self, services: Any, done: float, seed: str) -> None:
            announced.append(seed)

    made = told(tmp_path, rewards=(Asking(),))
    made.conf = replace(made.conf, num_steps=3)
    made.services = {"chat": "the model"}  # type: ignore[typeddict-item]
    made.method = replace(made.method, search=Announced())  # type: ignore[arg-type]
    made.run()
    assert seen == [made.services] * 3
    assert len(set(announced)) == 3
