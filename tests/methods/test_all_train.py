"""Every configuration of `conf/method` trains: five steps from a taught policy, in its own grammar, with real search.

The start policy has learned a handful of questions by heart, one time with the right and one time with a wrong
answer, so that its plays earn and lose.
"""

from __future__ import annotations

import csv
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import conf, extends, methods, parts, retrieval, trained
from tasks.agent import grammars
from tasks.agent.grammar import SearchGrammar
from tasks.agent.grammars.search_r1 import SearchR1Grammar
from tasks.agent.rollout import Player, RolloutConf
from tasks.base.demonstrations import Renderer, ScriptedTurn, cited, expert_plan
from tasks.base.fit import Fit, PhaseConf
from tasks.base.make import new_model
from tasks.base.settings import LoraConf, TinyConf
from tasks.base.tokenizer import LITERALS, build_tokenizer
from tasks.data import world
from tasks.data.decomposition import hops_of
from tasks.data.records import read_passages, read_questions
from tasks.engine.plain import PlainCritic, PlainPolicy
from tasks.generate.plain import PlainGenerator
from tasks.methods import loader
from tasks.model import export_folder
from tasks.reader.card import write_card
from tasks.reader.make import make_reader
from tasks.reader.settings import ReaderConf
from tasks.rl.filters.keep_all import KeepAll
from tasks.services import Head, Resources, opened
from tasks.store import digest, sha256
from tasks.train.loop import Trainer
from tasks.train.settings import TrainConf
from tasks.trained import Trained
from tasks.types import Action, Passage, Question
from tests import shipped
from tests.base.small import SMALL
from tests.reward_model.small import stored
from tests.skips import SHARED, needs_shared
from tests.tiny import PROMPT, make_learner

ROOT = Path(__file__).parents[2]
NAMES = shipped.names("method")
PRINTED = SHARED / "papers" / "results.csv"
# Systems of other families, trained and prompted ones: each has its own work and its own test.
OTHERS = {
    "Adaptive-RAG", "CoT", "FLARE", "IRCoT", "Iter-Retgen", "LLM w/o Search", "Naive Generation", "RAG", "Search-o1",
    "SuRe", "Vanilla RAG",
}  # fmt: skip


@needs_shared(PRINTED)
def test_every_printed_row_of_the_family_has_a_configuration() -> None:
    """Each (method, variant) of results.csv is claimed by a file, and no file claims one that nobody printed."""
    with PRINTED.open(encoding="utf-8", newline="") as file:
        printed = {(row["method"], row["variant"]) for row in csv.DictReader(file)}
    assert {method for method, _ in printed} > OTHERS, "a name of OTHERS is printed nowhere"
    wanted = {pair for pair in printed if pair[0] not in OTHERS}
    claims = [(name, pair) for name in NAMES for pair in map(tuple, loader.load(name, "laptop", ROOT)["paper_rows"])]
    claimed = {pair for _, pair in claims}
    assert wanted - claimed == set(), "printed, but no configuration"
    assert claimed - printed == set(), "claimed, but not printed"
    # One row is one system, except where papers print PPO and GRPO runs under one name.
    shared = {pair for pair in wanted if sum(pair == other for _, other in claims) > 1}
    assert shared == {("Search-R1", "main")}


