"""Which folders of models a run will read, and whether the policy's is one that it can play and train.

A folder that is missing and cannot be made, or is no such model, ends the run at its start: teaching may take an hour.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tasks import conf, extends, generate, systems
from tasks.model import outline
from tasks.model_source import ensure
from tasks.params import HUB_NAME, SYSTEMS, how_to_fetch, tool_reader_of
from tasks.plan.machine import host_memory
from tasks.plan.run_settings import RunSettings
from tasks.retrieval.encoders import MINILM
from tasks.types import Question

NO_TEMPLATE = (
    "its tokenizer has no chat template, so prompts are plain text: the system message, a blank line, and the question "
    "with its instructions. A chat_template.jinja in the folder replaces this"
)
MAX_SECONDS, MAX_BYTES = 20.0, 2 << 30
"""For the prompts of one system, which take some milliseconds and kilobytes; a template is a program of its own."""
Named = tuple[str, str]
"""File and key that name a folder, and the folder."""


def check(run: RunSettings) -> None:
    """Look for every folder that the run will read.

    Raises:
        ValueError: one is missing, with how to fetch the model; a judge, reader or labeller cannot be opened; the
            policy cannot be played and trained.
    """
    if (model := run.model.pretrained) is not None:
        ensure(run.root, model.folder, model.source, host_memory().size)
    for where, folder in (*_policy(run), *_reward_models(run), *_services(run), *_retrievers(run)):
        if not (run.root / folder).is_dir():
            raise ValueError(f"{where}={folder!r}: there is no such folder. {_how_to_get(folder)}")
    for _, folder in _services(run):
        outline(run.root / folder)
    if model is not None:
        _try(run, run.root / model.folder)


def _try(run: RunSettings, folder: Path) -> None:
    """Open the policy's folder as every stage will, but for its weights, and write a short prompt of each system."""
    model, tokenizer, unused = outline(folder)
    if unused:
        what = f"{len(unused)} weights in its files have no place in {type(model).__name__}, such as {min(unused)}"
        print(f"warning: {folder}: {what}; they are not used", file=sys.stderr)
    if not getattr(tokenizer, "chat_template", None):
        print(f"{folder}: {NO_TEMPLATE}", flush=True)
    generator = generate.load(run.params.generator, run.root)
    if isinstance(generator, generate.Particular):
        try:
            generator.check_model(model.config)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None

    question = Question("", "any", "train", "Who?", ("nobody",), 1)
    for name in run.params.systems:
        where = f"{conf.CONF}/{conf.kind_of(SYSTEMS, name, run.root)}/{name}.yaml"
        kind = systems.build(run.system(name), where).kind
        if isinstance(kind, systems.Prompted):
            with _bounded():
                kind.check_prompts(folder, [question], f"{where}: prompt")


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Raise in the block what ends it after `MAX_SECONDS` or with `MAX_BYTES` more memory: a template may loop or grow.

    Signals reach the main thread alone, so in another one time has no bound.
    """

    def end(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {MAX_SECONDS:.0f} s")

    is_main = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)  # A file of weights that is mapped is not counted.
    held = psutil.Process().memory_info()
    most = getattr(held, "data", held.vms) + MAX_BYTES
    before = signal.signal(signal.SIGALRM, end) if is_main else None
    try:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
        if soft == resource.RLIM_INFINITY or soft > most:
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _how_to_get(folder: str) -> str:
    if HUB_NAME.fullmatch(folder) and not folder.startswith("models/"):
        local = f"models/{Path(folder).name}"
        fetch = how_to_fetch(folder, local)
        return f"A run reads local folders only. Fetch the model once (`{fetch}`) and write {local} here."
    fetch = how_to_fetch(f"<organisation>/{Path(folder).name}", folder)
    return f"Put the model there; one of the Hugging Face hub by `{fetch}`."


def _policy(run: RunSettings) -> Iterator[Named]:
    if run.model.pretrained is not None:
        yield f"{conf.CONF}/model/{run.params.model}.yaml: pretrained: folder", run.model.pretrained.folder


def _reward_models(run: RunSettings) -> Iterator[Named]:
    for name in run.params.reward_models:
        if (backbone := run.reward_model(name).backbone) is not None:
            yield f"{conf.CONF}/reward_model/{name}.yaml: backbone", backbone


def _services(run: RunSettings) -> Iterator[Named]:
    """Judges, readers and labellers that are models in this process."""
    names = [run.reward_model(name).labeller for name in run.params.reward_models]
    for system in run.params.systems:
        kind = conf.kind_of(SYSTEMS, system, run.root)
        tree = extends.read(kind, system, run.params.scale, run.root) if kind == "method" else None
        services = (conf.section(kind, system, run.root) if tree is None else tree).get("services")
        names += services.values() if isinstance(services, Mapping) else ()
        names += filter(None, [tool_reader_of(system, run.params.scale, run.root)])

    for name in dict.fromkeys(name for name in names if isinstance(name, str)):
        tree = conf.section("service", name, run.root)
        if isinstance(folder := tree.get("folder"), str):
            yield f"{conf.CONF}/service/{name}.yaml: folder", folder


def _retrievers(run: RunSettings) -> Iterator[Named]:
    """Encoders, also those of a hybrid's parts, and cross-encoders."""
    for name in dict.fromkeys((run.params.retriever, *run.params.compare_retrievers)):
        tree, where = run.retriever(name), f"{conf.CONF}/retriever/{name}.yaml"
        parts: dict[str, Any] = {"": tree, **{f"parts: {key}: ": part for key, part in tree.get("parts", {}).items()}}
        for place, part in parts.items():
            encoder = part.get("encoder", MINILM)
            if encoder != MINILM and part.get("mode") != "bm25":  # Elasticsearch's terms need no vectors.
                yield f"{where}: {place}encoder", encoder
        if reranker := tree.get("reranker", {}).get("model"):
            yield f"{where}: reranker: model", reranker
