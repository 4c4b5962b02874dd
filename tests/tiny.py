"""A tiny random policy and scripted surroundings: what tests of rollout, engine and loop play with."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tasks import methods
from tasks.agent import grammars
from tasks.agent.grammar import SearchGrammar
from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.agent.prompts import Prompt
from tasks.agent.rollout import Player, RolloutConf
from tasks.base.fit import supervision
from tasks.base.tokenizer import END, PAD, build_tokenizer
from tasks.engine import OptimizerConf
from tasks.engine.plain import PlainCritic, PlainPolicy
from tasks.generate import Call, Sampling
from tasks.generate.plain import PlainGenerator
from tasks.methods import loader
from tasks.model import LoraConf, export_folder
from tasks.retrieval import RetrievalError
from tasks.rewards import on_last_token
from tasks.rewards.answer import AnswerReward
from tasks.rl.advantages.gae import TokenGae
from tasks.rl.advantages.group import GroupAdvantage
from tasks.rl.filters.keep_all import KeepAll
from tasks.rl.losses import LossSum, LossTerm
from tasks.rl.losses.entropy import EntropyBonus
from tasks.rl.losses.policy_clip import PolicyClip
from tasks.rl.losses.reference_kl import ReferenceKl
from tasks.rl.method import Method
from tasks.rl.samplers.independent_group import IndependentGroup
from tasks.rl.search.index import IndexSearch
from tasks.rl.value_losses.clipped_value import ClippedValueLoss
from tasks.supervised import PlainLearner
from tasks.train.loop import Trainer
from tasks.train.settings import TrainConf
from tasks.types import Hit, Question, Scores, Trajectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PLACES = ["Avenor", "Bristow", "Calmere", "Dunholt", "Elvane", "Farrow", "Gildern", "Hask"]
TEXTS = [f"Who rules {a} ? {b} rules {a} , the town near {b} ." for a in PLACES for b in PLACES if a != b]
TAGGED = [f"<think> so </think>\n<search> {a} </search>\n\n<answer> {b} </answer>\n\n" for a in PLACES for b in PLACES]
PROMPT = Prompt(None, "Question: {question}\n")


def make_grammar(kind: str, tokenizer: Any = None) -> SearchGrammar:
    """A kind of grammar with its own texts."""
    return grammars.make({"kind": kind}, tokenizer, "a test")


def load_method(name: str, scale: str, tokenizer: Any = None, root: Path = Path(__file__).parents[1]) -> Method:
    """A method of `conf/method/` as it is at one scale, with its own prompt and grammar."""
    return methods.build(loader.load(name, scale, root), tokenizer)


def make_learner(model: Any, dtype: Any = "float32", share_reading: bool = False) -> PlainLearner:
    """Trains this very model to answer as in examples."""
    return PlainLearner(model, supervision(dtype, share_reading))


@functools.lru_cache(maxsize=1)
def make_tokenizer() -> Any:
    """The tiny policy's own tokenizer: tags are single tokens. Made once, and nobody may change it."""
    return build_tokenizer([*TEXTS, PROMPT.user] * 2, 420)