class Taught:
    """A small world, and per grammar a policy that knows a few of its questions."""

    def __init__(self, folder: Path) -> None:
        data = folder / "artifacts" / "data"
        world.write_world(SMALL, data)
        retrieval.build(data / "corpus.jsonl", folder / "index", retrieval.load_settings("bm25", ROOT))
        self.search = retrieval.open_retriever(folder / "index", data / "corpus.jsonl")
        self.passages: list[Passage] = list(read_passages(data / "corpus.jsonl"))
        train = [q for q in read_questions(data / "questions.jsonl") if q.split == "train" and q.hops <= 2]
        self.questions: list[Question] = [self._with_inputs(q) for q in train[:3]]
        self.folder, self.stack = folder, ExitStack()
        self.made: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}

    def _with_inputs(self, question: Question) -> Question:
        golds = tuple(p for p in self.passages if p.id in question.gold_passage_ids)
        return replace(question, decomposition=tuple(hops_of(question)), gold_passages=golds)

    def policy(self, tree: Mapping[str, Any]) -> tuple[Any, Any]:
        """(model, tokenizer) taught in this grammar, a fresh copy each time."""
        name = json.dumps(tree)
        if name not in self.made:
            self.made[name] = self._teach(tree)
        tokenizer, weights = self.made[name]
        model = new_model(TINY, tokenizer, seed=0).eval()
        model.load_state_dict(weights)
        return model, tokenizer

    @functools.cached_property
    def models(self) -> dict[str, Trained]:
        """Reward models whose scores are chance."""
        model, tokenizer = self.policy(parts.plain(SearchR1Grammar()))
        export_folder(model, tokenizer, self.folder / "start")
        heads: dict[str, Head] = {"pica": "success", "pica_as_released": "hazard"}
        return {name: stored(self.folder, name, 0, self.folder / "start", head) for name, head in heads.items()}

    def reader(self, name: str, tree: Mapping[str, Any]) -> dict[str, Trained]:
        """A reader that has learned the answers to its evidence by heart."""
        folder = self.folder / trained.FOLDER / name
        if not folder.exists():
            torch.set_num_threads(1)
            learned = {"max_steps": 120, "batch": 12, "lr": 4e-3, "decay": False}
            made = conf.fill(ReaderConf, conf.merge(tree, {"read": learned, "check_every": 60}), name)
            passages = {passage.id: passage for passage in self.passages}
            few = [*self.questions, replace(self.questions[0], split="dev")]
            reader = make_reader(made, few, "dev", passages, 0, self.folder / "reader", lambda step, metrics: None)
            folder.mkdir(parents=True)
            export_folder(reader.model, reader.tokenizer, folder)
            write_card(folder, name, 0, made.habits, reader.quality)
            trained.seal(folder, {})
        relative = folder.relative_to(self.folder)
        return {name: Trained(str(relative), sha256(folder / trained.MANIFEST))}

    def _teach(self, tree: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
        torch.set_num_threads(1)
        plain = grammars.make(tree, None, "a test")
        plans = [plan for question in self.questions for plan in _plans(question, plain)]
        questions = [question for question in self.questions for _ in range(2)]
        texts = [f" {p.title} {p.text}" for p in self.passages] + [
            plain.call(step.think, step.action) for plan in plans for step in plan
        ]
        # Evidence is a whole passage: with few tokens for its words, learning it by heart takes minutes.
        size, literals = (1600 if plain.shows_evidence else 900), (*LITERALS, *plain.literals)
        texts = [*texts, plain.invalid_message, plain.opening, plain.closing] * 2
        tokenizer = build_tokenizer(texts, size, literals)
        model = new_model(TINY, tokenizer, seed=0)
        renderer = Renderer(_budget(plain), tokenizer, self.search, plain.fitted(tokenizer), PROMPT)
        examples = renderer.render(questions, plans)
        assert all(any(example.loss_mask) for example in examples)
        fit = Fit(make_learner(model), self.folder / digest(tree), 10_000, 4096, lambda step, metrics: None)
        fit.run("heart", PhaseConf(150, len(examples), 4e-3, False, 0.04), lambda step: examples)
        return tokenizer, {name: tensor.clone() for name, tensor in model.state_dict().items()}


TINY = TinyConf(64, 2, 4, 128, 1024, 900, 0.05)
BUDGET = RolloutConf(
    max_turns=2, max_prompt_tokens=200, max_call_tokens=40, max_observation_tokens=60, max_total_tokens=600, top_k=1,
    batch_rows=64,
)  # fmt: skip


def _budget(grammar: SearchGrammar) -> RolloutConf:
    """Evidence is a passage: it takes as many tokens as an observation."""
    return replace(BUDGET, max_call_tokens=100, max_total_tokens=900) if grammar.shows_evidence else BUDGET


def _plans(question: Question, grammar: SearchGrammar) -> list[list[ScriptedTurn]]:
    """The expert's plan, and the same with a wrong answer; without searches where the grammar has none."""
    plan = expert_plan(question)
    if grammar.shows_evidence:
        plan = cited(plan, max)
    wrong = replace(plan[-1], action=Action("answer", question.decomposition[0].question.split()[2]))
    if not grammar.can_search:
        plan = plan[-1:]
    return [plan, [*plan[:-1], wrong]]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taught]:
    made = Taught(tmp_path_factory.mktemp("taught"))
    with made.stack:
        yield made


