"""Resolves the settings of a run: reads and checks the files of `conf/` that `params.yaml` names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import NonNegativeInt

from tasks import conf, engine, extends, generate, methods, parts, retrieval, services, systems
from tasks.agent import grammars, prompts
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.agent.rollout import RolloutConf
from tasks.base.settings import ModelConf, StartConf
from tasks.conf import Tree, require
from tasks.data.settings import DataConf
from tasks.methods import loader
from tasks.model_files import content_sha256
from tasks.params import (
    SYSTEMS,
    Params,
    model_of_service,
    models_of,
    models_of_all,
    tool_reader_of,
)
from tasks.params.scale import SECTIONS, Scale
from tasks.reward_model.settings import RewardModelConf
from tasks.supervised import Divides
from tasks.train.settings import TrainConf

T = TypeVar("T")
R = TypeVar("R")


def _once(resolve: Callable[..., R]) -> Callable[..., R]:
    """Makes a method of `RunSettings` resolve each name only once, because every seed of a system needs the same."""

    @functools.wraps(resolve)
    def resolved(self: RunSettings, *names: str) -> R:
        key = (resolve.__name__, *names)
        if key not in self._resolved:
            self._resolved[key] = resolve(self, *names)
        return cast(R, self._resolved[key])

    return resolved


@dataclass(frozen=True)
class _Titled:
    """The key of a file of `conf/system/` or `conf/method/` that tables show."""

    title: conf.Title


@dataclass(frozen=True)
class EvaluationConf:
    """How much evaluation a scale affords (`evaluate` in conf/scale).

    Attributes:
        max_questions: as in `params.yaml`, where that says 0.
        sampled: false leaves out the play at temperature 1, whatever `params.yaml` says.
    """

    max_questions: NonNegativeInt = 0
    sampled: bool = True


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run. Files are read once, so an object is for one plan.

    Attributes:
        root: root of the clone.
        params: `params.yaml`, checked.
    """

    root: Path
    params: Params
    _resolved: dict[tuple[str, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def items(self, key: str) -> tuple[Any, ...]:
        """The values of a matrix key: `seed` stands for each of `seeds`."""
        return tuple(getattr(self.params, f"{key}s"))

    def load(self, cls: type[T], kind: str, name: str) -> T:
        """`conf/<kind>/<name>.yaml` as a dataclass, with its changes for this scale."""
        tree = extends.read(kind, name, self.params.scale, self.root)
        if kind == "data":
            tree = {key: value for key, value in tree.items() if key not in SECTIONS}
        return conf.fill(cls, tree, f"{conf.CONF}/{kind}/{name}.yaml")

    def scale(self, cls: type[T], section: str, changes: Mapping[str, Any] | None = None, where: str = "") -> T:
        """A section of the scale, with the changes that another file makes; see `Scale.section`."""
        return self._scale.section(cls, section, changes, where)

    @property
    def evaluation(self) -> EvaluationConf:
        """How many questions are played, and whether also at temperature 1: `params.yaml` within the scale."""
        place, asked = f"{self._scale.files('evaluate')}: evaluate", self.params.evaluate
        own = conf.fill(EvaluationConf, self._scale.tree.get("evaluate") or {}, place)
        return EvaluationConf(asked.max_questions or own.max_questions, asked.sampled and own.sampled)

    @property
    def teaches_format(self) -> bool:
        """Whether this scale teaches a pretrained model the format of a search agent."""
        return self.model.pretrained is not None and self._scale.tree.get("format") is not None

    def training(self, changes: Mapping[str, Any] | None = None, where: str = "") -> TrainConf:
        """Budget and schedule of training, with what the generator's file changes laid over all others; see `scale`."""
        name = self.params.generator
        own = generate.training_changes(name, self.root)
        if own:
            changes = conf.merge(changes or {}, own)
            where = " and ".join(filter(None, (where, f"{conf.CONF}/generator/{name}.yaml")))
        return self.scale(TrainConf, "train", changes, where)

    def rollout(self, changes: Mapping[str, Any] | None = None, where: str = "") -> RolloutConf:
        """Budgets of play, with those that the model needs laid over all others; see `scale`."""
        own = self.model.rollout
        if own:
            changes = conf.merge(changes or {}, own)
            where = " and ".join(filter(None, (where, self._model_file)))
        return self.scale(RolloutConf, "rollout", changes, where)

    @functools.cached_property
    def _scale(self) -> Scale:
        return Scale(self.root, self.params.scale, self.params.data)

    @functools.cached_property
    def data(self) -> DataConf:
        """The source of the questions, and which split is used for what."""
        return self.load(DataConf, "data", self.params.data)

    @functools.cached_property
    def model(self) -> ModelConf:
        """The policy's settings."""
        return self.load(ModelConf, "model", self.params.model)

    @functools.cached_property
    def given_sha256(self) -> str | None:
        """Hash of the files of a pretrained model; None without one, or where its folder is not there yet."""
        given = self.model.pretrained
        folder = None if given is None else self.root / given.folder
        return None if folder is None or not folder.is_dir() else content_sha256(folder)

    @property
    def _model_file(self) -> str:
        return f"{conf.CONF}/model/{self.params.model}.yaml"

    def check_models(self) -> None:
        """Whether the models and tools that follow from its systems are listed; see `_check_models`."""
        _check_models(self)

    @_once
    def models(self, system: str) -> tuple[str, ...]:
        """Names of the models that this pipeline trains for the services of a system."""
        return tuple(name for _, name in models_of(system, self.params.scale, self.root))

    @_once
    def tool_reader(self, system: str) -> tuple[Tree, tuple[str, ...]]:
        """The service that reads a system's evidence, and the models that it loads; see `_tool_reader`."""
        return _tool_reader(self, system)

    @_once
    def reward_model(self, name: str) -> RewardModelConf:
        """A file of `conf/reward_model/`, at this scale; it names a system and a service that exist."""
        where = f"{conf.CONF}/reward_model/{name}.yaml"
        chosen = self.load(RewardModelConf, "reward_model", name)
        conf.kind_of(SYSTEMS, chosen.player, self.root, f"{where}: player")
        conf.path_of("service", chosen.labeller, self.root, f"{where}: labeller")
        return chosen

    @property
    def users_of_models(self) -> dict[str, list[str]]:
        """Each model that is trained for services -> the systems whose services read it."""
        users: dict[str, list[str]] = {}
        for system in self.params.systems:
            for name in self.models(system):
                users.setdefault(name, []).append(system)
        return users

    @functools.cached_property
    def model_prompting(self) -> tuple[Prompt | None, SearchGrammar | None]:
        """Prompt and grammar of the model's file; None where it leaves them to the method."""
        model, where = self.model, self._model_file
        prompt = None if model.prompt is None else prompts.load(model.prompt, where, self.root)
        grammar = None if model.grammar is None else grammars.make(model.grammar, None, f"{where}: grammar")
        return prompt, grammar

    @_once
    def start(self, method: str) -> str | None:
        """The file of `conf/start/` that a method begins with; None where it takes the run's own policy."""
        tree = {} if self.model.tiny is None else extends.read("method", method, self.params.scale, self.root)
        return tree.get("start")

    @_once
    def start_prompting(self, name: str) -> tuple[Prompt, SearchGrammar]:
        """Prompt and grammar of a file of `conf/start/`."""
        start, where = self.load(StartConf, "start", name), f"{conf.CONF}/start/{name}.yaml"
        return prompts.load(start.prompt, where, self.root), grammars.make(start.grammar, None, f"{where}: grammar")

    @_once
    def is_method(self, system: str) -> bool:
        """Whether a name of `systems` stands for a method, which trains a policy."""
        return conf.kind_of(SYSTEMS, system, self.root) == "method"

    @_once
    def method(self, name: str) -> Tree:
        """A file of `conf/method/`, resolved; prompt and grammar that its policy was taught replace the method's."""
        start = self.start(name)
        prompting = self.start_prompting(start) if start else self.model_prompting
        tree = loader.load(name, self.params.scale, self.root, *prompting)
        _check_head(self, name, tree)
        return tree

    @_once
    def reads(self, system: str) -> tuple[str, ...] | None:
        """Fields of a question that the rewards of a system's method read; None if the system does not learn."""
        return methods.build(self.method(system), None).reads if self.is_method(system) else None

    @_once
    def system(self, name: str) -> Tree:
        """Kind, settings and services of a system; see `tasks.systems.build`.

        A file of kind `policy` may name a `method` and then takes its prompt, grammar and budgets where it has none of
        its own. Its own `prompt` is the name of a file of `conf/prompt/`.

        Raises:
            ValueError: an unknown name or kind, a wrong setting, or other services than those that the kind calls.
        """
        if self.is_method(name):
            return self._named(self._played(name), {}, f"{conf.CONF}/method/{name}.yaml")
        tree, where = conf.section("system", name, self.root), f"{conf.CONF}/system/{name}.yaml"
        tree.pop("title", None)
        called, method = tree.pop("services", {}), tree.pop("method", None)
        if method is not None and parts.KIND in tree:
            conf.path_of("method", str(method), self.root, f"{where}: method")
            if "prompt" in tree:
                tree["prompt"] = conf.plain(prompts.load(tree["prompt"], where, self.root))
            tree = conf.merge(self._played(str(method)), tree)
        return self._named(tree, called, where)

    def _named(self, tree: Tree, called: object, where: str) -> Tree:
        kind: systems.Kind = parts.make("systems", tree, where)
        return systems.Named(kind, self._called(kind, called, where)).settings

    def _called(self, kind: systems.Kind, called: object, where: str) -> dict[services.Role, services.Kind]:
        """The services of a kind by role, each from its file of `conf/service/`."""
        expected = f"{{{', '.join(f'{role}: <a file of conf/service/>' for role in kind.services)}}}"
        if not isinstance(called, Mapping) or set(called) != set(kind.services):
            raise ValueError(
                f"{where}: services={called!r}: kind {parts.kind_of(kind)!r} calls others, expected {expected}."
            )
        loaded: dict[services.Role, services.Kind] = {}
        for role in kind.services:
            conf.path_of("service", str(called[role]), self.root, f"{where}: services: {role}")
            loaded[role] = services.load(role, str(called[role]), self.root)
            if loaded[role].needs_reference:
                raise ValueError(
                    f"{where}: services: {role}={called[role]!r}: it needs the start policy of a training, and a "
                    "system is evaluated without one. Name another file of conf/service/."
                )
        return loaded

    @functools.cached_property
    def titles(self) -> dict[str, str]:
        """Display name of each system, in order; see `_titles`."""
        return _titles(self)

    def _played(self, name: str) -> Tree:
        """Prompt, grammar and budgets of a method's policy."""
        method = self.method(name)
        rollout = self.rollout(method["rollout"], f"{conf.CONF}/method/{name}.yaml")
        played = {key: method[key] for key in ("prompt", "grammar")}
        return {parts.KIND: "policy", **played, "rollout": conf.plain(rollout)}

    @_once
    def retriever(self, name: str = "") -> Tree:
        """Backend and settings of a file of `conf/retriever/`, by default of the one that makes this run's index."""
        return dict(conf.plain(retrieval.load_settings(name or self.params.retriever, self.root)))

    @_once
    def engine(self) -> Tree:
        """Kind and settings of the engine that trains."""
        return parts.plain(engine.load(self.params.engine, self.root))

    @_once
    def divides(self) -> Tree | None:
        """Kind and settings of the engine where it divides supervised training; None leaves that to the stage."""
        chosen = engine.load(self.params.engine, self.root)
        return parts.plain(chosen) if isinstance(chosen, Divides) else None

    @_once
    def generator(self) -> Tree:
        """Kind and settings of the generator that plays."""
        return parts.plain(generate.load(self.params.generator, self.root))

    def service(self, role: services.Role, name: str) -> Tree:
        """Kind and settings of a file of `conf/service/` that plays this role."""
        return parts.plain(services.load(role, name, self.root))


def _check_models(run: RunSettings) -> None:
    """Whether `params.yaml` lists the models and tools that follow from its systems.

    Raises:
        ValueError: it does not; the message has the line to write.
    """
    for key, needed in models_of_all(run.params.systems, run.params.scale, run.root).items():
        listed = getattr(run.params, key)
        if set(listed) != set(needed):
            raise ValueError(
                f"{conf.PARAMS}: {key}={list(listed)}: systems={list(run.params.systems)} need {list(needed)}. "
                f"Write `{key}: [{', '.join(needed)}]`."
            )


def _check_head(run: RunSettings, method: str, tree: Tree) -> None:
    """Raise the ValueError for a service that says another head of its reward model than that model's file."""
    service = tree["services"].get("reward_model", {})
    if service.get(parts.KIND) == "reward_model":
        name, head = service["model"], service["head"]
        trained = run.reward_model(name).loss.head
        where = f"{conf.CONF}/method/{method}.yaml: services: reward_model: head"
        expected = f"{trained!r}, the loss.head of {conf.CONF}/reward_model/{name}.yaml. Name another model or head"
        require(head == trained, where, head, expected)


def _tool_reader(run: RunSettings, system: str) -> tuple[Tree, tuple[str, ...]]:
    """The service that a method names as its `tool_reader`, and the models that it loads.

    Raises:
        ValueError: there is no such service, or the method's policy writes no evidence.
    """
    where = f"{conf.CONF}/method/{system}.yaml: tool_reader"
    name = str(tool_reader_of(system, run.params.scale, run.root))
    models = tuple(model for _, model in model_of_service(name, where, run.root))
    grammar = run.method(system)["grammar"]
    if not grammars.make(grammar, None, where).shows_evidence:
        raise ValueError(
            f"{where}={name!r}: grammar {grammar[parts.KIND]!r} writes no evidence for a reader. Expected one that "
            "does, such as r_search; otherwise write null."
        )
    return run.service("reader", name), models


def _titles(run: RunSettings) -> dict[str, str]:
    """Display name of each system, in order: key `title` of its file, else its plain name.

    Raises:
        ValueError: a title that is no line of text, or two systems with the same one.
    """
    owners: dict[str, str] = {}
    for name in run.params.systems:
        kind = conf.kind_of(SYSTEMS, name, run.root)
        where, tree = f"{conf.CONF}/{kind}/{name}.yaml", conf.section(kind, name, run.root)
        title = conf.fill(_Titled, {"title": tree.get("title", name)}, where).title
        if title in owners:
            raise ValueError(
                f"{where}: title={title!r}: system {owners[title]!r} has the same, expected another one for each "
                "system of a run, because tables tell them apart by it."
            )
        owners[title] = name
    return {name: title for title, name in owners.items()}
