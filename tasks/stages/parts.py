"""What several stages assemble alike: questions, retriever, policy, player. Thin glue, no decisions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tasks import conf
from tasks.agent import grammars, prompts
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.agent.rollout import Player, RolloutConf
from tasks.base.settings import ModelConf
from tasks.data.records import read_questions
from tasks.generate import Generator
from tasks.retrieval import Retriever, open_retriever
from tasks.runner import Context
from tasks.store import Row, digest, sha256
from tasks.types import Question

T = TypeVar("T")
ARTIFACTS = Path("artifacts")
NUM_TRACKED = 8  # trajectories of a stage shown as traces
SCALE_SECTIONS = ("base", "rollout", "train")


def questions(root: Path, splits: Sequence[str]) -> list[Question]:
    """The questions of these splits."""
    return [q for q in read_questions(root / ARTIFACTS / "data" / "questions.jsonl") if q.split in splits]


def track_outcome(ctx: Context, folder: Path, trajectories: Sequence[Row]) -> None:
    """Keep a finished stage's folder (policy, metrics, scores) and its last trajectories with its run."""
    ctx.track.log_artifact(folder)
    for row in trajectories[-NUM_TRACKED:]:
        ctx.track.log_trajectory(row)


def start_policy(seed: int) -> Path:
    """Folder of the weights that every training of this seed starts from, below the root of the clone."""
    return ARTIFACTS / "base" / str(seed) / "policy"


def policy_sha256(folder: Path) -> str:
    """Hash of a policy's weights: the file's own, or one over the shards'."""
    files = sorted(folder.glob("*.safetensors"))
    return sha256(files[0]) if len(files) == 1 else digest([[f.name, sha256(f)] for f in files])


def retriever(root: Path) -> Retriever:
    """The index, checked against the corpus."""
    return open_retriever(root / ARTIFACTS / "index", root / ARTIFACTS / "data" / "corpus.jsonl")


def scale_section(params: conf.Params, name: str) -> tuple[dict[str, Any], str]:
    """One section of `conf/scale/<name>.yaml` and where it stands, for messages.

    Raises:
        ValueError: the section is missing or empty, or the file has one that nothing reads.
    """
    tree, where = conf.section("scale", params.scale), f"{conf.CONF}/scale/{params.scale}.yaml"
    for key in tree:
        if key not in SCALE_SECTIONS:
            raise ValueError(f"{where}: unknown key {key!r}. Known: {', '.join(SCALE_SECTIONS)}.")
    if not isinstance(tree.get(name), dict):
        raise ValueError(
            f"{where}: {name}={tree.get(name)!r}: expected a section of settings. See conf/scale/laptop.yaml."
        )
    return tree[name], f"{where}: {name}"


def changed(cls: type[T], params: conf.Params, section: str, changes: Mapping[str, Any], method: str) -> T:
    """A section of the scale with a method's changes; messages name the file that is wrong."""
    tree, where = scale_section(params, section)
    conf.fill(cls, tree, where)
    return conf.fill(cls, conf.merge(tree, changes), f"{conf.CONF}/method/{method}.yaml: {section} over {where}")


def rollout_conf(params: conf.Params) -> RolloutConf:
    """Budgets of the scale."""
    return conf.fill(RolloutConf, *scale_section(params, "rollout"))


def model_conf(params: conf.Params) -> ModelConf:
    """The policy's settings."""
    return conf.load(ModelConf, "model", params.model)


def own_prompting(params: conf.Params, root: Path = Path(".")) -> tuple[Prompt | None, SearchGrammar | None]:
    """Prompt and grammar that the model brings; None where it takes the method's."""
    model, where = model_conf(params), f"{conf.CONF}/model/{params.model}.yaml"
    prompt = None if model.prompt is None else prompts.load(model.prompt, where, root)
    grammar = None if model.grammar is None else grammars.make(model.grammar, None, f"{where}: grammar")
    return prompt, grammar


def make_player(
    rollout: RolloutConf,
    generator: Generator,
    tokenizer: Any,
    search: Retriever,
    grammar: SearchGrammar,
    prompt: Prompt,
) -> Player:
    """A player whose first use has no cost yet."""
    return Player(rollout, generator, tokenizer, search, grammar, prompt)


def set_threads(count: int) -> None:
    """Fix torch's threads (on a CPU their number is part of the result) and keep freed memory for the next step."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks: a step's activations would be mapped and zeroed anew each time."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass  # Another C library: nothing to gain.


class Bar:
    """Progress of work that reports how far it is instead of handing out items.

    What the first report finds done may be the work of an earlier attempt, so the rate counts from there.
    """

    def __init__(self, ctx: Context, total: int) -> None:
        self.ctx, self.total, self.done = ctx, total, 0
        self.bar: Iterator[int] | None = None

    def show(self, done: int) -> None:
        """Advance to `done`."""
        if self.bar is None:
            self.done = done
            self.bar = self.ctx.progress(iter(range(done, self.total)), self.total, self.ctx.name, done)
        while self.done < done and next(self.bar, None) is not None:
            self.done += 1

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Advance to `step` and hand its metrics to tracking."""
        self.show(step)
        self.ctx.log(step, metrics)
