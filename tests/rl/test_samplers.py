"""Who draws the trajectories: groups in order, and gold answers that nobody drew."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.generate import Sampling
from tasks.rewards.answer import AnswerReward
from tasks.rl.advantages.constant import ConstantAdvantage
from tasks.rl.experience import collate
from tasks.rl.losses.imitation import Imitation
from tasks.rl.samplers.gold_answers import GoldAnswers
from tasks.rl.samplers.independent_group import IndependentGroup
from tasks.rl.samples import whole_trajectories
from tasks.types import Scores
from tests.tiny import Script, Shelf, make_grammar, make_player, question

SAMPLING = Sampling(1.0, 1.0, (), 0)


def no_score(trajectories: Any, questions: Any) -> list[Scores]:
    return [Scores(0.0, ())] * len(trajectories)


def test_groups_in_order(tokenizer: Any) -> None:
    script = Script(tokenizer, [[f"<answer> {i} </answer>"] for i in range(6)])
    asked = [question(0), question(1)]
    found = IndependentGroup(3).draw(make_player(script, tokenizer), asked, SAMPLING, no_score).trajectories
    assert [(t.question_id, t.answer) for t in found] == [(f"q{i // 3}", str(i)) for i in range(6)]
    assert len({t.group_id for t in found}) == 2
    with pytest.raises(ValueError, match="size=0"):
        IndependentGroup(0)


@pytest.mark.parametrize("name", ["search_r1", "answer_only", "research", "tool_call"])
def test_gold_answers_are_what_the_policy_would_write(tokenizer: Any, name: str) -> None:
    """No call, no search; the record parses back to the gold answer and gets full marks."""
    grammar, shelf, script = make_grammar(name, tokenizer), Shelf(), Script(tokenizer, [])
    player = make_player(script, tokenizer, shelf, grammar)
    asked = [question(0, answers=("Hask", "Farrow")), question(1, answers=("New Elvane",))]
    found = GoldAnswers().draw(player, asked, SAMPLING, no_score).trajectories
    assert [t.answer for t in found] == ["Hask", "New Elvane"]
    assert (script.opened, shelf.asked) == (0, [])
    assert [score.outcome for score in AnswerReward("em")(found, asked)] == [1.0, 1.0]
    for t, q in zip(found, asked, strict=True):
        assert tokenizer.decode(list(t.prompt_ids)) == f"Question: {q.question}\n"
        text = tokenizer.decode(list(t.response_ids))
        assert (text, grammar.parse(text).content) == (t.turns[0].text, q.answers[0])
        assert grammar.is_complete(text)
        assert all(t.loss_mask)
        assert (t.turns[0].start, t.turns[0].end, t.turns[0].observation_end) == (0, *[len(t.response_ids)] * 2)
    assert found[0].group_id != found[1].group_id
    assert not GoldAnswers().has_logprobs


def test_every_gold_token_is_imitated_alike(tokenizer: Any) -> None:
    """The loss is the mean negative logprob of the answer's tokens."""
    import torch

    from tasks.rl.losses import Normalizer

    asked = [question(0), question(1, answers=("Hask Hask Hask",))]
    found = GoldAnswers().draw(make_player(Script(tokenizer, []), tokenizer), asked, SAMPLING, no_score).trajectories
    batch = ConstantAdvantage()(collate(whole_trajectories(found), AnswerReward("em")(found, asked)))
    logprobs = -torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(0))
    logprobs[~batch.loss_mask] = float("nan")
    logprobs.requires_grad_()
    from dataclasses import replace

    batch = replace(batch, old_logprobs=torch.zeros_like(batch.rewards))
    loss, _ = Imitation()(batch, logprobs, torch.zeros_like(logprobs), Normalizer.of(batch.loss_mask))
    own = logprobs.detach()[batch.loss_mask]
    assert loss.item() == pytest.approx(-own.mean().item(), abs=1e-6)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[batch.loss_mask].tolist() == pytest.approx([-1 / len(own)] * len(own))
