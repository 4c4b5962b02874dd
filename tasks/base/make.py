"""Make the start policy: random weights -> recall -> reading -> wasteful chains -> lazy behaviour.

No demonstration solves a multi-hop question cleanly: reading practice has one hop only, and every longer chain wastes
a search or stops early. Reinforcement learning is left to learn how to finish chains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import PLACEHOLDER, Prompt, check_prompts
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
from tasks.base.fit import Fit
from tasks.base.settings import BaseConf, TinyConf
from tasks.base.tokenizer import LITERALS, build_tokenizer
from tasks.data.decomposition import hops_of
from tasks.retrieval import Retriever
from tasks.types import Passage, Question

NUM_PASSAGES_FOR_TOKENS = 20_000


@dataclass
class TinyPolicy:
    """Model, tokenizer and the record of its training."""

    model: Any
    tokenizer: Any
    history: list[dict[str, Any]]


def make_tiny(
    tiny: TinyConf,
    conf: BaseConf,
    rollout: RolloutConf,
    prompt: Prompt,
    grammar: SearchGrammar,
    questions: Sequence[Question],
    passages: Iterable[Passage],
    retriever: Retriever,
    seed: int,
    scratch: Path,
    log: Callable[[int, dict[str, float]], None],
) -> TinyPolicy:
    """Train the tiny policy on training questions; continues from `scratch` after a kill, exactly.

    Args:
        tiny, conf, rollout: settings.
        prompt, grammar: of the demonstrations; the grammar is fitted to the tokenizer that is made here.
        questions: of all splits; only those of `train` are trained on, but all must fit the prompt budget.
        passages: the corpus, streamed; its first passages give the vocabulary.
        retriever: answers the scripted searches.
        seed: of weights, demonstrations and batches.
        scratch: checkpoints.
        log: receives (step, metrics).
    """
    training = [question for question in questions if question.split == "train"]
    chosen = random.Random(f"{seed}/base/questions").sample(training, min(conf.max_questions, len(training)))
    literals = (*LITERALS, *grammar.literals)
    tokenizer = build_tokenizer(_texts(training, passages, prompt), tiny.max_vocab, literals)
    model = new_model(tiny, tokenizer, seed)
    grammar = grammar.fitted(tokenizer)
    check_prompts(tokenizer, prompt, questions, grammar, rollout.max_prompt_tokens)
    renderer = Renderer(rollout, tokenizer, retriever, grammar, prompt)
    fit = Fit(model, scratch, conf.checkpoint_every, conf.max_batch_tokens, log)

    words = range(256, tokenizer.vocab_size)  # A wide pool: with few tokens, copying is learned much later.
    fit.run("recall", conf.recall, lambda step: recall_examples(f"{seed}/recall/{step}", conf.recall.batch, words))

    # A resumed run skips finished phases, so it does not render their demonstrations again.
    if "read" not in fit.finished:
        single = list({hop.question: hop for question in chosen for hop in single_hops(question)}.values())
        read = _usable(renderer.render(single, _shown(grammar, [expert_plan(q) for q in single], f"{seed}/read")))
        fit.run("read", conf.read, _sampler(read, conf.read.batch, f"{seed}/read"))

    topics = sorted({topic(hop) for question in chosen for hop in hops_of(question)})
    for name, phase, mixture in (
        ("wasteful", conf.wasteful, conf.wasteful_mixture),
        ("lazy", conf.lazy, conf.lazy_mixture),
    ):
        if name not in fit.finished:
            rng = random.Random(f"{seed}/{name}/plans")
            plans = [imperfect_plan(question, topics, mixture, rng) for question in chosen]
            examples = _usable(renderer.render(chosen, _shown(grammar, plans, f"{seed}/{name}")))
            fit.run(name, phase, _sampler(examples, phase.batch, f"{seed}/{name}"))

    return TinyPolicy(model.eval(), tokenizer, fit.history)


def new_model(tiny: TinyConf, tokenizer: Any, seed: int) -> Any:
    """A Qwen2 causal LM with random weights that depend on the seed only."""
    from tasks.pretrained import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=tiny.hidden_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_heads,
        intermediate_size=tiny.intermediate_size,
        max_position_embeddings=tiny.max_positions,
        tie_word_embeddings=True,
        initializer_range=tiny.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def _texts(questions: Sequence[Question], passages: Iterable[Passage], prompt: Prompt) -> Iterator[str]:
    """Text as the policy will read it, so that words get a token both with and without a space before them."""
    for _, passage in zip(range(NUM_PASSAGES_FOR_TOKENS), passages, strict=False):
        yield f" {passage.title} {passage.text}"
        yield passage.title
    for question in questions:
        yield prompt.user.replace(PLACEHOLDER, question.question)
        for hop in hops_of(question):
            yield f" next {topic(hop)} {topic(hop)} found , {hop.queries[0]}"


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


def _usable(examples: list[Example]) -> list[Example]:
    kept = [example for example in examples if any(example.loss_mask)]
    if not kept:
        raise ValueError(
            "no demonstration fits the budgets. Raise max_call_tokens, max_prompt_tokens or max_total_tokens in "
            "conf/scale, or lower max_observation_tokens."
        )
    return kept
