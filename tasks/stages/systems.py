"""What a name of `systems` stands for; used by the stages that train and evaluate one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks import conf, methods, services
from tasks.agent import prompts
from tasks.agent.rollout import RolloutConf
from tasks.parts import KIND, kind_of, make, plain
from tasks.services import Role
from tasks.stages import parts
from tasks.systems import Kind


@dataclass(frozen=True)
class Named:
    """What plays under a name.

    Attributes:
        kind: its settings.
        services: what plays the roles that it calls.
    """

    kind: Kind
    services: Mapping[Role, services.Kind]

    @property
    def settings(self) -> conf.Tree:
        """Everything by value, ready for JSON."""
        return {**plain(self.kind), "services": {role: plain(service) for role, service in self.services.items()}}


def load(params: conf.Params, name: str, root: Path = Path(".")) -> Named:
    """What plays under a name of `systems`: a file of `conf/system/`, or the policy that a method trains.

    A file of kind `policy` may name a `method`, whose prompt, grammar and budgets then hold where it gives none. A
    `prompt` beside it is the name of a file of `conf/prompt/`.

    Raises:
        ValueError: an unknown name or kind, a wrong setting, or services that are not those that the kind calls.
    """
    if conf.kind_of(conf.SYSTEMS, name, root) == "method":
        return Named(make("systems", _playing(params, name, root), f"{conf.CONF}/method/{name}.yaml"), {})
    tree, where = conf.section("system", name, root), f"{conf.CONF}/system/{name}.yaml"
    tree.pop("title", None)
    called, method = tree.pop("services", {}), tree.pop("method", None)
    if method is not None and KIND in tree:
        conf.path_of("method", str(method), root, f"{where}: method")
        if "prompt" in tree:
            tree["prompt"] = conf.plain(prompts.load(tree["prompt"], where, root))
        tree = conf.merge(_playing(params, method, root), tree)
    kind: Kind = make("systems", tree, where)
    return Named(kind, _services(kind, called, where, root))


def _services(kind: Kind, called: object, where: str, root: Path) -> dict[Role, services.Kind]:
    """The services of a kind by role, each from the file of `conf/service/` that is named for it."""
    expected = f"{{{', '.join(f'{role}: <a file of conf/service/>' for role in kind.services)}}}"
    if not isinstance(called, Mapping) or set(called) != set(kind.services):
        raise ValueError(f"{where}: services={called!r}: kind {kind_of(kind)!r} calls others, expected {expected}.")
    for role in kind.services:
        conf.path_of("service", str(called[role]), root, f"{where}: services: {role}")
    loaded = {role: services.load(role, str(called[role]), root) for role in kind.services}
    for role, service in loaded.items():
        if service.needs_reference:
            raise ValueError(
                f"{where}: services: {role}={called[role]!r}: it asks the start policy of a training, and a system is "
                "evaluated without one. Name another file of conf/service/."
            )
    return loaded


def _playing(params: conf.Params, method: str, root: Path) -> conf.Tree:
    """Prompt, grammar and budgets of a method's policy; a model that brings its own prompt and grammar keeps them."""
    resolved = methods.load(method, params.scale, root, *parts.own_prompting(params, root))
    rollout = parts.changed(RolloutConf, params, "rollout", resolved["rollout"], method)
    played = {key: resolved[key] for key in ("prompt", "grammar")}
    return {"kind": "policy", **played, "rollout": conf.plain(rollout)}