def make_merging_tokenizer() -> Any:
    """A byte-level BPE without any literal, in which ">" merges with the signs and line ends around it."""
    import json

    from tokenizers import pre_tokenizers, trainers
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Qwen2Tokenizer(vocab=alphabet, merges=[]).backend_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=420, min_frequency=2, initial_alphabet=list(alphabet), show_progress=False)
    core.train_from_iterator([*TEXTS, *TAGGED, "a></b>" * 9, "x></y>\n" * 9], trainer)
    model = json.loads(core.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    return Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, unk_token=None, eos_token=END, pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(
    tokenizer: Any, seed: int = 0, kv_heads: int = 4, tied: bool = True, sharpness: float = 4.0, hidden: int = 32
) -> Any:
    """A Qwen2 of two layers and random weights drawn here, so that no library changes them.

    `sharpness` scales matrices, so that predictions are not all alike.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, intermediate_size=2 * hidden, max_position_embeddings=512,
        tie_word_embeddings=tied, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 * sharpness)
    return model.eval()


def let_search(model: Any, tokenizer: Any, softness: float) -> Any:
    """This random model, changed in place so that it often writes tags; a higher `softness` makes them less likely.

    Its weights say so, because another process reads them from a file: number 0 of a hidden state is the same for all
    tokens and layers, so the output head, which is not tied, can add to a token's logit.
    """
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.3
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        head[:, 0] = 0.0
        for tag, weight in {" <search>": 4.0, " </search>": 4.5, " <answer>": 2.0, " </answer>": 3.5}.items():
            (token,) = tokenizer.encode(tag)
            head[token, 0] = weight / softness
    return model


def logits_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] of a plain forward over one unpadded sequence."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def logprobs_of(model: Any, ids: Sequence[int], start: int) -> torch.Tensor:
    """Logprobs of ids[start:], each given all before it, by a plain forward."""
    table = logits_of(model, ids)[:-1].log_softmax(-1)
    return table.gather(-1, torch.tensor(list(ids[1:]))[:, None])[start - 1 :, 0]


def question(number: int = 0, text: str | None = None, answers: tuple[str, ...] = ("Bristow",)) -> Question:
    """A training question about a place."""
    return Question(f"q{number}", "world", "train", text or f"Who rules {PLACES[number % 8]} ?", answers, 1)


def hit(text: str = "Bristow rules Avenor .", title: str = "Avenor", number: int = 0) -> Hit:
    """A retrieved passage."""
    return Hit(f"p{number}", 1.0, title, text)


@dataclass
class Shelf:
    """A retriever: `hits` for every query; the first `failures` searches raise (-1: all)."""

    hits: list[Hit] = field(default_factory=lambda: [hit()])
    failures: int = 0
    asked: list[list[str]] = field(default_factory=list)

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        self.asked.append(list(queries))
        if self.failures:
            self.failures -= 1
            raise RetrievalError("the index is away")
        return [self.hits[:top_k] for _ in queries]


@dataclass
class Script:
    """A generator that writes what it is told: `lines[row]` holds one piece of text (or ids) per call."""

    tokenizer: Any
    lines: list[list[str | list[int]]]
    rows: list[list[int]] = field(default_factory=list)
    opened: int = 0
    num_prefilled: int = 0
    num_generated: int = 0
    closed: set[int] = field(default_factory=set)
    appended: list[tuple[int, list[int]]] = field(default_factory=list)
    longest: int = 0
    stop: tuple[str, ...] = ()
    shares_weights: bool = False
    begun: dict[int, int] = field(default_factory=dict)

    def open(self, prompts: Any, copies: int, sampling: Sampling, max_total_tokens: int) -> Script:
        self.opened += 1
        self.closed = set()
        self.rows = [list(p) for p in prompts for _ in range(copies)]
        self.stop, self.longest = sampling.stop, max_total_tokens
        return self

    def generate(self, rows: Sequence[int], max_new_tokens: Sequence[int]) -> list[Call]:
        calls = []
        for row, budget in zip(rows, max_new_tokens, strict=True):
            assert row not in self.closed
            assert budget >= 1
            line = self.lines[row].pop(0)
            whole = self.tokenizer.encode(line) if isinstance(line, str) else line
            ids = whole[:budget]
            text = self.tokenizer.decode(ids)
            self.rows[row] += ids
            self.num_generated += len(ids)
            assert len(self.rows[row]) <= self.longest
            calls.append(Call(tuple(ids), (-0.5,) * len(ids), any(s in text for s in self.stop)))
        return calls

    def submit(self, row: int, max_new_tokens: int) -> None:
        assert row not in self.begun
        self.begun[row] = max_new_tokens

    def advance(self) -> list[tuple[int, Call]]:
        row = min(self.begun)
        return [(row, *self.generate([row], [self.begun.pop(row)]))]

    def extend(self, prompts: Any, copies: int) -> list[int]:
        first = len(self.rows)
        self.rows += [list(p) for p in prompts for _ in range(copies)]
        return list(range(first, len(self.rows)))

    def append(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        for row, ids in zip(rows, token_ids, strict=True):
            assert ids
            self.rows[row] += ids
            self.num_prefilled += len(ids)
            self.appended.append((row, list(ids)))
            assert len(self.rows[row]) < self.longest

    def fork(self, row: int, times: int) -> list[int]:
        assert row not in self.closed
        new_rows = list(range(len(self.rows), len(self.rows) + times))
        self.rows += [list(self.rows[row]) for _ in new_rows]
        return new_rows

    def close(self, rows: Sequence[int]) -> None:
        self.closed |= set(rows)


def rollout_conf(**changes: Any) -> RolloutConf:
    """Small budgets."""
    base = {
        "max_turns": 2, "max_prompt_tokens": 64, "max_call_tokens": 24, "max_observation_tokens": 40,
        "max_total_tokens": 300, "top_k": 2, "batch_rows": 64,
    }  # fmt: skip
    return RolloutConf(**(base | changes))


def make_player(
    generator: Any, tokenizer: Any, shelf: Any = None, grammar: SearchGrammar | None = None, **changes: Any
) -> Player:
    """A player whose retries do not wait."""
    grammar = grammar or SearchR1Grammar().fitted(tokenizer)
    return Player(
        rollout_conf(**changes), generator, tokenizer, shelf or Shelf(), grammar, PROMPT, sleep=lambda seconds: None
    )


@dataclass
class Library(Shelf):
    """A retriever that has `by_query` for some queries and `hits` for all others."""

    by_query: dict[str, list[Hit]] = field(default_factory=dict)

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        others = super().search(queries, top_k)
        return [self.by_query.get(q, other)[:top_k] for q, other in zip(queries, others, strict=True)]


def play_script(
    tokenizer: Any, lines: Sequence[str | list[int]], grammar: SearchGrammar | None = None, shelf: Any = None,
    asked: Question | None = None, prompt: Prompt = PROMPT, **changes: Any,
) -> Trajectory:  # fmt: skip
    """One question played by one script through the real loop; its budgets are ample."""
    ample = {
        "max_turns": 6, "max_prompt_tokens": 600, "max_call_tokens": 900, "max_observation_tokens": 900,
        "max_total_tokens": 9000, "top_k": 3, "search_retries": 0,
    }  # fmt: skip
    player = make_player(Script(tokenizer, [list(lines)]), tokenizer, shelf, grammar, **(ample | changes))
    player.prompt = prompt
    (trajectory,) = player.play([asked or question()], 1, Sampling(1.0, 1.0, (), 0))
    return trajectory


def placed(scores: Sequence[Scores]) -> float:
    """What rewards pay together: the sum of the values they placed."""
    return sum(value for score in scores for _, value in score.placed)


def optimizer(**changes: Any) -> OptimizerConf:
    """AdamW that moves visibly."""
    base = {"lr": 1e-2, "warmup_steps": 0, "betas": (0.9, 0.95), "weight_decay": 0.0, "max_grad_norm": 1.0}
    return OptimizerConf(**(base | changes))


def make_policy(
    model: Any, tokenizer: Any, rank: int = 0, dtype: Any = "float32", reference: bool = True, **more: Any
) -> PlainPolicy:
    """A policy around this very model."""
    conf = more.pop("conf", None) or optimizer()
    return PlainPolicy(model, tokenizer, conf, LoraConf(rank=rank), dtype, reference, **more)


@dataclass(frozen=True)
class EvenFirst:
    """A bandit: 1 when the first token the policy wrote has an even id."""

    reads: tuple[Any, ...] = ()
    services: tuple[Any, ...] = ()
    components: tuple[str, ...] = ("em",)

    def __call__(
        self, trajectories: Sequence[Trajectory], questions: Sequence[Question], services: Any = None
    ) -> list[Scores]:
        return [
            on_last_token(t, float(t.response_ids[0] % 2 == 0), em=float(t.response_ids[0] % 2 == 0))
            for t in trajectories
        ]


def make_loss(
    low: float = 0.2, high: float = 0.2, aggregation: Any = "token_mean", kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0, importance_cap: float | None = 2.0, ratio: Any = "token",
) -> LossSum:  # fmt: skip
    """A clipped policy loss and the terms whose coefficients are not 0."""
    terms: list[LossTerm] = [PolicyClip(low, high, ratio, aggregation, importance_cap)]
    if kl_coefficient:
        terms.append(ReferenceKl(kl_coefficient, aggregation))
    if entropy_coefficient:
        terms.append(EntropyBonus(entropy_coefficient, aggregation))
    return LossSum(tuple(terms))


def make_method(
    algorithm: str, tokenizer: Any, kl_coefficient: float = 0.001, clip: float = 0.2, group_size: int | None = None,
    gamma: float = 1.0, lam: float = 1.0, value_clip: float = 0.5, temperature: float = 1.0, top_p: float = 1.0,
    **loss: Any,
) -> Method:  # fmt: skip
    """Search-R1 with PPO or GRPO; KL terms on, so that a reference is needed."""
    is_ppo = algorithm == "ppo"
    size = (1 if is_ppo else 4) if group_size is None else group_size
    return Method(
        prompt=PROMPT,
        grammar=SearchR1Grammar().fitted(tokenizer),
        sampler=IndependentGroup(size),
        rewards=(AnswerReward("em"),),
        filter=KeepAll(),
        advantage=TokenGae(gamma, lam, kl_coefficient) if is_ppo else GroupAdvantage(),
        loss=make_loss(clip, clip, kl_coefficient=0.0 if is_ppo else kl_coefficient, **loss),
        value_loss=ClippedValueLoss(value_clip) if is_ppo else None,
        temperature=temperature,
        top_p=top_p,
        search=IndexSearch(),
    )


def train_conf(**changes: Any) -> TrainConf:
    """A few small steps."""
    base = {
        "num_steps": 4, "prompts_per_step": None, "rollouts_per_step": 16, "minibatches": 1, "epochs": 1,
        "max_batch_tokens": 256, "policy": optimizer(), "critic": optimizer(), "old_logprobs": "trainer",
        "dtype": "float32", "keep_activations": True, "num_threads": 1, "checkpoint_every": 2,
        "validate_every": 2, "validate_questions": 4, "record_trajectories": 3,
    }  # fmt: skip
    return TrainConf(**(base | changes))


def make_trainer(
    scratch: Path, algorithm: str = "grpo", seed: int = 0, share: bool = True, rewards: Any = (EvenFirst(),),
    log: Callable[[int, dict[str, float]], None] = lambda step, metrics: None, shelf: Any = None,
    rollout: dict[str, Any] | None = None,
    sampler: Any = None, rank: int = 0, method: dict[str, Any] | None = None, services: Any = None, **changes: Any,
) -> Trainer:  # fmt: skip
    """A whole run on the tiny policy, made anew each time."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    composed = make_method(algorithm, tokenizer, **(method or {}))
    composed = replace(
        composed, rewards=rewards or composed.rewards, sampler=sampler or composed.sampler, services=services or {}
    )
    conf = train_conf(**changes)
    sharing = {"share_prefixes": conf.share_prefixes}
    critic = PlainCritic(model, conf.critic, conf.dtype, **sharing) if composed.advantage.needs_values else None
    policy = make_policy(
        model, tokenizer, rank=rank, conf=conf.policy, keep_activations=conf.keep_activations, **sharing
    )
    start = None
    if rank and not share:  # Adapters are added to the start policy of a folder.
        start = scratch.with_name(f"{scratch.name}-start")
        export_folder(make_model(tokenizer), tokenizer, start)
    own = policy.causal_lm if share else make_model(tokenizer)
    generator = PlainGenerator(own, tokenizer, shares_weights=share, folder=start)
    budgets = {"max_turns": 1, "max_call_tokens": 6} | (rollout or {})
    return Trainer(
        conf=conf, method=composed, policy=policy, critic=critic, generator=generator,
        player=make_player(generator, tokenizer, shelf, **budgets),
        validator=make_player(generator, tokenizer, None, **budgets),
        questions=[question(i) for i in range(16)], validation=[question(i) for i in range(4)],
        seed=seed, scratch=scratch, log=log,
    )  # fmt: skip
