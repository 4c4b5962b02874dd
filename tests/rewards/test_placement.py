"""Where rewards land, with real tokenizers: on the very token that completes a tag, however tokens merge around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasks.agent.grammar import SearchGrammar
from tasks.rewards import Reward, total
from tasks.rewards.answer import AnswerReward
from tasks.rewards.key import KeyReward
from tasks.rewards.overlong import OverlongPenalty
from tasks.rewards.search_turns import SearchTurnReward
from tasks.rewards.turn_rules import TurnRules
from tasks.rl.experience import collate
from tasks.rl.samples import whole_trajectories
from tasks.types import Action, Hit, Hop, Passage, Scores, Trajectory
from tests.tiny import Library, load_method, make_grammar, play_script, question

GOLD = Hit("g", 1.0, "Avenor", "Bristow rules Avenor .")
OTHER = Hit("o", 1.0, "Hask", "Farrow rules Hask .")
LIBRARY = {"gold": [OTHER, GOLD], "other": [OTHER], "more": [OTHER, OTHER]}
ASKED = replace(
    question(), decomposition=(Hop("Who?", "Bristow", "g", ("gold",)),),
    gold_passage_ids=("g",), gold_passages=(Passage("g", GOLD.title, GOLD.text),),
)  # fmt: skip
REWARDS: tuple[Reward, ...] = (
    AnswerReward("f1"), KeyReward(0.618), SearchTurnReward(), TurnRules(0.3, -0.2), OverlongPenalty(100, 99),
)  # fmt: skip


@pytest.fixture(params=["tokenizer", "merging"])
def either(request: Any) -> Any:
    """Tags as single tokens, and tags of many tokens whose ">" merges with its neighbours."""
    return request.getfixturevalue(request.param)


def merged(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that ends in one token made of ">" and what follows it."""
    ids = list(tokenizer.encode(text))
    last = tokenizer.decode(ids[-1:])
    assert last.startswith(">")
    assert len(last) > 1
    return ids


def split(tokenizer: Any, text: str) -> list[int]:
    """Ids of the text letter by letter: closing tags of as many tokens as they have letters."""
    return [i for letter in text for i in tokenizer.encode(letter)]


def check_places(tokenizer: Any, t: Trajectory, closing: str, scores: list[Scores]) -> None:
    """Every turn value stands on the token that completes an executed search's closing tag, outcomes on the last."""
    allowed = set()
    for turn in t.turns:
        if turn.executed:
            upto, before = (tokenizer.decode(list(t.response_ids[turn.start : turn.end - cut])) for cut in (0, 1))
            assert closing in upto
            assert closing not in before
            allowed.add(turn.end - 1)
    for place, _ in scores[2].placed:
        assert place in allowed
    assert [place for place, _ in scores[2].placed] == sorted(allowed)
    for outcome in (scores[0], scores[1], scores[4]):
        assert [place for place, _ in outcome.placed] == [t.last_generated]
    assert all(t.loss_mask[place] for score in scores for place, _ in score.placed)


def lines(grammar: SearchGrammar, queries: list[str]) -> list[str]:
    """Searches, an invalid turn after the first, an answer."""
    calls = [f"<think> so </think> {grammar.render(Action('search', q, (q,)))}" for q in queries]
    return [calls[0], "so what", *calls[1:], "<think> so </think> <answer> Bristow </answer>"]


@pytest.mark.parametrize(
    ("name", "closing"), [("search_r1", "</search>"), ("stepsearch", "</search>"), ("tool_call", "</tool_call>")]
)
def test_every_value_on_its_token(either: Any, name: str, closing: str) -> None:
    grammar = make_grammar(name, either)
    t = play_script(either, lines(grammar, ["other", "gold", "more"]), grammar, Library(by_query=LIBRARY), ASKED)
    assert [turn.action.kind for turn in t.turns] == ["search", "invalid", "search", "search", "answer"]
    scores = [reward([t], [ASKED])[0] for reward in REWARDS]
    check_places(either, t, closing, scores)
    steps, rules = scores[2], scores[3]
    ends = [turn.end - 1 for turn in t.turns]
    assert [place for place, _ in steps.placed] == [ends[0], ends[2], ends[3]]
    similar = SearchTurnReward()([t], [ASKED])[0].placed[0][1]
    assert [value for _, value in steps.placed] == pytest.approx([similar, 1 - similar - 0.5, -1.0])
    assert rules.placed == ((ends[1], -0.2), (ends[2], 0.3))
    added = total(scores)
    for place in ends:
        assert dict(added.placed).get(place, 0.0) == pytest.approx(
            sum(value for score in scores for at, value in score.placed if at == place)
        )


