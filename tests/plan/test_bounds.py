"""Every number of the settings has a bound: what surely fails later ends the run in stage `plan`, with file and key."""

from __future__ import annotations

import copy
import dataclasses
import re
import typing
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tasks import conf, engine, generate, methods, parts, retrieval, systems
from tasks.agent.rollout import RolloutConf
from tasks.augment.settings import AugmentConf
from tasks.base.settings import BaseConf, FormatConf, ModelConf
from tasks.data.settings import DataConf
from tasks.methods import loader
from tasks.plan.run_settings import RunSettings
from tasks.reader.settings import ReaderConf
from tasks.rl.method import Method
from tasks.rl.samplers.independent_group import IndependentGroup
from tasks.server.settings import Settings as ServerConf
from tasks.services.endpoint import Endpoint
from tasks.train.settings import TrainConf
from tests import shipped

ROOT = Path(__file__).parents[2]
FAR_BELOW = -(10**9)
UNBOUNDED = {
    "AnswerReward.weight": "a negative weight teaches wrong answers, and trains",
    "AnswerReward.wrong_format": "what is lost; it has an upper bound",
    "EndedAnswer.wrong_format": "what is lost; it has an upper bound",
    "TurnRules.invalid": "what is lost; it has an upper bound",
}
PART_ROOMS = (
    "rewards", "rl.samplers", "rl.filters", "rl.advantages", "rl.losses", "rl.value_losses", "rl.search", "services",
    "engine", "generate", "systems", "agent.grammars",
)  # fmt: skip
IN_NO_FILE = {
    ("rewards", "turn_scores"): {"scale": 1.0, "is_potential": True},
    ("rl.losses", "entropy"): {"coefficient": 0.001},
}
METHODS = (  # Together they have every part.
    "dapo", "mt_ppo", "pica", "pica_as_released", "r_search", "rejection_sampling", "research", "search_r1_ppo_format",
    "sft", "stepsearch", "stepsearch_ow_sub_answer", "tips", "zerosearch", "slate_k1", "slate_wo_judge",
)  # fmt: skip


def _names(kind: str) -> list[str]:
    return shipped.names(kind)


def _read() -> Iterator[Any]:
    """Settings of every kind: those of `params.yaml`, of `conf/` and of parts that no file there names."""
    yield shipped.settings()
    for kind, cls in (("augment", AugmentConf), ("server", ServerConf)):
        yield from (conf.load(cls, kind, name, root=ROOT) for name in _names(kind))
    run = RunSettings(ROOT, shipped.settings())
    yield from (run.load(ModelConf, "model", name) for name in _names("model"))
    yield from (run.load(DataConf, "data", name) for name in _names("data"))
    small = RunSettings(ROOT, replace(shipped.settings(), scale="small"))
    yield from (small.scale(FormatConf, "format"), small.evaluation)
    yield from (run.reward_model(name) for name in _names("reward_model"))
    yield from (run.load(ReaderConf, "reader", name) for name in _names("reader"))
    yield from (run.scale(BaseConf, "base"), run.rollout(), run.training())
    yield from (retrieval.load_settings(name, ROOT) for name in _names("retriever"))
    yield retrieval.settings_of({"backend": "generated"}, "generated")
    yield from (engine.load(name, ROOT) for name in _names("engine"))
    yield from (generate.load(name, ROOT) for name in _names("generator"))
    yield from (parts.make("services", conf.section("service", name, ROOT), name) for name in _names("service"))
    yield from (parts.make(room, {"kind": kind, **tree}, kind) for (room, kind), tree in IN_NO_FILE.items())
    for name in METHODS:
        tree = loader.load(name, "laptop", ROOT)
        yield methods.build(tree, None)
        yield conf.fill(methods.SamplingConf, tree["sampling"], name)
    yield from (systems.build(run.system(name), name) for name in _names("system"))


