"""Reads `conf/method/<name>.yaml`, which names the parts a method is made of, and their numbers.

`tasks.methods.build` takes the result. Only the plan of a run needs this file; a stage that trains or plays reads the
result from its plan.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks import conf, extends, parts, services
from tasks.agent import grammars, prompts
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.conf import Title, Tree, require
from tasks.methods import OWN, SamplingConf, build
from tasks.rl.method import Method
from tasks.services import Kind, Role


@dataclass(frozen=True)
class MethodFile:
    """The keys of a file of `conf/method/`, beside `extends` and `scales`.

    Attributes:
        title: name in tables.
        prompt: a file of `conf/prompt/`.
        grammar, sampler, filter, advantage, search: parts, each with its `kind`.
        rewards, losses: kind -> numbers, added up in order; null takes an inherited one away.
        value_loss: the part that trains the critic where the advantage needs one, else null.
        sampling: temperature and top_p of rollouts.
        services: role -> a file of `conf/service/`, for each role that the parts call; null takes one away.
        start: a file of `conf/start/`, the policy that training begins with where the run makes its policy itself; null
            takes that of the run.
        tool_reader: a file of `conf/service/` that answers from the trained policy's evidence, to measure whether
            it helps another model; null measures nothing.
        train, rollout: changes to the sections of `conf/scale/<name>.yaml`.
        paper_rows: [method, variant] pairs that name its rows in the papers' tables (`conf/papers/printed.csv`).
    """

    title: Title
    prompt: str
    grammar: dict[str, Any]
    sampler: dict[str, Any]
    rewards: dict[str, dict[str, Any] | None]
    filter: dict[str, Any]
    advantage: dict[str, Any]
    losses: dict[str, dict[str, Any] | None]
    value_loss: dict[str, Any] | None
    sampling: SamplingConf
    search: dict[str, Any] = field(default_factory=lambda: {"kind": "index"})
    services: dict[str, str | None] = field(default_factory=dict)
    start: str | None = None
    tool_reader: str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    paper_rows: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        are_pairs = all(len(row) == 2 and all(map(str.strip, row)) for row in self.paper_rows)
        require(are_pairs, "paper_rows", self.paper_rows, "pairs of two texts, [method, variant]")


def load(
    name: str,
    scale: str,
    root: Path = conf.ROOT,
    prompt: Prompt | None = None,
    grammar: SearchGrammar | None = None,
) -> Tree:
    """Resolve and check `conf/method/<name>.yaml`.

    Args:
        name: file name without suffix.
        scale: picks the file's `scales` entry.
        root: root of the clone.
        prompt, grammar: take the place of the method's, for a model that cannot follow other instructions.

    Returns:
        The argument of `build`, ready for JSON, with `name`, `title`, `paper_rows` and the changes `train` and
        `rollout`.

    Raises:
        ValueError: unknown file, key or kind, a value out of bounds, or parts that do not go together.
    """
    where = str(conf.path_of("method", name, root))
    file = conf.fill(MethodFile, extends.read("method", name, scale, root, OWN), where)
    method_prompt = prompts.load(file.prompt, where, root)
    method_grammar = grammars.make(file.grammar, None, f"{where}: grammar")
    rewards = parts.make_each("rewards", file.rewards, f"{where}: rewards")
    terms = parts.make_each("rl.losses", file.losses, f"{where}: losses")

    tree: Tree = conf.plain(file) | {
        "name": name,
        "prompt": conf.plain(prompt or method_prompt),
        "grammar": parts.plain(grammar or method_grammar),
        "rewards": [parts.plain(reward) for reward in rewards],
        "losses": [parts.plain(term) for term in terms],
        "services": {role: parts.plain(kind) for role, kind in _services(file.services, where, root).items()},
    }
    return {**tree, **_plain(build(tree, None, where))}


def _plain(method: Method) -> Tree:
    """Settings of the parts that come one to a method, with the defaults of every field written out."""
    made = {key: getattr(method, key) for key in ("sampler", "filter", "advantage", "search", "value_loss")}
    return {key: None if part is None else parts.plain(part) for key, part in made.items()}


def _services(names: Mapping[str, str | None], where: str, root: Path) -> dict[Role, Kind]:
    """The service that plays each role."""
    known = typing.get_args(Role)
    kinds: dict[Role, Kind] = {}
    for role, name in names.items():
        place = f"{where}: services: {role}"
        if role not in known:
            raise ValueError(f"{place}: unknown role {role!r}. Known: {', '.join(known)}.")
        if name is not None:
            conf.path_of("service", name, root, place)
            kinds[typing.cast(Role, role)] = services.load(typing.cast(Role, role), name, root)
    return kinds
