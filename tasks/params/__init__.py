"""`params.yaml` says which runs exist. Form, command line and checks of a run all follow the fields of `Params`.

No stage reads it: a stage reads its plan, so that a new parameter makes no stage run again.
"""

from __future__ import annotations

import dataclasses
import re
import typing
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic.fields import FieldInfo

from tasks import conf, extends, own
from tasks.conf import CONF, PARAMS, require
from tasks.params import chosen

SYSTEMS = ("system", "method")
"""Folders of `conf/` whose files can be evaluated: systems that do not learn, and methods that train a policy."""
TRAINED = {"reward_model": "reward_models", "reader": "readers", "start": "starts"}
"""Folders of `conf/` with the models that this pipeline trains for systems -> the key that lists those of a run.

A service of such a kind names its model by the key `model`; a method names its start policy by the key `start`."""
TOOLS = "tools"
"""The key that lists the systems of a run whose evidence another model reads: those with a `tool_reader`."""
Seed = Annotated[int, Field(ge=0, le=999_999)]
"""Seeds of draws are made of it and of two counters by multiplication, and fit into 64 bits."""


def _time_zone(name: str) -> str:
    if name not in zoneinfo.available_timezones():
        raise ValueError(f"found {conf.shown(name)}, expected a time zone such as UTC or Europe/Paris.")
    return name


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""A model on the Hugging Face hub: organisation/name."""
NO_MODEL = (
    " A model of your own is named by the folder or the GGUF file that it lies in, one of the Hugging Face hub by "
    "organisation/name, such as MODEL=openai-community/gpt2; the answer says what to write for it."
)
MAX_TOP_K = 1000
"""Most passages of a search that can be asked for."""


@dataclass(frozen=True)
class FileOf:
    """Marks a setting whose values are names of files: `conf/<kind>/<name>.yaml`, of one of these kinds."""

    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Evaluate:
    """The section `evaluate` of `params.yaml`; only the evaluation and the report depend on it."""

    top_k: Annotated[
        int, Field(ge=0, le=MAX_TOP_K, description="passages per search; 0 takes the scale's, as in training")
    ]
    max_questions: Annotated[
        int, Field(ge=0, description="a seeded sample of this size, spread over datasets; 0 takes the scale's, or all")
    ]
    num_bootstrap: Annotated[int, Field(ge=100, le=1_000_000, description="resamples behind each 95% interval")]
    sampled: Annotated[
        bool, Field(description="also play once at temperature 1 with a fixed seed, if the scale allows that")
    ]
    reference: Annotated[str, Field(description="the system that others are compared with, one of systems")]
    max_failed_share: Annotated[
        float,
        Field(ge=0, lt=1, description="largest share of episodes that may fail in search; more end the evaluation"),
    ] = 0.0


@dataclass(frozen=True)
class Params:
    """The keys of `params.yaml`. Form, command line and checks all follow these fields."""

    scale: Annotated[str, FileOf(("scale",)), Field(description="sizes and budgets (conf/scale)")]
    data: Annotated[str, FileOf(("data",)), Field(description="world is generated, folder is read (conf/data)")]
    data_folder: Annotated[str, Field(description="of data: folder, read in place; otherwise unused")]
    model: Annotated[str, FileOf(("model",)), Field(description="the policy (conf/model)")]
    retriever: Annotated[str, FileOf(("retriever",)), Field(description="the search engine (conf/retriever)")]
    generator: Annotated[str, FileOf(("generator",)), Field(description="writes the policy's text (conf/generator)")]
    engine: Annotated[str, FileOf(("engine",)), Field(description="trains the policy (conf/engine)")]
    systems: Annotated[
        tuple[str, ...],
        FileOf(SYSTEMS),
        Field(min_length=1, description="what is evaluated (conf/system, conf/method)"),
    ]
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, description="every system runs with each seed")]
    evaluate: Annotated[Evaluate, Field(description="how results are measured")]
    compare_retrievers: Annotated[
        tuple[str, ...], FileOf(("retriever",)), Field(description="built and measured side by side (conf/retriever)")
    ] = ()
    augment: Annotated[
        str, FileOf(("augment",)), Field(description="writes sub-questions and reference queries (conf/augment)")
    ] = ""
    reward_models: Annotated[
        tuple[str, ...],
        FileOf(("reward_model",)),
        Field(description="trained for services of systems, follow from them"),
    ] = ()
    readers: Annotated[
        tuple[str, ...], FileOf(("reader",)), Field(description="likewise: models that read evidence")
    ] = ()
    starts: Annotated[
        tuple[str, ...], FileOf(("start",)), Field(description="likewise: start policies with tags of their own")
    ] = ()
    tools: Annotated[
        tuple[str, ...], FileOf(("method",)), Field(description="likewise: systems whose evidence another model reads")
    ] = ()
    parts: Annotated[str, Field(description="folder with parts of your own (docs/methods-of-yours.md)")] = own.NONE
    set: Annotated[
        dict[str, Any], Field(description="numbers of conf/ that differ from its files: {train: {policy: {lr: 1e-4}}}")
    ] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        lists = ("systems", "compare_retrievers", *TRAINED.values(), TOOLS)
        for key, noun in (("seeds", "integers"), *((name, "names") for name in lists)):
            values = getattr(self, key)
            require(len(set(values)) == len(values), key, values, f"different {noun}")
        reference = self.evaluate.reference
        require(reference in self.systems, "evaluate.reference", reference, f"one of systems={list(self.systems)}")


@dataclass(frozen=True)
class Compare:
    """One file of `conf/compare/`: methods and seeds that are set side by side.

    Attributes:
        methods, seeds: each method runs with each seed.
        sampled: replaces `evaluate.sampled` of `params.yaml`; null leaves it.
    """

    methods: Annotated[tuple[str, ...], Field(min_length=1)]
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    sampled: bool | None = None


@dataclass(frozen=True)
class Nightly:
    """`conf/nightly/default.yaml`: what is played every night.

    Attributes:
        cron, timezone: when, such as `0 3 * * *` and `Europe/Paris`.
        newest: registered policies that play, besides the champion.
        params: decide questions and index, in the place of `params.yaml`.
    """

    cron: str
    timezone: Annotated[str, AfterValidator(_time_zone)]
    newest: Annotated[int, Field(ge=0, le=100)]
    params: Params


@dataclass(frozen=True)
class Setting:
    """One key of `params.yaml`, as form and command line describe it.

    Attributes:
        key: its name.
        info: type, bounds and description, as pydantic has them.
        default: value if `params.yaml` leaves the key out; `dataclasses.MISSING` if it must not.
    """

    key: str
    info: FieldInfo
    default: object

    @property
    def kinds(self) -> tuple[str, ...]:
        """Folders of `conf/` whose files its values name; empty if its values are no names of files."""
        return next((mark.kinds for mark in self.info.metadata if isinstance(mark, FileOf)), ())

    @property
    def is_list(self) -> bool:
        """Whether it holds several values."""
        return typing.get_origin(self.info.annotation) is tuple

    @property
    def section(self) -> type | None:
        """The dataclass of a section, None for a value."""
        return self.info.annotation if dataclasses.is_dataclass(self.info.annotation) else None


def settings_of(cls: type = Params) -> Iterator[Setting]:
    """The keys of `params.yaml`, or of one of its sections, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else field.default
        yield Setting(field.name, FieldInfo.from_annotation(hints[field.name]), default)


