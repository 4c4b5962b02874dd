"""Make the start policy: random weights -> recall -> reading -> wasteful chains -> lazy behaviour.

No demonstration solves a multi-hop question cleanly: reading has one hop only, every longer chain wastes a
search or stops early. What reinforcement learning adds is to finish chains.
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
from tasks.base.demonstrations import Example, Renderer, expert_plan, imperfect_plan, single_hops, topic
from tasks.base.fit import Fit
from tasks.base.settings import BaseConf, TinyConf
from tasks.base.tokenizer import build_tokenizer
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
    tiny: TinyConf, conf: BaseConf, rollout: RolloutConf, prompt: Prompt, grammar: SearchGrammar,
    questions: Sequence[Question], passages: Iterable[Passage], retriever: Retriever, seed: int, scratch: Path,
    log: Callable[[int, dict[str, float]], None],
) -> TinyPolicy:  # fmt: skip
    """Train the tiny policy on training questions; continues from `scratch` after a kill, exactly.

    Args:
        tiny, conf, rollout: settings.
        prompt, grammar: of the demonstrations; the grammar is fitted to the tokenizer that is made here.
        questions: of all splits; only those of `train` are learned from, all must fit the prompt budget.
        passages: the corpus, streamed; the first of them give the vocabulary.
        retriever: answers the scripted searches.
        seed: of weights, demonstrations and batches.
        scratch: checkpoints.
        log: receives (step, metrics).
    """
    everything, questions = questions, [question for question in questions if question.split == "train"]
    chosen = random.Random(f"{seed}/base/questions").sample(list(questions), min(conf.max_questions, len(questions)))
    tokenizer = build_tokenizer(_texts(questions, passages, prompt), tiny.max_vocab)
    model = new_model(tiny, tokenizer, seed)
    grammar = grammar.fitted(tokenizer)
    renderer = Renderer(rollout, tokenizer, retriever, grammar, prompt)
    check_prompts(tokenizer, prompt, everything, grammar, rollout.max_prompt_tokens)
    fit = Fit(model, scratch, conf.checkpoint_every, conf.max_batch_tokens, log)
    words = range(256, tokenizer.vocab_size)  # A wide pool: with few tokens, copying is learned much later.
    fit.run("recall", conf.recall, lambda step: _recall(f"{seed}/recall/{step}", conf.recall.batch, words))
    if "read" not in fit.finished:
        single = list({hop.question: hop for question in chosen for hop in single_hops(question)}.values())
        read = _usable(renderer.render(single, [expert_plan(q) for q in single]))
        fit.run("read", conf.read, _sampler(read, conf.read.batch, f"{seed}/read"))
    topics = sorted({topic(hop) for question in chosen for hop in hops_of(question)})
    for name, phase, mixture in (
        ("wasteful", conf.wasteful, conf.wasteful_mixture),
        ("lazy", conf.lazy, conf.lazy_mixture),
    ):
        if name not in fit.finished:
            rng = random.Random(f"{seed}/{name}/plans")
            plans = [imperfect_plan(question, topics, mixture, rng) for question in chosen]
            examples = _usable(renderer.render(chosen, plans))
            fit.run(name, phase, _sampler(examples, phase.batch, f"{seed}/{name}"))
    return TinyPolicy(model.eval(), tokenizer, fit.history)


def new_model(tiny: TinyConf, tokenizer: Any, seed: int) -> Any:
    """A Qwen2 causal LM with random weights that depend on the seed only."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

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
    """Text as the policy will meet it, so that words with and without a space before them get their tokens."""
    for _, passage in zip(range(NUM_PASSAGES_FOR_TOKENS), passages, strict=False):
        yield f" {passage.title} {passage.text}"
        yield passage.title
    for question in questions:
        yield prompt.user.replace(PLACEHOLDER, question.question)
        for hop in hops_of(question):
            yield f" next {topic(hop)} {topic(hop)} found , {hop.queries[0]}"


def _recall(seed: str, batch: int, tokens: Sequence[int]) -> list[Example]:
    """Six random segments, then the same in another order; all but each segment's first token is predictable."""
    rng = random.Random(seed)
    examples = []
    for _ in range(batch):
        segments = [rng.choices(tokens, k=rng.randint(2, 4)) for _ in range(6)]
        shown = tuple(t for segment in segments for t in segment)
        again = rng.sample(segments, len(segments))
        mask = tuple(i > 0 for segment in again for i in range(len(segment)))
        examples.append(Example(shown, tuple(t for segment in again for t in segment), mask))
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
