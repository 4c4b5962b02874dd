"""Make the start policy: random weights -> recall -> reading -> wasteful chains -> lazy behaviour.

No demonstration solves a multi-hop question cleanly: reading practice has one hop only, and every longer chain wastes
a search or stops early. Reinforcement learning is left to learn how to finish chains.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from tokenizers import AddedToken

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt, check_prompts
from tasks.agent.rollout import RolloutConf
from tasks.base.demonstrations import (
    Example,
    Renderer,
    ScriptedTurn,
    cited,
    expert_plan,
    imperfect_plan,
    single_hops,
    topic,
)
from tasks.base.fit import Fit, PhaseConf, supervision
from tasks.base.settings import BaseConf, FormatConf, TinyConf
from tasks.base.vocabulary import Vocabulary
from tasks.data.decomposition import hops_of
from tasks.model import Dtype, load_policy
from tasks.retrieval import Retriever
from tasks.supervised import Divides, opened
from tasks.types import Passage, Question

C = TypeVar("C", BaseConf, FormatConf)


@dataclass
class TinyPolicy:
    """Model, tokenizer and the record of its training."""

    model: Any
    tokenizer: Any
    history: list[dict[str, Any]]


@dataclass(frozen=True)
class Lessons(Generic[C]):
    """What a policy is taught, and with what.

    Attributes:
        conf, rollout: settings.
        prompt, grammar: of the demonstrations; the grammar is fitted to the tokenizer of the policy.
        questions: of all splits; only those of `train` are trained on, but all must fit the prompt budget.
        retriever: answers the scripted searches.
        seed: of weights, demonstrations and batches.
        scratch: checkpoints.
        log: receives (step, metrics).
        engine: divides the training among processes; None is this process.
    """

    conf: C
    rollout: RolloutConf
    prompt: Prompt
    grammar: SearchGrammar
    questions: Sequence[Question]
    retriever: Retriever
    seed: int
    scratch: Path
    log: Callable[[int, dict[str, float]], None]
    engine: Divides | None = None

    def training(self) -> list[Question]:
        """The training questions."""
        return [question for question in self.questions if question.split == "train"]

    def chosen(self) -> list[Question]:
        """The training questions that demonstrations are made from."""
        training = self.training()
        rng = random.Random(f"{self.seed}/base/questions")
        return rng.sample(training, min(self.conf.max_questions, len(training)))

    @contextmanager
    def fit(self, model: Any, dtype: Dtype = "float32", share_reading: bool = False) -> Iterator[Fit]:
        """The training of this model; continues from `scratch` after a kill, exactly."""
        every, tokens = self.conf.checkpoint_every, self.conf.max_batch_tokens
        with opened(model, supervision(dtype, share_reading), self.engine) as learner:
            yield Fit(learner, self.scratch, every, tokens, self.log, share_reading)

    def renderer(self, tokenizer: Any) -> Renderer:
        """Writes demonstrations; refuses questions that do not fit the prompt budget."""
        grammar = self.grammar.fitted(tokenizer)
        check_prompts(tokenizer, self.prompt, self.questions, grammar, self.rollout.max_prompt_tokens)
        return Renderer(self.rollout, tokenizer, self.retriever, grammar, self.prompt)


def make_tiny(tiny: TinyConf, passages: Iterable[Passage], lessons: Lessons[BaseConf]) -> TinyPolicy:
    """Teach a policy from random weights.

    Args:
        tiny: its size.
        passages: the corpus, streamed; its first passages give the vocabulary.
        lessons: see `Lessons`.
    """
    conf, seed, chosen = lessons.conf, lessons.seed, lessons.chosen()
    vocabulary = Vocabulary(tiny.max_vocab, lessons.prompt, lessons.grammar.literals)
    tokenizer = vocabulary.learned(lessons.training(), passages)
    model = new_model(tiny, tokenizer, seed)
    renderer = lessons.renderer(tokenizer)
    # A wide pool: with few tokens, copying is learned much later. From a few sentences no word is learned.
    words = range(256, tokenizer.vocab_size) or range(256)

    with lessons.fit(model) as fit:
        fit.run("recall", conf.recall, lambda step: recall_examples(f"{seed}/recall/{step}", conf.recall.batch, words))

        # A resumed run skips finished phases, so it does not render their demonstrations again.
        if "read" not in fit.finished:
            single = list({hop.question: hop for question in chosen for hop in single_hops(question)}.values())
            plans = _shown(renderer.grammar, [expert_plan(hop) for hop in single], f"{seed}/read")
            read = _usable(renderer.render(single, plans), renderer, single, plans)
            fit.run("read", conf.read, _sampler(read, conf.read.batch, f"{seed}/read"))

        _teach_flaws(lessons, fit, renderer, chosen, conf.wasteful)
    return TinyPolicy(model.eval(), tokenizer, fit.history)


def make_start(policy: Path, share: float, lessons: Lessons[BaseConf]) -> TinyPolicy:
    """Teach a tiny policy the tags of another grammar: a share of the phase `wasteful`, then the phase `lazy`.

    Args:
        policy: folder of the policy that `make_tiny` made.
        share: of the steps of `wasteful`.
        lessons: with the other grammar.
    """
    model, tokenizer = load_policy(policy)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in lessons.grammar.literals])
    torch.manual_seed(lessons.seed)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    renderer, wasteful = lessons.renderer(tokenizer), lessons.conf.wasteful
    tags = replace(wasteful, max_steps=math.ceil(share * wasteful.max_steps))

    with lessons.fit(model) as fit:
        _teach_flaws(lessons, fit, renderer, lessons.chosen(), tags)
    return TinyPolicy(model.eval(), tokenizer, fit.history)


def _teach_flaws(
    lessons: Lessons[BaseConf], fit: Fit, renderer: Renderer, chosen: Sequence[Question], wasteful: PhaseConf
) -> None:
    """The last two phases."""
    conf, seed = lessons.conf, lessons.seed
    topics = sorted({topic(hop) for question in chosen for hop in hops_of(question)})
    for name, phase, mixture in (
        ("wasteful", wasteful, conf.wasteful_mixture),
        ("lazy", conf.lazy, conf.lazy_mixture),
    ):
        if name not in fit.finished:
            rng = random.Random(f"{seed}/{name}/plans")
            plans = [imperfect_plan(question, topics, mixture, rng) for question in chosen]
            plans = _shown(renderer.grammar, plans, f"{seed}/{name}")
            examples = _usable(renderer.render(chosen, plans), renderer, chosen, plans)
            fit.run(name, phase, _sampler(examples, phase.batch, f"{seed}/{name}"))


def new_model(tiny: TinyConf, tokenizer: Any, seed: int) -> Any:
    """A Qwen2 causal LM with random weights that depend on the seed only."""
    from tasks.pretrained import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**sizes(tiny, tokenizer)))


def sizes(tiny: TinyConf, tokenizer: Any) -> dict[str, Any]:
    """The settings of a tiny causal LM as transformers names them, for any family of decoders."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": tiny.hidden_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_heads,
        "intermediate_size": tiny.intermediate_size,
        "max_position_embeddings": tiny.max_positions,
        "tie_word_embeddings": True,
        "initializer_range": tiny.initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _shown(grammar: SearchGrammar, plans: list[list[ScriptedTurn]], seed: str) -> list[list[ScriptedTurn]]:
    """The plans with evidence, where the grammar has it, from any of their searches.

    Which passage is worth copying is left to reinforcement learning, as the ends of chains are.
    """
    if not grammar.shows_evidence:
        return plans
    rng = random.Random(f"{seed}/evidence")
    return [cited(plan, rng.choice) for plan in plans]


