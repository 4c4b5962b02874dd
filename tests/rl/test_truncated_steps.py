"""SLATE's candidates: drawn from one prefix, one chosen by its own seeded draw, its search alone executed."""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.rewards import on_turns
from tasks.rl.advantages.group import GroupAdvantage, group_normalized
from tasks.rl.experience import collate
from tasks.rl.samplers import Draw
from tasks.rl.samplers.truncated_steps import TruncatedSteps, softmax
from tasks.types import Action, Question, Sample, Scores, Trajectory
from tests.papers import golden
from tests.tiny import Script, Shelf, make_model, make_player, make_tokenizer, question

SAMPLING = Sampling(1.0, 1.0, (), 3)
K = 3
SEARCH, ANSWER, RUBBISH = "<search> Avenor </search>", "<answer> Bristow </answer>", "rules rules"


def by_last_token(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
    """A reward of the newest turn that differs between candidates."""
    return [on_turns(t, {len(t.turns) - 1: float(sum(t.response_ids) % 3)}) for t in trajectories]


def constant(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
    return [on_turns(t, {len(t.turns) - 1: 1.0}) for t in trajectories]


def scripted(lines: list[list[str]], shelf: Any = None, max_turns: int = 4, **sampler: Any) -> tuple[Draw, Shelf]:
    """One question; `lines` holds what the candidates of each step write, row 0 is the first prefix."""
    tokenizer, shelf = make_tokenizer(), shelf or Shelf()
    script = Script(tokenizer, [[], *([line] for step in lines for line in step)])
    player = make_player(script, tokenizer, shelf, max_turns=max_turns, max_total_tokens=900, search_retries=0)
    drawn = TruncatedSteps(**{"size": len(lines[0]), "eta": 0.7} | sampler).draw(
        player, [question()], SAMPLING, constant
    )
    return drawn, shelf


# Draws ----------------------------------------------------------------------------------------------------------------


def test_candidates_have_the_draws_and_logprobs_of_separate_plays() -> None:
    """k candidates that are forked from one prefix against k sessions that each read the whole prefix."""
    tokenizer = make_tokenizer()

    def player() -> Any:
        return make_player(PlainGenerator(make_model(tokenizer), tokenizer, True), tokenizer, max_call_tokens=7)

    draw = TruncatedSteps(K, 0.7).draw(player(), [question(i) for i in range(3)], SAMPLING, by_last_token)
    model = make_model(tokenizer)
    assert len(draw.samples) > 3
    for sample in draw.samples:
        table = torch.tensor(sample.sampler_logprobs)
        whole = [*sample.prefix_ids, *sample.ids]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0].log_softmax(-1)
        first = len(sample.prefix_ids)
        alone = logits[torch.arange(first - 1, len(whole) - 1), torch.tensor(whole[first:])]
        assert torch.allclose(table, alone, atol=1e-5)

    one = player()
    (line,) = one.start([question()], 1, SAMPLING)
    forked = one.fork(line, K)
    one.act(forked)
    for candidate in forked:
        other = player()
        seeded = Sampling(1.0, 1.0, other.grammar.stop, SAMPLING.seed * 1_000_003)
        session = other.generator.open([candidate.prompt], candidate.number + 1, seeded, 300)
        (call,) = session.generate([candidate.number], [7])
        assert list(call.token_ids) == candidate.response
        assert list(call.logprobs) == pytest.approx(candidate.logprobs, abs=1e-5)


def test_a_step_is_a_group_with_one_prefix_and_shares_of_one() -> None:
    draw, _ = scripted([[SEARCH, SEARCH, SEARCH], [ANSWER, ANSWER, SEARCH], [ANSWER, ANSWER, ANSWER]])
    groups: dict[str, list[Sample]] = {}
    for sample in draw.samples:
        groups.setdefault(sample.group_id, []).append(sample)
    assert list(groups) == [f"q0#0/step {t + 1}" for t in range(len(draw.trajectories[0].turns))]
    for members in groups.values():
        assert len(members) == 3
        assert len({sample.prefix_ids for sample in members}) == 1
        assert all(sample.weight == pytest.approx(1 / 3) and all(sample.trained) for sample in members)


def test_a_step_of_several_questions_keeps_each_ones_candidates_apart() -> None:
    """Every sample belongs to its question: it continues that prompt, stands in its group and has its own reward."""
    tokenizer = make_tokenizer()
    player = make_player(PlainGenerator(make_model(tokenizer), tokenizer, True), tokenizer, max_call_tokens=7)
    rewards: dict[tuple[int, ...], float] = {}

    def distinct(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> list[Scores]:
        for t in trajectories:
            rewards.setdefault(t.prompt_ids + t.response_ids, len(rewards) / 64)
        return [on_turns(t, {len(t.turns) - 1: rewards[t.prompt_ids + t.response_ids]}) for t in trajectories]

    draw = TruncatedSteps(K, 0.7).draw(player, [question(i) for i in range(3)], SAMPLING, distinct)
    prompts = {t.question_id: t.prompt_ids for t in draw.trajectories}
    assert len(prompts) == len(set(prompts.values())) == 3
    for sample, scores in zip(draw.samples, draw.scores, strict=True):
        prompt = prompts[sample.question_id]
        assert sample.prefix_ids[: len(prompt)] == prompt
        assert sample.group_id.startswith(f"{sample.question_id}#")
        assert [value for _, value in scores.placed] == [rewards[sample.prefix_ids + sample.ids]]


def test_only_the_chosen_search_is_executed_and_an_answer_ends_it() -> None:
    draw, shelf = scripted([[SEARCH] * 5, [ANSWER] * 5])
    (trajectory,) = draw.trajectories
    assert shelf.asked == [["Avenor"]]
    assert (trajectory.status, trajectory.answer, trajectory.num_searches) == ("answered", "Bristow", 1)
    assert [owner for owner in draw.owners if owner is not None] == [0, 0]
    whole = trajectory.prompt_ids + trajectory.response_ids
    for sample, owner in zip(draw.samples, draw.owners, strict=True):
        taken = sample.prefix_ids + sample.ids
        assert (whole[: len(taken)] == taken) or owner is None


def test_the_spent_budget_ends_the_trajectory_without_a_last_search() -> None:
    draw, shelf = scripted([[SEARCH] * 2] * 2, max_turns=2)
    (trajectory,) = draw.trajectories
    assert (trajectory.status, trajectory.answer, len(trajectory.turns)) == ("open", None, 2)
    assert len(shelf.asked) == 1
    assert len(draw.samples) == 4


@pytest.mark.parametrize("seed", range(6))
def test_an_action_without_search_or_answer_is_never_chosen(seed: int) -> None:
    sampler = TruncatedSteps(3, 0.7)
    samples = [Sample("q", "g", (1,), (2,), (True,), (0.0,))] * 3
    scores = [Scores(0.0, ((0, value),)) for value in (5.0, 0.0, 0.0)]
    actions = [Action("invalid"), Action("search", "a"), Action("answer", "b")]
    assert sampler.choose(samples, scores, actions, seed) in (1, 2)
    assert sampler.choose(samples, scores, [Action("invalid")] * 3, seed) is None


def test_where_no_candidate_can_go_on_the_step_is_still_learned_from() -> None:
    draw, _ = scripted([[SEARCH, SEARCH], [RUBBISH, RUBBISH]])
    (trajectory,) = draw.trajectories
    assert (trajectory.status, len(trajectory.turns)) == ("open", 1)
    assert [sample.group_id for sample in draw.samples] == ["q0#0/step 1"] * 2 + ["q0#0/step 2"] * 2
    assert sum(owner is not None for owner in draw.owners) == 1


def test_a_failed_search_takes_all_samples_of_its_question_with_it() -> None:
    draw, _ = scripted([[SEARCH, SEARCH]], Shelf(failures=-1))
    assert (draw.samples, draw.num_failed, draw.num_played) == ([], 1, 1)


def test_a_candidate_that_writes_nothing_is_not_compared() -> None:
    draw, _ = scripted([[ANSWER, "", ANSWER]])
    assert len(draw.samples) == 2
    alone, _ = scripted([["", "", ANSWER]])
    assert alone.samples == []  # The one that is left has nothing to be compared with.


def test_one_candidate_a_step_is_a_play() -> None:
    draw, shelf = scripted([[SEARCH], [ANSWER]])
    assert len(draw.samples) == 2
    assert [sample.weight for sample in draw.samples] == [1.0, 1.0]
    assert len(shelf.asked) == 1


# The choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("slate", "Candidates"))
def test_golden_chances_of_the_choice(case: dict[str, Any]) -> None:
    rewards = torch.tensor([2.0, 1.0, 2.05, -1.0, 0.0], dtype=torch.double)
    compared = group_normalized(rewards, ["g"] * 5, 1e-6, case["deviation"])
    found = softmax([advantage / 0.7 for advantage in compared.tolist()])
    assert found == pytest.approx(case["chances"], abs=1e-6)
    assert sum(found) == pytest.approx(1.0)


def test_the_choice_has_the_chances_of_the_softmax_and_a_seed_of_its_own() -> None:
    sampler, chances = TruncatedSteps(5, 0.7), golden("slate", "Candidates")[0]["chances"]
    scores = [Scores(0.0, ((0, value),)) for value in (2.0, 1.0, 2.05, -1.0, 0.0)]
    actions = [Action("search", "a")] * 5

    def chosen(seed: int) -> int | None:
        samples = [Sample("q", f"q#0/step {seed}", (1,), (2,), (True,), (0.0,))] * 5
        return sampler.choose(samples, scores, actions, 7)

    counts = collections.Counter(chosen(seed) for seed in range(6000))
    for i, chance in enumerate(chances):
        # Six standard deviations of the share of 6000 draws.
        assert counts[i] / 6000 == pytest.approx(chance, abs=6 * (chance * (1 - chance) / 6000) ** 0.5)
    assert [chosen(seed) for seed in range(50)] == [chosen(seed) for seed in range(50)]


def test_the_choice_is_that_of_the_golden_chances_and_another_seed_chooses_anew() -> None:
    """The draw itself, with the run's seed and the step's group: no approximation by counting."""
    sampler, actions = TruncatedSteps(5, 0.7), [Action("search", "a")] * 5
    chances = golden("slate", "Candidates")[0]["chances"]
    scores = [Scores(0.0, ((0, value),)) for value in (2.0, 1.0, 2.05, -1.0, 0.0)]
    found: dict[int, list[int | None]] = {}
    for seed in (7, 8):
        groups = [f"q{number}#0/step 1" for number in range(200)]
        found[seed] = [
            sampler.choose([Sample("q", group, (1,), (2,), (True,), (0.0,))] * 5, scores, actions, seed)
            for group in groups
        ]
        assert found[seed] == [random.Random(f"{seed}/choice/{g}").choices(range(5), chances)[0] for g in groups]
    assert found[7] != found[8]


def test_the_choice_compares_advantages_with_the_population_deviation() -> None:
    """Of rewards 1 and 0 the advantages are 1 and -1: e^-4 : 1 at eta 0.5; raw rewards have e^-2, n - 1 has e^-2.8."""
    sampler, actions = TruncatedSteps(2, 0.5), [Action("search", "a")] * 2
    scores = [Scores(0.0, ((0, value),)) for value in (1.0, 0.0)]
    groups = [[Sample("q", f"g{number}", (1,), (2,), (True,), (0.0,))] * 2 for number in range(3000)]
    share = sum(sampler.choose(group, scores, actions, 0) == 1 for group in groups) / 3000
    # Six standard deviations are 0.0147; the others' shares are 0.119 and 0.056.
    assert share == pytest.approx(1 / (1 + math.exp(4)), abs=0.0147)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-4, 5), min_size=2, max_size=7), min_size=1, max_size=4))
def test_advantages_sum_to_zero_in_each_group(groups: list[list[int]]) -> None:
    samples, scores = [], []
    for number, rewards in enumerate(groups):
        for reward in rewards:
            samples.append(Sample("q", str(number), (1, 2), (3, 4), (True, True), (0.0, 0.0)))
            scores.append(Scores(0.0, ((1, reward / 2),)))
    experience = GroupAdvantage(deviation="population")(collate(samples, scores))
    assert experience.advantages is not None
    start = 0
    for rewards in groups:
        own = experience.advantages[start : start + len(rewards), 2]
        start += len(rewards)
        assert float(own.sum()) == pytest.approx(0.0, abs=1e-5)
        if len(set(rewards)) == 1:
            assert not own.any()