@cache
def _settings() -> dict[type, Any]:
    """One object of each dataclass that those are made of."""
    found: dict[type, Any] = {}
    waiting: list[Any] = list(_read())
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, tuple):
            waiting += value
        elif dataclasses.is_dataclass(value):
            waiting += [getattr(value, field.name) for field in dataclasses.fields(value)]
            found.setdefault(type(value), value)
    del found[Method]  # It is made of parts, and its numbers are those of `SamplingConf`.
    return found


def _numbers(cls: type, tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | list[Any], str | int]]:
    """Each number of a dataclass as (name of the field, the container it stands in, its place there)."""
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        kind = conf._bare(hint)
        inside = [conf._bare(one) for one in typing.get_args(kind)]
        if kind in (int, float) and name in tree:
            yield name, tree, name
        elif {int, float} & set(inside) and tree.get(name):
            places = tree[name].keys() if isinstance(tree[name], dict) else range(len(tree[name]))
            yield from ((name, tree[name], place) for place in list(places))


def _taken(cls: type, value: Any) -> Iterator[str]:
    """The numbers of these settings that may be far below any sense, or whose refusal does not name them."""
    tree = conf.plain(value)
    for position, (name, _, _) in enumerate(_numbers(cls, tree)):
        changed = copy.deepcopy(tree)
        _, container, place = list(_numbers(cls, changed))[position]
        container[place] = FAR_BELOW  # type: ignore[index,call-overload]
        try:
            conf.fill(cls, changed, "conf/x.yaml")
        except ValueError as error:
            if str(error).startswith("conf/x.yaml") and name in str(error):
                continue
        yield f"{cls.__name__}.{name}"


def test_every_number_has_a_bound() -> None:
    taken = {name for cls, value in _settings().items() for name in _taken(cls, value)}
    assert taken == UNBOUNDED.keys()


def _is_shipped(backend: str) -> bool:
    return shipped.is_shipped(ROOT / f"tasks/retrieval/{backend}.py")


def test_every_part_and_backend_was_looked_at() -> None:
    looked_at = {cls.__module__ for cls in _settings()}
    kinds = {f"tasks.{room}.{kind}" for room in PART_ROOMS for kind in shipped.kinds(room)}
    backends = {f"tasks.retrieval.{name}" for name in retrieval._backends() if _is_shipped(name)}
    assert (kinds | backends) - looked_at == set()


@pytest.mark.parametrize(
    ("kind", "name", "section", "change", "expected"),
    [
        ("model", "tiny", "tiny", {"hidden_size": 0}, "hidden_size=0: expected 1 or more and 131072 or less"),
        (
            "model",
            "tiny",
            "tiny",
            {"hidden_size": 10**8},
            "hidden_size=100000000: expected 1 or more and 131072 or less",
        ),
        (
            "model",
            "tiny",
            "tiny",
            {"hidden_size": 12},
            "hidden_size=12: expected an even number, 2 or more, in each of",
        ),
        (
            "model",
            "tiny",
            "tiny",
            {"num_heads": 129},
            "hidden_size=128: expected an even number, 2 or more, in each of",
        ),
        (
            "model",
            "tiny",
            "tiny",
            {"max_vocab": 292},
            "max_vocab=292: expected 293 or more (bytes, tags and some words)",
        ),
        ("model", "tiny", "lora", {"rank": -1}, "rank=-1: expected 0 or more (0: off)"),
        ("model", "tiny", "lora", {"lr": 1e-4}, "lr=0.0001: expected none where rank is 0"),
        ("scale", "smoke", "policy", {"weight_decay": -1.0}, "weight_decay=-1.0: expected 0"),
        ("scale", "smoke", "critic", {"lr": 1e300}, "lr=1e+300: expected a number above 0"),
        ("scale", "smoke", "read", {"stop_loss": -1}, "stop_loss=-1: expected 0"),
        ("scale", "smoke", "read", {"lr": 0.0}, "lr=0.0: expected a number above 0"),
        ("scale", "smoke", "read", {"batch": 0}, "batch=0: expected a number above 0"),
        ("data", "smoke", "world", {"seed": -1}, "seed=-1: expected 0 or more"),
    ],
)
def test_what_surely_fails_later_is_refused(
    kind: str, name: str, section: str, change: dict[str, Any], expected: str
) -> None:
    tree = conf.section(kind, name, ROOT)
    chosen = {"scale": TrainConf, "model": ModelConf, "data": DataConf}[kind]
    if section in ("policy", "critic"):
        tree = conf.merge(tree["train"], {section: change})
    elif kind == "scale":
        chosen, tree = BaseConf, conf.merge(tree["base"], {section: change})
    else:
        tree = conf.merge(tree, {section: change})
    with pytest.raises(ValueError) as found:
        conf.fill(chosen, tree, "conf/x.yaml")
    assert expected in str(found.value)