def _trainer(taught: Taught, name: str, scratch: Path, log: Callable[[int, dict[str, float]], None]) -> Trainer:
    """As the stage `train` puts it together, at the smoke scale and with five steps.

    Samples share prefixes where they do at the laptop scale; PiCA and R-Search read the few tokens of the smoke scale
    row by row.
    """
    tree = conf.section("scale", "smoke", ROOT)["train"]
    shares = loader.load(name, "laptop", ROOT, PROMPT)["train"].get("share_prefixes", False)
    resolved = loader.load(name, "smoke", ROOT, PROMPT)
    model, tokenizer = taught.policy(resolved["grammar"])
    method = methods.build(resolved, tokenizer)
    few = {"num_steps": 5, "rollouts_per_step": 15, "validate_every": 5, "checkpoint_every": 5, "collapse": None,
           "share_prefixes": shares}  # fmt: skip
    settings = conf.fill(TrainConf, conf.merge(conf.merge(tree, resolved["train"]), {**few, "select": "last"}), name)
    budget = replace(_budget(method.grammar), **resolved["rollout"])
    start = None
    if method.sampler.from_start:
        start = PlainGenerator(taught.policy(resolved["grammar"])[0], tokenizer, False)
    needs_critic, sharing = method.advantage.needs_values, {"share_prefixes": settings.share_prefixes}
    critic = PlainCritic(model, settings.critic, settings.dtype, **sharing) if needs_critic else None
    policy = PlainPolicy(
        model, tokenizer, settings.policy, LoraConf(), settings.dtype, method.needs_reference, **sharing
    )
    generator = PlainGenerator(policy.causal_lm, tokenizer, True)
    needs_reader, reader = "reader" in resolved["services"], extends.read("reader", "tiny_llama", "smoke", ROOT)
    models = taught.reader("tiny_llama", reader) if needs_reader else taught.models
    resources = Resources(taught.folder, scratch, policy, tokenizer, settings.max_batch_tokens, models)
    services = taught.stack.enter_context(opened(method.services, resources))
    search = method.search.retriever(taught.search, services)
    return Trainer(
        conf=settings, method=method, policy=policy, critic=critic, generator=generator,
        player=Player(budget, start or generator, tokenizer, search, method.grammar, PROMPT),
        validator=Player(budget, generator, tokenizer, taught.search, method.grammar, PROMPT),
        questions=taught.questions, validation=taught.questions[:2], seed=0, scratch=scratch, log=log,
        services=services,
    )  # fmt: skip


def _asks_a_server(name: str) -> bool:
    """A judge behind a server trains in the test of its reward, which starts the server."""
    return "chat" in loader.load(name, "smoke", ROOT)["services"]


def _case(name: str) -> Any:
    """A method; one that is named after the method that it extends is long: `slate_k1` is `slate` but for a number."""
    of = conf.section("method", name, ROOT).get("extends")
    return pytest.param(name, marks=[pytest.mark.long] if of and name.startswith(of) else [])


def _widest(decoder: Any) -> list[int]:
    """Filled while the model is trained: the most samples behind one prefix in each packed row, 0 for others."""
    found: list[int] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            behind = Counter(segment.above for segment in kwargs.get("segments", ()) if segment.above)
            found.append(max(behind.values(), default=0))

    decoder.register_forward_pre_hook(look, with_kwargs=True)
    return found