def recall_examples(seed: str, batch: int, tokens: Sequence[int]) -> list[Example]:
    """Six random segments, then the same ones in another order; the mask leaves out first tokens, which are chance."""
    rng = random.Random(seed)
    examples = []
    for _ in range(batch):
        segments = [rng.choices(tokens, k=rng.randint(2, 4)) for _ in range(6)]
        shown = tuple(t for segment in segments for t in segment)
        repeated = rng.sample(segments, len(segments))
        mask = tuple(i > 0 for segment in repeated for i in range(len(segment)))
        examples.append(Example(shown, tuple(t for segment in repeated for t in segment), mask))
    return examples


def _sampler(examples: list[Example], batch: int, seed: str) -> Callable[[int], list[Example]]:
    def sample(step: int) -> list[Example]:
        return random.Random(f"{seed}/{step}").choices(examples, k=batch)

    return sample


def _usable(
    examples: list[Example], renderer: Renderer, questions: Sequence[Question], plans: Sequence[Sequence[ScriptedTurn]]
) -> list[Example]:
    """The demonstrations with a turn inside the budgets.

    Raises:
        ValueError: none has; it names the budget, and what these questions need.
    """
    kept = [example for example in examples if any(example.loss_mask)]
    if not kept:
        raise ValueError(_too_long(renderer, questions, plans))
    return kept


def _too_long(renderer: Renderer, questions: Sequence[Question], plans: Sequence[Sequence[ScriptedTurn]]) -> str:
    """Which budget no first turn of these plans fits into."""
    conf, count = renderer.conf, len(questions)
    needs = [renderer.first_turn(question, plan) for question, plan in zip(questions, plans, strict=True)]
    calls = sorted(call for call, _ in needs)
    if not calls:
        return "no demonstration: there is no train question. Add questions with split train."
    if conf.max_turns < 1:
        return "no demonstration fits max_turns=0, which allows no search. Raise it in conf/scale."
    name, limit, found = "max_call_tokens", conf.max_call_tokens, calls
    if calls[0] <= limit:  # The call fits, so prompt, call and observation together do not.
        name, limit, found = "max_total_tokens", conf.max_total_tokens, sorted(total for _, total in needs)
    return (
        f"no demonstration of {count:,} fits {name}={limit}: the first search of a question takes {found[0]} to "
        f"{found[-1]} tokens of the tiny policy's vocabulary, half of them {found[count // 2]} or more. Write "
        f"`rollout: {{{name}: {found[-1]}}}` for this scale into the file of conf/data, or raise it in conf/scale."
    )
