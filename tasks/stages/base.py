"""Stage `base`: the start policy of one seed, into `artifacts/base/<seed>/`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import conf
from tasks.data.records import SPLITS
from tasks.runner import Context, run
from tasks.stages import parts
from tasks.store import replacing_folder, write_jsonl

if TYPE_CHECKING:
    from tasks.base.make import TinyPolicy


def body(ctx: Context, seed: int) -> None:
    """Train the tiny policy, or take over a given model folder."""
    from tasks.model import export_folder, load_policy

    model_conf = parts.model_conf(ctx.params)
    if model_conf.pretrained is not None:
        model, tokenizer = load_policy(ctx.root / model_conf.pretrained.folder)
        history = []  # Nothing was trained here.
    else:
        made = _tiny(ctx, seed)
        model, tokenizer, history = made.model, made.tokenizer, made.history
    with replacing_folder(ctx.root / parts.ARTIFACTS / "base" / str(seed)) as out:
        (out / "policy").mkdir()
        export_folder(model, tokenizer, out / "policy")
        write_jsonl(out / "metrics.jsonl", history)
    parts.track_outcome(ctx, parts.ARTIFACTS / "base" / str(seed), ())


def _tiny(ctx: Context, seed: int) -> TinyPolicy:
    from tasks.base.make import make_tiny
    from tasks.base.settings import BaseConf
    from tasks.data.records import read_passages

    model_conf = parts.model_conf(ctx.params)
    assert model_conf.tiny is not None
    settings = conf.fill(BaseConf, *parts.scale_section(ctx.params, "base"))
    parts.set_threads(settings.num_threads)
    ctx.track.log_params(conf.plain(settings))
    phases = (settings.recall, settings.read, settings.wasteful, settings.lazy)
    questions = parts.questions(ctx.root, SPLITS)
    ctx.track_data("training", sum(question.split == "train" for question in questions))
    bar = parts.Bar(ctx, sum(phase.max_steps for phase in phases))
    prompt, grammar = parts.own_prompting(ctx.params, ctx.root)
    if prompt is None or grammar is None:
        raise ValueError(
            f"{conf.CONF}/model/{ctx.params.model}.yaml: prompt={model_conf.prompt!r}, grammar={model_conf.grammar!r}: "
            "expected both: a policy that is made here is taught with a prompt and a grammar of its own."
        )
    return make_tiny(
        model_conf.tiny, settings, parts.rollout_conf(ctx.params), prompt, grammar,
        questions, read_passages(ctx.root / parts.ARTIFACTS / "data" / "corpus.jsonl"),
        parts.retriever(ctx.root), seed, ctx.scratch, bar.log,
    )  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    run(f"base@{args.seed}", lambda ctx: body(ctx, args.seed), root=Path("."))


if __name__ == "__main__":
    main()