def _given(trainer: Trainer) -> list[torch.Tensor]:
    """The weights of the reader and the reward model, which a run only asks."""
    owners: list[Any] = [getattr(trainer.services.get("reader"), "reading", None), trainer.services.get("reward_model")]
    return [parameter for one in owners if one is not None for parameter in one.model.parameters()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [_case(name) for name in NAMES if not _asks_a_server(name)])
def test_five_steps_move_the_weights(taught: Taught, name: str, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    trainer = _trainer(taught, name, tmp_path, lambda step, metrics: seen.append(metrics))
    models = [trainer.policy.causal_lm.get_decoder(), *([trainer.critic.decoder] if trainer.critic else [])]  # type: ignore[attr-defined]
    widest = [_widest(model) for model in models]
    frozen = {parameter: parameter.detach().clone() for parameter in _given(trainer)}
    before = {key: p.detach().clone() for key, p in trainer.policy.trained.items()}  # type: ignore[attr-defined]
    progress = trainer.run()
    assert (len(frozen) > 0) == bool({"reader", "reward_model"} & trainer.method.services.keys())
    assert all(torch.equal(parameter, weights) for parameter, weights in frozen.items()), "a given model was trained"
    assert (progress.step, progress.stopped) == (5, None)
    after = trainer.policy.trained  # type: ignore[attr-defined]
    moved = max(float((after[key].detach() - tensor).abs().max()) for key, tensor in before.items())
    assert moved > 1e-4, "no weight moved"
    for rows in widest:
        assert min(rows) >= 1 if trainer.conf.share_prefixes else max(rows) == 0
        assert max(rows) >= trainer.method.sampler.size or not trainer.conf.share_prefixes
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    trained = [metrics for metrics in seen if "loss" in metrics]
    has_filter = not isinstance(trainer.method.filter, KeepAll)
    assert len(trained) >= (3 if has_filter else 5)  # A filter may find too little to learn from.
    assert sum(metrics["grad_norm"] > 0 for metrics in trained) >= 3  # All may earn the same in a step.
    if name not in ("sft",):  # It plays nothing.
        assert any(metrics["reward_std"] > 0 for metrics in seen if "reward_std" in metrics), "no play earned or lost"
    trainer.export(tmp_path / "policy")
    assert (tmp_path / "policy" / "model.safetensors").is_file()


class _KilledError(BaseException):
    """Stands for SIGKILL: nothing of the run is asked or closed after it."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_while_its_reader_reads_goes_on_to_the_same_bytes(taught: Taught, tmp_path: Path) -> None:
    """The reader has read some batches of the step, whose answers are kept, and not the others."""

    def run(name: str, is_killed: bool = False) -> tuple[Trainer, dict[str, torch.Tensor]]:
        trainer = _trainer(taught, "r_search", tmp_path / name, lambda step, metrics: None)
        trainer.conf = replace(trainer.conf, checkpoint_every=2)
        reader: Any = trainer.services["reader"]
        reader.reading.batch = 1
        if is_killed:
            real, several = reader.reading.batches, iter(range(100))

            def batches(pairs: Any) -> Iterator[Any]:
                is_last = len(set(pairs)) > 1 and next(several) == 2  # In the step after the checkpoint, or later.
                for number, batch in enumerate(real(pairs)):
                    if is_last and number == 1:
                        raise _KilledError
                    yield batch

            reader.reading.batches = batches
        trainer.run()
        return trainer, {name: t.detach().clone() for name, t in trainer.policy.trained.items()}  # type: ignore[attr-defined]

    whole, wanted = run("whole")
    with pytest.raises(_KilledError):
        run("killed", is_killed=True)
    resumed, found = run("killed")
    assert resumed.progress.history == whole.progress.history
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert (tmp_path / "killed/reader.jsonl").read_bytes() == (tmp_path / "whole/reader.jsonl").read_bytes()
