"""Stage `base`: the start policy of one seed, into `artifacts/base/<seed>/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tasks import conf, parts, retrieval
from tasks.agent import grammars
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.agent.rollout import RolloutConf
from tasks.base.settings import BaseConf, FormatConf, PretrainedConf, TinyConf
from tasks.data.records import read_passages, read_questions
from tasks.model_source import ensure
from tasks.records import schema, start_policy
from tasks.records.start_policy import FormatRecord, KnownWords
from tasks.runner import Context, main
from tasks.store import Row, replacing_folder, write_json, write_jsonl

if TYPE_CHECKING:
    from tasks.base.make import Lessons, TinyPolicy
    from tasks.plan import RunSettings

MATRIX = ("seed",)
DATA, INDEX = Path("artifacts/data"), Path("artifacts/index")
OUT = Path("artifacts/base")
T = TypeVar("T")
L = TypeVar("L", BaseConf, FormatConf)


@dataclass(frozen=True)
class Taught(Generic[T]):
    """How a policy is taught.

    Attributes:
        training: what comes before reinforcement learning.
        rollout: budgets of the demonstrations.
        prompt, grammar: of the demonstrations; the grammar as kind and settings.
        retriever: settings of the backend that opens the index.
    """

    training: T
    rollout: RolloutConf
    prompt: Prompt
    grammar: dict[str, Any]
    retriever: dict[str, Any]


@dataclass(frozen=True)
class Made:
    """How a policy is made from random weights: the size of the model, and how it is taught."""

    architecture: TinyConf
    taught: Taught[BaseConf]


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        seed: of weights and demonstrations.
        made: for a policy that is made here; else None.
        pretrained: for a given model folder; else None.
        format: how a given model is taught the format of a search agent; None takes it as it comes.
        given_sha256: of the files in the given model's folder.
        engine: kind and settings of the one that divides the training among processes; None trains in this one.
    """

    seed: int
    made: Made | None
    pretrained: PretrainedConf | None
    format: Taught[FormatConf] | None
    given_sha256: str | None = None
    engine: dict[str, Any] | None = None


def settings(run: RunSettings, seed: int) -> Settings:
    """The model of this run, and how it is taught if it is made or taught here."""
    model = run.model
    if model.tiny is None and not run.teaches_format:
        return Settings(seed, None, model.pretrained, None, run.given_sha256)
    prompt, grammar = run.model_prompting
    if prompt is None or grammar is None:
        raise ValueError(
            f"{conf.CONF}/model/{run.params.model}.yaml: prompt={model.prompt!r}, grammar={model.grammar!r}: "
            "expected both: a policy that is taught here is taught with its own prompt and grammar. Write, for "
            "example, `prompt: short` and `grammar: {kind: search_r1}`."
        )
    if model.tiny is None:
        training = run.scale(FormatConf, "format")
        format = _taught(run, training, prompt, grammar)
        return Settings(seed, None, model.pretrained, format, run.given_sha256, run.divides())
    return Settings(seed, Made(model.tiny, taught(run, prompt, grammar)), None, None, engine=run.divides())


def taught(run: RunSettings, prompt: Prompt, grammar: SearchGrammar) -> Taught[BaseConf]:
    """How this run teaches a tiny policy a prompt and a grammar."""
    return _taught(run, run.scale(BaseConf, "base"), prompt, grammar)


def _taught(run: RunSettings, training: T, prompt: Prompt, grammar: SearchGrammar) -> Taught[T]:
    return Taught(training, run.rollout(), prompt, parts.plain(grammar), run.retriever())


def loads(settings: Settings) -> Any:
    """The grammar, the settings of the backend, and the engine."""
    taught = settings.format if settings.made is None else settings.made.taught
    return () if taught is None else (parts_of(taught), parts.make_if("engine", settings.engine, "engine"))


def parts_of(taught: Taught[Any]) -> tuple[SearchGrammar, Any]:
    """The grammar of the demonstrations, and the settings of the backend."""
    grammar = grammars.make(taught.grammar, None, "grammar")
    return grammar, retrieval.settings_of(taught.retriever, "retriever")


