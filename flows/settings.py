"""The typed form of a pipeline run, and how its answers get into `params.yaml`: set, checked, written, run.

An answer left empty means "as `params.yaml` says". Bounds that are more than a type are checked by
`tasks.conf`, the only reader of the settings; nothing here knows what a setting does.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks import conf


def names_of(kind: str) -> Any:
    """A type with the names of `conf/<kind>/*.yaml` as its values, for a list in the form."""
    names = tuple(sorted(path.stem for path in (Path(conf.CONF) / kind).glob("*.yaml")))
    return Literal[names] if names else str


class EvaluateForm(BaseModel):
    """Settings of the evaluation; it and the report alone depend on them."""

    model_config = ConfigDict(extra="forbid")

    top_k: int | None = Field(default=None, ge=0, le=100, description="Passages a search returns; 0 as in training.")
    max_questions: int | None = Field(default=None, ge=0, description="Play at most this many questions; 0 plays all.")
    num_bootstrap: int | None = Field(default=None, ge=100, description="Resamples behind each interval.")
    sampled: bool | None = Field(default=None, description="Also play once at temperature 1.")
    max_failed_share: float | None = Field(
        default=None, ge=0, lt=1, description="Trajectories whose search may fail and count as wrong."
    )


class Form(BaseModel):
    """What to change in `params.yaml` before running. Empty: as it stands there."""

    model_config = ConfigDict(extra="forbid")

    scale: names_of("scale") | None = Field(default=None, description="Sizes and budgets.")  # type: ignore[valid-type]
    data: names_of("data") | None = Field(default=None, description="Where questions come from.")  # type: ignore[valid-type]
    data_folder: str | None = Field(
        default=None, description="Folder of real data, read in place; only with data: folder."
    )
    model: names_of("model") | None = Field(default=None, description="The policy.")  # type: ignore[valid-type]
    retriever: names_of("retriever") | None = Field(default=None, description="The search engine.")  # type: ignore[valid-type]
    compare_retrievers: list[names_of("retriever")] | None = Field(  # type: ignore[valid-type]
        default=None, description="Retrievers to build and measure side by side."
    )
    augment: names_of("augment") | None = Field(default=None, description="What writes sub-questions and queries.")  # type: ignore[valid-type]
    generator: Literal["plain", "vllm"] | None = Field(default=None, description="What writes the policy's text.")
    methods: list[names_of("method")] | None = Field(default=None, min_length=1, description="RL methods.")  # type: ignore[valid-type]
    seeds: list[int] | None = Field(default=None, min_length=1, description="One run of every method for each seed.")
    evaluate: EvaluateForm = Field(default_factory=EvaluateForm, description="How results are measured.")
    force: list[str] = Field(default_factory=list, description="Stages to run even if nothing changed.")
    max_parallel: int = Field(default=2, ge=1, le=64, description="Independent stages at once.")

    def answers(self) -> dict[str, Any]:
        """Settings that were given, by dotted key."""
        given = self.model_dump(exclude_none=True, exclude={"force", "max_parallel"})
        nested = given.pop("evaluate", {})
        return {**given, **{f"evaluate.{key}": value for key, value in nested.items()}}


def apply(answers: dict[str, Any], root: Path) -> list[str]:
    """Write answers into `params.yaml`, keeping its comments; returns `key: old -> new` for each real change.

    Either all are written or none: the result is checked first, and replaces the file in one step.

    Raises:
        ValueError: unknown key, or a value that `tasks.conf` refuses.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedSeq

    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 4096
    path = root / conf.PARAMS
    conf.read_yaml(path)  # Its errors are for readers.
    tree = yaml.load(path.read_text(encoding="utf-8"))
    changes = []
    for key, value in answers.items():
        place, last = tree, key.rpartition(".")[2]
        for part in key.split(".")[:-1]:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last not in place:
            raise ValueError(f"--set {key}: params.yaml has no such key. Known: {', '.join(_keys(tree))}.")
        old = place[last]
        if list(old) != list(value) if isinstance(old, list) and isinstance(value, list) else old != value:
            if isinstance(value, list):
                value = CommentedSeq(value)
                value.fa.set_flow_style()
            place[last] = value
            changes.append(f"{key}: {_text(old)} -> {_text(value)}")
    text = io.StringIO()
    yaml.dump(tree, text)
    conf.check(YAML(typ="safe").load(text.getvalue()), root)  # Also what was written there by hand.
    if changes:
        write(root, text.getvalue())
    return changes


def write(root: Path, text: str) -> None:
    """Replace `params.yaml` in one step."""
    path = root / conf.PARAMS
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def parse(words: list[str]) -> dict[str, Any]:
    """`["evaluate.top_k=5", "seeds=[0,1]"]` as `{"evaluate.top_k": 5, "seeds": [0, 1]}`; values are YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    result: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {word}: expected key=value, such as evaluate.top_k=5.")
        try:
            result[key] = YAML(typ="safe").load(value)
        except YAMLError:
            raise ValueError(f"--set {word}: the value is not YAML. Lists are written as [a, b].") from None
    return result


def data_answers(data: str, root: Path) -> dict[str, Any]:
    """`DATA=` of the Makefile: a name of `conf/data/`, or a folder of real data.

    Raises:
        ValueError: neither.
    """
    known = sorted(path.stem for path in (root / conf.CONF / "data").glob("*.yaml"))
    if data in known:
        return {"data": data, "data_folder": "conf/data"} if data != "folder" else {"data": data}
    if (root / data).is_dir():
        return {"data": "folder", "data_folder": data}
    raise ValueError(f"DATA={data}: neither a folder nor a name of conf/data/ ({', '.join(known)}).")


def compare_answers(name: str, root: Path) -> dict[str, Any]:
    """`--compare`: the methods and seeds of `conf/compare/<name>.yaml`.

    Raises:
        ValueError: no such file, an unknown or missing key, or a method that does not exist.
    """
    found = conf.compare(name, root)
    return {"methods": list(found.methods), "seeds": list(found.seeds)}


def _keys(tree: dict[str, Any]) -> list[str]:
    nested = [[f"{k}.{j}" for j in v] if isinstance(v, dict) else [k] for k, v in tree.items()]
    return [key for keys in nested for key in keys]


def _text(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
