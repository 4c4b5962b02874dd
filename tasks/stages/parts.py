"""What several stages assemble alike: questions, retriever, policy, player. Thin glue, no decisions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks import conf
from tasks.agent.grammar import SearchGrammar
from tasks.agent.rollout import Player, RolloutConf
from tasks.base.settings import ModelConf
from tasks.data.records import read_questions
from tasks.generate import Generator
from tasks.retrieval import Retriever, open_retriever
from tasks.stages.runner import Context
from tasks.store import digest, read_json, sha256
from tasks.types import Question

ARTIFACTS = Path("artifacts")


def questions(root: Path, splits: Sequence[str]) -> list[Question]:
    """The questions of these splits."""
    return [q for q in read_questions(root / ARTIFACTS / "data" / "questions.jsonl") if q.split in splits]


def data_sha256(root: Path) -> str:
    """Hash of questions and corpus together, from the data manifest."""
    return str(read_json(root / ARTIFACTS / "data" / "manifest.json")["data_sha256"])


def policy_sha256(folder: Path) -> str:
    """Hash of a policy's weights: the file's own, or one over the shards'."""
    files = sorted(folder.glob("*.safetensors"))
    return sha256(files[0]) if len(files) == 1 else digest([[f.name, sha256(f)] for f in files])


def retriever(root: Path) -> Retriever:
    """The index, checked against the corpus."""
    return open_retriever(root / ARTIFACTS / "index", root / ARTIFACTS / "data" / "corpus.jsonl")


def rollout_conf(params: conf.Params) -> RolloutConf:
    """Budgets of the scale."""
    return conf.load(RolloutConf, "scale", params.scale, "rollout")


def model_conf(params: conf.Params) -> ModelConf:
    """The policy's settings."""
    return conf.load(ModelConf, "model", params.model)


def grammar(tokenizer: Any) -> SearchGrammar:
    """Search-R1's tags, with the tokenizer's special tokens reserved."""
    return SearchGrammar(reserved=tuple(tokenizer.all_special_tokens))


def template(params: conf.Params) -> str:
    """Prompt of a policy that serves no method (the start policy): the model's own, else the first method's."""
    own = model_conf(params).prompt
    return own if own is not None else str(conf.section("method", params.methods[0])["prompt"])


def make_generator(params: conf.Params, model: Any, tokenizer: Any, folder: Path, shares_weights: bool) -> Generator:
    """The generator named in `params.yaml`, playing this model (plain) or this folder (vllm)."""
    if params.generator == "vllm":
        from tasks.generate.vllm import VllmConf, VllmGenerator

        return VllmGenerator(folder, conf.load(VllmConf, "generator", "vllm"))
    from tasks.generate.plain import PlainGenerator

    return PlainGenerator(model, tokenizer, shares_weights)


def make_player(
    rollout: RolloutConf, generator: Generator, tokenizer: Any, search: Retriever, grammar: SearchGrammar, template: str
) -> Player:  # fmt: skip
    """A player whose first use has no cost yet."""
    return Player(rollout, generator, tokenizer, search, grammar, template)


def set_threads(count: int) -> None:
    """Fix torch's threads: on a CPU their number is part of the result."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


class Bar:
    """Progress of work that reports how far it is instead of handing out items."""

    def __init__(self, ctx: Context, total: int) -> None:
        self.ctx, self.bar, self.done = ctx, ctx.progress(iter(range(total)), total, ctx.name), 0

    def show(self, done: int) -> None:
        """Advance to `done`."""
        while self.done < done and next(self.bar, None) is not None:
            self.done += 1

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Advance to `step` and hand its metrics to tracking."""
        self.show(step)
        self.ctx.log(step, metrics)