def body(ctx: Context[Settings]) -> None:
    """Train the tiny policy, teach a given model, or copy it."""
    import torch

    from tasks.model import export_folder, load_policy, stored_dtype
    from tasks.model_files import require_content

    history: list[Row] = []
    record = words = None
    if ctx.settings.made is not None:
        made = _made(ctx, ctx.settings.made)
        model, tokenizer, history = made.model, made.tokenizer, made.history
        words = _known(ctx, tokenizer)
    else:
        assert ctx.settings.pretrained is not None
        ensure(ctx.root, ctx.settings.pretrained.folder, ctx.settings.pretrained.source)
        given = ctx.root / ctx.settings.pretrained.folder
        require_content(given, ctx.settings.given_sha256)
        # A model that is only copied keeps the dtype of its files: in float32 each seed would take twice the disk.
        model, tokenizer = load_policy(given, torch.float32 if ctx.settings.format else stored_dtype(given))
        if ctx.settings.format is not None:
            history, record = _teach_format(ctx, ctx.settings.format, model, tokenizer)

    folder = OUT / str(ctx.settings.seed)
    with replacing_folder(ctx.root / folder) as out:
        (out / "policy").mkdir()
        export_folder(model, tokenizer, out / "policy")
        write_jsonl(out / "metrics.jsonl", history)
        if words is not None:
            write_json(out / start_policy.WORDS, schema.plain(words))
        if record is not None:
            write_json(out / start_policy.FILE, schema.plain(record))
    ctx.track_outcome(folder, ())


def _teach_format(
    ctx: Context[Settings], taught: Taught[FormatConf], model: Any, tokenizer: Any
) -> tuple[list[Row], FormatRecord]:
    """Teach a given model; returns the metrics of its training, and what it was taught with."""
    from tasks.base.taught import teach_format
    from tasks.model import pick_device

    conf = taught.training
    num_steps = conf.fit.max_steps + (conf.read.max_steps if conf.read else 0)
    lessons: Lessons[FormatConf] = lessons_of(ctx, taught, ctx.settings.seed, num_steps, ctx.settings.engine)
    if ctx.settings.engine is None:  # Workers need all of their GPUs.
        model = model.to(pick_device())
    chosen, seed = lessons.chosen(), f"{ctx.settings.seed}/format"
    with lessons.fit(model, conf.dtype, conf.share_reading) as fit:
        record = teach_format(model, fit, lessons.renderer(tokenizer), chosen, conf, seed)
    print(f"{record.demonstrations} of {record.plans} plans were kept; {record.tokens} tokens were read", flush=True)
    return fit.history, record


def _made(ctx: Context[Settings], settings: Made) -> TinyPolicy:
    """A policy made from random weights."""
    from tasks.base.make import make_tiny

    training = settings.taught.training
    phases = (training.recall, training.read, training.wasteful, training.lazy)
    num_steps = sum(phase.max_steps for phase in phases)
    lessons = lessons_of(ctx, settings.taught, ctx.settings.seed, num_steps, ctx.settings.engine)
    return make_tiny(settings.architecture, read_passages(ctx.root / DATA / "corpus.jsonl"), lessons)


def _known(ctx: Context[Settings], tokenizer: Any) -> KnownWords:
    """The share of the data's words that a policy made here has tokens for."""
    from tasks.base.vocabulary import known

    data = ctx.root / DATA
    return known(tokenizer, read_questions(data / "questions.jsonl"), read_passages(data / "corpus.jsonl"))


def lessons_of(
    ctx: Context[Any], taught: Taught[L], seed: int, num_steps: int, engine: dict[str, Any] | None
) -> Lessons[L]:
    """What a policy is taught with, from the files of this run; `num_steps` at most, which the bar shows."""
    from tasks.base.make import Lessons
    from tasks.device import use_threads

    use_threads(taught.training.num_threads)
    ctx.track.log_params(conf.plain(taught.training))
    questions = list(read_questions(ctx.root / DATA / "questions.jsonl"))
    ctx.track_data("training", sum(question.split == "train" for question in questions))

    grammar, _ = parts_of(taught)
    search = retrieval.open_retriever(ctx.root / INDEX, ctx.root / DATA / "corpus.jsonl")
    log = ctx.bar(num_steps, unit="step").log
    dividing = parts.make_if("engine", engine, "engine")
    return Lessons(
        taught.training, taught.rollout, taught.prompt, grammar, questions, search, seed, ctx.scratch, log, dividing
    )


if __name__ == "__main__":
    main("base", body, Settings, *MATRIX)
