"""A trained folder of a small policy that knows a few questions by heart, and the index that it searches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tasks import conf, parts, retrieval, store
from tasks.agent.grammars.r_search import RSearchGrammar
from tasks.agent.rollout import RolloutConf
from tasks.base.demonstrations import Renderer, cited, expert_plan
from tasks.base.fit import Fit, PhaseConf
from tasks.base.make import new_model
from tasks.base.settings import TinyConf
from tasks.base.tokenizer import LITERALS, build_tokenizer
from tasks.data import world
from tasks.data.records import read_passages, read_questions
from tasks.model import export_folder
from tasks.types import Question
from tests.base.small import SMALL
from tests.once import made_once
from tests.tiny import PROMPT, make_learner

ROOT = Path(__file__).parents[2]
TINY = TinyConf(64, 2, 4, 128, 1024, 900, 0.05)
BUDGET = RolloutConf(
    max_turns=2, max_prompt_tokens=200, max_call_tokens=100, max_observation_tokens=60, max_total_tokens=900, top_k=1,
    batch_rows=4,
)  # fmt: skip


@dataclass(frozen=True)
class Learned:
    """What a run would have left.

    Attributes:
        folder: with `policy/` and `summary.json`.
        index, corpus: of the search.
        questions: those that the policy knows, two hops each.
    """

    folder: Path
    index: Path
    corpus: Path
    questions: list[Question]


def write_summary(folder: Path, grammar: RSearchGrammar) -> None:
    method = {"prompt": conf.plain(PROMPT), "grammar": parts.plain(grammar)}
    settings = {"method": method, "rollout": conf.plain(BUDGET), "train": {"dtype": "float32"}}
    store.write_json(folder / "summary.json", {"settings": settings})


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    root = made_once(tmp_path_factory, "learned", _learn)
    return Learned(root / "train", root / "index", root / "corpus.jsonl", _questions(root))


def _questions(root: Path) -> list[Question]:
    return [q for q in read_questions(root / "questions.jsonl") if q.split == "train" and q.hops == 2][:3]


def _learn(root: Path) -> None:
    torch.set_num_threads(1)
    world.write_world(SMALL, root)
    corpus, index, folder = root / "corpus.jsonl", root / "index", root / "train"
    retrieval.build(corpus, index, retrieval.load_settings("bm25", ROOT))
    search = retrieval.open_retriever(index, corpus)

    plain, questions = RSearchGrammar(), _questions(root)
    plans = [cited(expert_plan(question), max) for question in questions]
    texts = [f" {passage.title} {passage.text}" for passage in read_passages(corpus)]
    texts += [plain.call(turn.think, turn.action) for plan in plans for turn in plan]
    tokenizer = build_tokenizer(texts * 2, 900, (*LITERALS, *plain.literals))
    grammar, model = plain.fitted(tokenizer), new_model(TINY, tokenizer, 0)
    examples = Renderer(BUDGET, tokenizer, search, grammar, PROMPT).render(questions, plans)
    fit = Fit(make_learner(model), root / "scratch", 10_000, 4096, lambda step, metrics: None)
    fit.run("heart", PhaseConf(250, len(examples), 4e-3, False, 0.03), lambda step: examples)

    folder.mkdir()
    export_folder(model.eval(), tokenizer, folder / "policy")
    write_summary(folder, plain)
