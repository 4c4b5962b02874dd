"""Reinforcement learning learns: from a policy that mostly answers at once and wrongly to one that searches first.

The start policy has seen each question played in two ways: a search, then the right answer (one time in four), and a
wrong answer at once. A few steps on the reward of the answer alone have to raise how often it searches and is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import retrieval
from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.agent.rollout import Player, RolloutConf
from tasks.base.demonstrations import Renderer, ScriptedTurn, expert_plan
from tasks.base.fit import Fit, PhaseConf
from tasks.base.make import new_model
from tasks.base.settings import TinyConf
from tasks.base.tokenizer import build_tokenizer
from tasks.data import world
from tasks.data.records import read_passages, read_questions
from tasks.generate import Sampling
from tasks.generate.plain import PlainGenerator
from tasks.rewards.answer import AnswerReward
from tasks.train.loop import Trainer
from tasks.types import Action, Question, Scores, Trajectory
from tests.base.small import SMALL
from tests.tiny import PROMPT, make_learner, make_method, make_policy, optimizer, train_conf

ROOT = Path(__file__).parents[2]
TINY = TinyConf(64, 2, 4, 128, 512, 900, 0.05)
BUDGET = RolloutConf(
    max_turns=1, max_prompt_tokens=100, max_call_tokens=24, max_observation_tokens=60, max_total_tokens=240, top_k=1,
    batch_rows=256,
)  # fmt: skip
SAMPLED = Sampling(temperature=1.0, top_p=1.0, stop=(), seed=5)


@dataclass(frozen=True)
class Signed(AnswerReward):
    """The reward of the answer, or its opposite."""

    sign: float = 1.0

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Any = None
    ) -> list[Scores]:
        scores = super().__call__(trajectories, questions, services)
        return [replace(one, placed=tuple((place, self.sign * value) for place, value in one.placed)) for one in scores]


@dataclass(frozen=True)
class Start:
    """A policy and what it plays with."""

    questions: list[Question]
    search: Any
    tokenizer: Any
    grammar: SearchR1Grammar
    weights: dict[str, torch.Tensor]

    def trainer(self, scratch: Path, sign: float) -> Trainer:
        """Six steps of GRPO on all questions."""
        model = new_model(TINY, self.tokenizer, seed=0).eval()
        model.load_state_dict(self.weights)
        conf = train_conf(
            num_steps=6, rollouts_per_step=96, max_batch_tokens=8192, policy=optimizer(lr=1e-3), validate_every=6,
            checkpoint_every=6, minibatches=2, old_logprobs="sampler", select="last",
        )  # fmt: skip
        policy = make_policy(model, self.tokenizer, conf=conf.policy, reference=False)
        generator = PlainGenerator(policy.causal_lm, self.tokenizer, shares_weights=True)
        method = make_method("grpo", self.tokenizer, kl_coefficient=0.0, group_size=8)
        player = Player(BUDGET, generator, self.tokenizer, self.search, self.grammar, PROMPT)
        return Trainer(
            conf=conf, method=replace(method, rewards=(Signed("em", sign=sign),)), policy=policy, critic=None,
            generator=generator, player=player, validator=replace(player), questions=self.questions,
            validation=self.questions[:2], seed=0, scratch=scratch, log=lambda step, metrics: None,
        )  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Taught once, in some seconds."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("learning")
    world.write_world(SMALL, folder)
    retrieval.build(folder / "corpus.jsonl", folder / "index", retrieval.load_settings("bm25", ROOT))
    search = retrieval.open_retriever(folder / "index", folder / "corpus.jsonl")
    questions = [q for q in read_questions(folder / "questions.jsonl") if q.split == "train" and q.hops == 1][:12]

    answers = [question.answers[0] for question in questions]
    others = [next(other for other in answers[i + 1 :] + answers if other != answers[i]) for i in range(len(answers))]
    plans = [[*[_lazy(other)] * 3, expert_plan(q)] for q, other in zip(questions, others, strict=True)]
    texts = [f" {p.title} {p.text}" for p in read_passages(folder / "corpus.jsonl")]
    texts += [f" {q.question} next found guess" for q in questions]
    tokenizer = build_tokenizer([*texts, PROMPT.user] * 2, 900)

    grammar = SearchR1Grammar().fitted(tokenizer)
    renderer = Renderer(BUDGET, tokenizer, search, grammar, PROMPT)
    examples = renderer.render([q for q in questions for _ in range(4)], [plan for some in plans for plan in some])
    model = new_model(TINY, tokenizer, seed=0)
    fit = Fit(make_learner(model), folder / "fit", 10_000, 8192, lambda step, metrics: None)
    fit.run("start", PhaseConf(150, len(examples), 4e-3, True, 0.0), lambda step: examples)
    return Start(questions, search, tokenizer, grammar, {k: v.clone() for k, v in model.state_dict().items()})


def _lazy(answer: str) -> list[ScriptedTurn]:
    return [ScriptedTurn("guess", Action("answer", answer))]


def _measured(trainer: Trainer) -> tuple[float, float]:
    """Share of right answers and searches a question, at temperature 1."""
    played = trainer.validator.play(trainer.questions, 16, SAMPLED)
    right = {question.id: question.answers for question in trainer.questions}
    exact = sum(one.answer in right[one.question_id] for one in played) / len(played)
    return exact, sum(turn.executed for one in played for turn in one.turns) / len(played)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_few_steps_raise_what_is_rewarded(start: Start, tmp_path: Path, sign: float) -> None:
    trainer = start.trainer(tmp_path, sign)
    em, searches = _measured(trainer)
    assert 0.15 < em < 0.5
    assert 0.15 < searches < 0.5
    assert trainer.run().step == 6
    trained_em, trained_searches = _measured(trainer)
    if sign > 0:
        assert trained_em > em + 0.3
        assert trained_searches > searches + 0.3
    else:
        assert trained_em < em / 2
        assert trained_searches < searches