def read(root: Path = Path(".")) -> Params:
    """Read and check `params.yaml`, and that every file it names exists."""
    return check(conf.read_yaml(root / PARAMS), root)


def check(tree: Mapping[str, Any], root: Path = Path("."), where: str = str(PARAMS)) -> Params:
    """The settings of a `params.yaml` with this content; ValueErrors are those of reading the file `where`."""
    result = conf.fill(Params, tree, where)
    try:
        own.check(result.parts, root)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    with own.using(result.parts):
        chosen.check(result.set, root, where)
        _check_names(result, root, where)
    return result


def _check_names(result: Params, root: Path, where: str) -> None:
    """Every file that a setting names exists."""
    for setting in (setting for setting in settings_of() if setting.kinds):
        value: Any = getattr(result, setting.key)
        if value != setting.default:
            for name in value if setting.is_list else [value]:
                is_known = name in conf.names("model", root)
                if setting.key == "model" and not is_known and (told := how_to_take(name, root)):
                    raise ValueError(f"{where}: model={name!r}: {told}")
                try:
                    conf.kind_of(setting.kinds, name, root, where)
                except ValueError as error:
                    raise ValueError(f"{error}{NO_MODEL if setting.key == 'model' else ''}") from None


def models_of(system: str, scale: str, root: Path = Path(".")) -> list[tuple[str, str]]:
    """Folder of `conf/` and name of each model that this pipeline trains for a system: its services, its start policy.

    Raises:
        ValueError: an unknown name, a file that cannot be read, or a model's name that both folders have.
    """
    kind = conf.kind_of(SYSTEMS, system, root)
    where = f"{CONF}/{kind}/{system}.yaml"
    tree = extends.read(kind, system, scale, root) if kind == "method" else conf.section(kind, system, root)
    named = tree.get("services")
    found: list[tuple[str, str]] = []
    for role, name in named.items() if isinstance(named, Mapping) else ():
        if isinstance(name, str):  # Null takes an inherited service away.
            found += model_of_service(name, f"{where}: services: {role}", root)

    if isinstance(start := tree.get("start"), str):
        conf.path_of("start", start, root, f"{where}: start")
        conf.kind_of(tuple(TRAINED), start, root, f"{where}: start")
        found.append(("start", start))
    return list(dict.fromkeys(found))


