"""What a name of `systems` stands for; used by the stages that train and evaluate one."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tasks import conf, methods
from tasks.agent import prompts
from tasks.agent.rollout import RolloutConf
from tasks.parts import KIND, make
from tasks.stages import parts
from tasks.systems import Kind


def load(params: conf.Params, name: str, root: Path = Path(".")) -> Kind:
    """What plays under a name of `systems`: a file of `conf/system/`, or the policy that a method trains.

    A file of kind `policy` may name a `method`, whose prompt, grammar and budgets then hold where it gives none.
    """
    if conf.kind_of(conf.SYSTEMS, name, root) == "method":
        return cast(Kind, make("systems", _playing(params, name, root), f"{conf.CONF}/method/{name}.yaml"))
    tree, where = conf.section("system", name, root), f"{conf.CONF}/system/{name}.yaml"
    tree.pop("title", None)
    method = tree.pop("method", None)
    if method is not None and KIND in tree:
        conf.path_of("method", str(method), root, f"{where}: method")
        tree = conf.merge(_playing(params, method, root), tree)
    if isinstance(tree.get("prompt"), str):
        tree["prompt"] = conf.plain(prompts.load(tree["prompt"], where, root))
    return cast(Kind, make("systems", tree, where))


def _playing(params: conf.Params, method: str, root: Path) -> conf.Tree:
    """Prompt, grammar and budgets of a method's policy; a model that brings its own prompt and grammar keeps them."""
    resolved = methods.load(method, params.scale, root, *parts.own_prompting(params, root))
    rollout = parts.changed(RolloutConf, params, "rollout", resolved["rollout"], method)
    played = {key: resolved[key] for key in ("prompt", "grammar")}
    return {"kind": "policy", **played, "rollout": conf.plain(rollout)}