def test_merged_closing_tags(merging: Any) -> None:
    """Closing tags whose ">" is one token with line ends, and closing tags of one token a letter."""
    grammar = make_grammar("stepsearch", merging)
    script: list[Any] = [
        merged(merging, "<think> so </think>\n<search> other </search>\n\n"),
        split(merging, "<think> so </think>\n<search> gold </search>"),
        "so </sear",
        merged(merging, "<search> more </search>\n\n"),
        merged(merging, "<think> so </think>\n<answer> Bristow </answer>\n\n"),
    ]
    t = play_script(merging, script, grammar, Library(by_query=LIBRARY), ASKED)
    assert [turn.action.kind for turn in t.turns] == ["search", "search", "invalid", "search", "answer"]
    for turn, line in zip(t.turns, script, strict=True):
        if not isinstance(line, str):
            assert list(t.response_ids[turn.start : turn.end]) == line
    scores = [reward([t], [ASKED])[0] for reward in REWARDS]
    check_places(merging, t, "</search>", scores)
    assert scores[0].outcome == 1.0
    assert scores[1].outcome == pytest.approx(0.618)
    batch = collate(whole_trajectories([t]), [total(scores)])
    start = len(t.prompt_ids)
    rewarded = {place - start for place in batch.rewards[0].nonzero()[:, 0].tolist()}
    assert rewarded <= {turn.end - 1 for turn in t.turns}
    assert bool(batch.loss_mask[0, [start + place for place in rewarded]].all())


def test_two_values_on_one_token_add_up(either: Any) -> None:
    """A trajectory that ends in an executed search: its step value and the outcome share the last generated token."""
    grammar = make_grammar("search_r1", either)
    script = lines(grammar, ["other", "gold"])[:3]
    t = play_script(either, [*script, []], grammar, Library(by_query=LIBRARY), ASKED, max_turns=3)
    third = t.turns[2]
    assert t.status == "open"
    assert (third.executed, t.last_generated) == (True, third.end - 1)
    scores = [reward([t], [ASKED])[0] for reward in (SearchTurnReward(), OverlongPenalty(1, 1))]
    (step_place, step_value), (outcome_place, outcome_value) = scores[0].placed[-1], scores[1].placed[0]
    assert step_place == outcome_place == t.last_generated
    assert outcome_value == -1.0
    assert step_value > 0
    assert dict(total(scores).placed)[t.last_generated] == pytest.approx(step_value - 1.0)
    assert collate(whole_trajectories([t]), [total(scores)]).rewards.sum().item() == pytest.approx(
        sum(v for s in scores for _, v in s.placed)
    )


@pytest.mark.parametrize("name", ["stepsearch", "mt_ppo", "dapo"])
def test_a_composed_method_loses_no_value(either: Any, name: str) -> None:
    """The tensor of rewards holds what the rewards placed, at the same tokens."""
    method = load_method(name, "laptop", either)
    t = play_script(either, lines(method.grammar, ["other", "gold"]), method.grammar, Library(by_query=LIBRARY), ASKED)
    scores = [reward([t], [ASKED])[0] for reward in method.rewards]
    batch = collate(whole_trajectories([t]), [total(scores)])
    wanted: dict[int, float] = {}
    for place, value in (pair for score in scores for pair in score.placed):
        wanted[place] = wanted.get(place, 0.0) + value
    start = len(t.prompt_ids)
    for place in range(len(t.response_ids)):
        assert batch.rewards[0, start + place].item() == pytest.approx(wanted.get(place, 0.0), abs=1e-6)