def model_of_service(name: str, where: str, root: Path = Path(".")) -> list[tuple[str, str]]:
    """Folder of `conf/` and name of the model that this pipeline trains for a file of `conf/service/`; none for most.

    Raises:
        ValueError: an unknown name, which `where` gives, or a model's name that both folders have.
    """
    conf.path_of("service", name, root, where)
    service = conf.section("service", name, root)
    folder, model = service.get("kind"), service.get("model")
    if folder not in TRAINED or not isinstance(model, str):
        return []
    place = f"{CONF}/service/{name}.yaml: model"
    conf.path_of(str(folder), model, root, place)
    conf.kind_of(tuple(TRAINED), model, root, place)
    return [(str(folder), model)]


def tool_reader_of(system: str, scale: str, root: Path = Path(".")) -> str | None:
    """The file of `conf/service/` that reads a system's evidence as a tool; None for most."""
    if conf.kind_of(SYSTEMS, system, root) != "method":
        return None
    name = extends.read("method", system, scale, root).get("tool_reader")
    return name if isinstance(name, str) else None


def models_of_all(systems: Sequence[str], scale: str, root: Path = Path(".")) -> dict[str, tuple[str, ...]]:
    """The lists of models and `tools` that these systems need, in the order of the systems."""
    readers = {name: reader for name in systems if (reader := tool_reader_of(name, scale, root)) is not None}
    needed = dict.fromkeys(model for system in systems for model in models_of(system, scale, root))
    for name, reader in readers.items():
        needed |= dict.fromkeys(model_of_service(reader, f"{CONF}/method/{name}.yaml: tool_reader", root))
    lists = {key: tuple(name for folder, name in needed if TRAINED[folder] == key) for key in TRAINED.values()}
    return lists | {TOOLS: tuple(readers)}


def with_models(params: Params, root: Path = Path(".")) -> Params:
    """These settings with the models that their systems need."""
    needed: dict[str, Any] = dict(models_of_all(params.systems, params.scale, root))
    return dataclasses.replace(params, **needed)


def how_to_take(name: str, root: Path = Path(".")) -> str:
    """What to write so that a run takes the model of a folder, a GGUF file or the hub; empty for any other name."""
    short = Path(name).name.removesuffix(".gguf")
    source = ""
    if (root / name).is_dir() and not name.startswith(f"{CONF}/"):
        found, folder = "a folder", name
    elif name.endswith(".gguf"):
        found, folder, source = "a GGUF file", f"models/{short}", f"source: {{gguf: {name}}}"
    elif HUB_NAME.fullmatch(name):
        found, folder = "a name of the Hugging Face hub", f"models/{short}"
        source = f"source: {{hub: {name}, revision: main}}"
    else:
        return ""
    pretrained = ", ".join(filter(None, (f"folder: {folder}", source)))
    return (
        f"found {found}, expected a file of {CONF}/model. Write `{{kind: pretrained, prompt: null, pretrained: "
        f"{{{pretrained}}}, lora: {{rank: 0}}, rollout: {{max_prompt_tokens: 512, max_total_tokens: 2048}}, "
        f"scales: {{small: {{prompt: short, grammar: {{kind: search_r1}}}}}}}}` into {CONF}/model/{short.lower()}.yaml "
        f"and run with MODEL={short.lower()}."
    )


def how_to_fetch(hub_name: str, folder: str) -> str:
    """The command that copies a model of the hub into a folder; `make` sets HF_HUB_OFFLINE for what it runs itself."""
    return f"HF_HUB_OFFLINE=0 hf download {hub_name} --local-dir {folder}"


def nightly(root: Path = Path(".")) -> Nightly:
    """Read `conf/nightly/default.yaml`, whose `params` must stand every check of `params.yaml`."""
    chosen = conf.load(Nightly, "nightly", "default", root=root)
    check(conf.plain(chosen.params), root, f"{CONF}/nightly/default.yaml: params")
    return chosen


def compare(name: str, root: Path = Path(".")) -> Compare:
    """Read `conf/compare/<name>.yaml` and check that its methods exist; `check` has the other bounds."""
    conf.path_of("compare", name, root, "--compare")
    chosen = conf.load(Compare, "compare", name, root=root)
    for method in chosen.methods:
        conf.path_of("method", method, root, f"{CONF}/compare/{name}.yaml")
    return chosen