@pytest.mark.parametrize(
    ("cls", "key", "expected"),
    [
        (IndependentGroup, "size", "1 to 1024"),
        (RolloutConf, "batch_rows", "1 to 1000000"),
        (RolloutConf, "search_retries", "0 to 20, whose waits double"),
        (TrainConf, "num_threads", "1 to 1024"),
        (methods.SamplingConf, "temperature", "100 or less"),
        (Endpoint, "retries", "0 to 100"),
        (Endpoint, "timeout_s", "above 0, at most 86400.0"),
        (Endpoint, "max_retry_after_s", "0 to 86400.0"),
    ],
)
def test_what_would_run_for_ever_is_refused(cls: type, key: str, expected: str) -> None:
    tree = conf.plain(_settings()[cls]) | {key: 10**22}
    with pytest.raises(ValueError, match=rf"^conf/x\.yaml: .*{key}=1.*: expected .*{re.escape(expected)}\."):
        conf.fill(cls, tree, "conf/x.yaml")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"deep": float("nan")}]])
def test_a_field_of_a_request_is_a_number_that_json_has(value: Any) -> None:
    tree = conf.section("service", "simulator", ROOT)
    tree["chat"]["request"]["temperature"] = value
    with pytest.raises(ValueError, match=r"^conf/x\.yaml.*: request\.temperature=.*: expected finite numbers\.$"):
        parts.make("services", tree, "conf/x.yaml")


@pytest.mark.parametrize(
    "template", ["{x}", "{title", "no", "{text} {}", "{0} {text}", "{text!r}", "{text:>9}", "{text[0]}"]
)
def test_a_document_is_shown_with_its_text(template: str) -> None:
    for kind in shipped.kinds("agent.grammars"):
        tree = {"kind": kind, "document_format": template}
        with pytest.raises(
            ValueError, match=r"^conf/x\.yaml: grammar: document_format=.*: expected a template with {text}"
        ):
            parts.make("agent.grammars", tree, "conf/x.yaml: grammar")
        assert parts.make("agent.grammars", tree | {"document_format": "{{{number}}} {text}"}, "x")


def test_a_reserved_text_is_not_empty() -> None:
    with pytest.raises(
        ValueError, match=r"^conf/x\.yaml: grammar: reserved=\('a', ''\): expected texts that are not emp"
    ):
        parts.make("agent.grammars", {"kind": "search_r1", "reserved": ["a", ""]}, "conf/x.yaml: grammar")


@pytest.mark.parametrize("key", ["services", "value_loss", "rewards", "prompt"])
def test_a_description_without_a_key_is_named(key: str) -> None:
    tree = loader.load("search_r1_ppo", "laptop", ROOT)
    del tree[key]
    with pytest.raises(ValueError, match=rf"^a\.json: method: key '{key}' is missing\."):
        methods.build(tree, None, "a.json: method")


def test_a_system_without_services_is_named() -> None:
    tree = dict(RunSettings(ROOT, shipped.settings()).system("base"))
    del tree["services"]
    with pytest.raises(ValueError, match=r"^a\.json: playing: services=None: expected a mapping of role to service\."):
        systems.build(tree, "a.json: playing")
