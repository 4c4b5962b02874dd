"""Stage `base`: the start policy of one seed, into `artifacts/base/<seed>/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import conf, parts, retrieval
from tasks.agent import grammars
from tasks.agent.grammar import SearchGrammar
from tasks.agent.prompts import Prompt
from tasks.agent.rollout import RolloutConf
from tasks.base.settings import BaseConf, PretrainedConf, TinyConf
from tasks.data.records import read_passages, read_questions
from tasks.runner import Context, main
from tasks.store import replacing_folder, write_jsonl

if TYPE_CHECKING:
    from tasks.base.make import TinyPolicy
    from tasks.plan import RunSettings

MATRIX = ("seed",)
DATA, INDEX = Path("artifacts/data"), Path("artifacts/index")
OUT = Path("artifacts/base")


@dataclass(frozen=True)
class Made:
    """How a policy is made from random weights.

    Attributes:
        architecture: size of the model.
        training: the phases of teaching before reinforcement learning.
        rollout: budgets of the demonstrations.
        prompt, grammar: of the demonstrations; the grammar as kind and settings.
        retriever: settings of the backend that opens the index.
    """

    architecture: TinyConf
    training: BaseConf
    rollout: RolloutConf
    prompt: Prompt
    grammar: dict[str, Any]
    retriever: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        seed: of weights and demonstrations.
        made: for a policy that is made here; else None.
        pretrained: for a given model folder; else None.
    """

    seed: int
    made: Made | None
    pretrained: PretrainedConf | None


def settings(run: RunSettings, seed: int) -> Settings:
    """The model of this run, and how it is taught if it is made here."""
    model = run.model
    if model.tiny is None:
        return Settings(seed, None, model.pretrained)
    prompt, grammar = run.model_prompting
    if prompt is None or grammar is None:
        raise ValueError(
            f"{conf.CONF}/model/{run.params.model}.yaml: prompt={model.prompt!r}, grammar={model.grammar!r}: "
            "expected both: a policy that is made here is taught with its own prompt and grammar."
        )
    training = run.scale(BaseConf, "base")
    return Settings(
        seed, Made(model.tiny, training, run.rollout(), prompt, parts.plain(grammar), run.retriever()), None
    )


def loads(settings: Settings) -> Any:
    """The grammar, and the settings of the backend."""
    return () if settings.made is None else parts_of(settings.made)


def parts_of(made: Made) -> tuple[SearchGrammar, Any]:
    """The grammar of the demonstrations, and the settings of the backend."""
    grammar = grammars.make(made.grammar, None, "grammar")
    return grammar, retrieval.settings_of(made.retriever, "retriever")


def body(ctx: Context[Settings]) -> None:
    """Train the tiny policy, or copy a given model folder."""
    from tasks.model import export_folder, load_policy

    if ctx.settings.made is None:
        assert ctx.settings.pretrained is not None
        model, tokenizer = load_policy(ctx.root / ctx.settings.pretrained.folder)
        history = []  # Nothing was trained here.
    else:
        made = teach(ctx, ctx.settings.made, ctx.settings.seed)
        model, tokenizer, history = made.model, made.tokenizer, made.history

    folder = OUT / str(ctx.settings.seed)
    with replacing_folder(ctx.root / folder) as out:
        (out / "policy").mkdir()
        export_folder(model, tokenizer, out / "policy")
        write_jsonl(out / "metrics.jsonl", history)
    ctx.track_outcome(folder, ())


def teach(ctx: Context[Any], settings: Made, seed: int) -> TinyPolicy:
    """A policy made from random weights."""
    from tasks.base.make import make_tiny
    from tasks.device import use_threads

    use_threads(settings.training.num_threads)
    ctx.track.log_params(conf.plain(settings.training))
    questions = list(read_questions(ctx.root / DATA / "questions.jsonl"))
    ctx.track_data("training", sum(question.split == "train" for question in questions))

    grammar, _ = parts_of(settings)
    corpus = ctx.root / DATA / "corpus.jsonl"
    search = retrieval.open_retriever(ctx.root / INDEX, corpus)
    phases = (settings.training.recall, settings.training.read, settings.training.wasteful, settings.training.lazy)
    bar = ctx.bar(sum(phase.max_steps for phase in phases))
    return make_tiny(
        settings.architecture,
        settings.training,
        settings.rollout,
        settings.prompt,
        grammar,
        questions,
        read_passages(corpus),
        search,
        seed,
        ctx.scratch,
        bar.log,
    )


if __name__ == "__main__":
    main("base", body, Settings, *MATRIX)
