"""Stage `reward_model`: trains PiCA's reward model on labelled trajectories, into `artifacts/models/<name>-<seed>/`.

It ends as an ordinary model folder with a card, its figures on held-out questions, the rows for a human audit, and a
manifest of hashes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import conf, parts, trained
from tasks.records import schema
from tasks.records.played import LABELS, SAMPLES, SUMMARY, LabelRow, Part
from tasks.reward_model.card import Card, write_card
from tasks.reward_model.fit import Fit, Known, Progress, num_steps, supervision
from tasks.reward_model.quality import QUALITY, Judged, Quality, measure
from tasks.reward_model.reading import Blanked, encode, placeholder_id
from tasks.reward_model.settings import FitConf, LossConf
from tasks.runner import Context, main
from tasks.store import DataError, read_json, replacing_folder, write_json, write_jsonl
from tasks.supervised import opened

if TYPE_CHECKING:
    from tasks.plan import RunSettings

MATRIX = ("reward_model", "seed")
BASE, LABELLED = Path("artifacts/base"), Path("artifacts/labels")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        reward_model, seed: the item.
        backbone: folder of the model that training starts from; null takes the start policy.
        placeholder: token at which f(t) is read.
        loss, fit: see `RewardModelConf`.
        engine: kind and settings of the one that divides the training among processes; None trains in this one.
    """

    reward_model: str
    seed: int
    backbone: str | None
    placeholder: str
    loss: LossConf
    fit: FitConf
    engine: dict[str, Any] | None = None


def settings(run: RunSettings, reward_model: str, seed: int) -> Settings:
    """The training of the reward model."""
    chosen = run.reward_model(reward_model)
    return Settings(reward_model, seed, chosen.backbone, chosen.placeholder, chosen.loss, chosen.fit, run.divides())


def loads(settings: Settings) -> Any:
    """The engine."""
    return parts.make_if("engine", settings.engine, "engine")


def body(ctx: Context[Settings]) -> None:
    """Train, measure on held-out trajectories, and store the model."""
    from tasks.device import use_threads
    from tasks.model import export_folder
    from tasks.reward_model.model import load

    settings = ctx.settings
    use_threads(settings.fit.num_threads)
    start = ctx.root / (settings.backbone or f"{BASE}/{settings.seed}/policy")
    model, tokenizer = load(start, is_new=True)
    where = f"{conf.CONF}/reward_model/{settings.reward_model}.yaml"
    card = Card(settings.loss.head, settings.placeholder, placeholder_id(tokenizer, settings.placeholder, where),
                settings.fit.max_tokens, settings.fit.max_pack_tokens)  # fmt: skip
    source = ctx.root / LABELLED / f"{settings.reward_model}-{settings.seed}"
    rows = [row for _, row in schema.read(LabelRow, source / LABELS)]
    encoded, num_too_long = encoded_rows(rows, tokenizer, card)
    ctx.track.log_params(conf.plain(settings))

    blanked, _ = encoded_rows(rows, Blanked(tokenizer), card)
    compared = controls(ctx, start, encoded, blanked)
    progress = _fit(ctx, model, encoded, "fit", ctx.bar(_num_steps(ctx, encoded), unit="step").log)
    quality = judge(model, encoded["held_out"], settings.fit.max_pack_tokens, settings.loss)

    with replacing_folder(ctx.root / trained.FOLDER / f"{settings.reward_model}-{settings.seed}") as out:
        export_folder(model.to("cpu"), tokenizer, out)
        write_card(out, settings.reward_model, settings.seed, card, quality)
        facts = {"too_long": num_too_long, **compared, "best_step": progress.best_step}
        facts |= {"labels": read_json(source / SUMMARY), "steps": progress.step}
        write_json(out / QUALITY, {**schema.plain(quality), "facts": facts})
        write_jsonl(out / "metrics.jsonl", progress.history)
        shutil.copyfile(source / SAMPLES, out / SAMPLES)
        trained.seal(out, {"reward_model": settings.reward_model, "seed": settings.seed})
    print(f"pivot AUC {quality.pivot_auc}, ECE {quality.ece:.3f}, outcome AUC {quality.outcome_auc} on "
          f"{quality.num_trajectories} held-out trajectories; pivot AUC of shuffled labels {compared['control_auc']}, "
          f"without words {compared['blanked_auc']}", flush=True)  # fmt: skip


def encoded_rows(rows: Sequence[LabelRow], tokenizer: Any, card: Card) -> tuple[dict[Part, list[Known]], int]:
    """The rows as tokens, by part, and how many were longer than the model reads; these are left out."""
    found: dict[Part, list[Known]] = {"train": [], "validation": [], "held_out": []}
    num_too_long = 0
    for row in rows:
        one = encode(tokenizer, card.placeholder_id, row.question, row.turns, card.max_tokens)
        num_too_long += one.is_cut
        searches = sum(turn.executed for turn in row.turns)
        if len(row.labels) != searches:
            raise DataError(
                f"labels: question {row.question_id!r}, copy {row.copy}: found {len(row.labels)} labels, expected "
                f"{searches}, one for each executed search. Run `make run`, which labels anew."
            )
        if not one.is_cut:
            pivots = tuple(label == "+" for label in row.labels)
            found[row.part].append(Known(one, pivots, row.is_right, row.hops))
    if empty := [part for part, known in found.items() if not known]:
        raise DataError(
            f"reward model: all trajectories of {', '.join(empty)} are longer than max_tokens={card.max_tokens}. Raise "
            "it in conf/reward_model, or play shorter ones."
        )
    return found, num_too_long


def judge(model: Any, known: Sequence[Known], max_pack_tokens: int, loss: LossConf) -> Quality:
    """The figures of a model on these trajectories."""
    from tasks.reward_model.model import probabilities

    found = probabilities(model, [one.encoded for one in known], max_pack_tokens)
    cases = [Judged(f, one.pivots, one.is_right, one.hops) for f, one in zip(found, known, strict=True)]
    return measure(cases, loss.clamp, loss.head == "hazard")


def _num_steps(ctx: Context[Settings], encoded: dict[Part, list[Known]]) -> int:
    return num_steps(len(encoded["train"]), ctx.settings.fit)


def _fit(
    ctx: Context[Settings], model: Any, encoded: dict[Part, list[Known]], name: str, log: Any, steps: int = 0
) -> Progress:
    """Train a model, which ends on the device of this process."""
    from tasks.model import pick_device

    settings, engine = ctx.settings, loads(ctx.settings)
    if engine is None:  # Workers need all of their GPUs.
        model.to(pick_device())
    training, validation = encoded["train"], encoded["validation"]
    seed, scratch = f"{settings.seed}/{name}", ctx.scratch / name
    with opened(model, supervision(settings.loss, settings.fit), engine) as learner:
        fit = Fit(learner, settings.loss, settings.fit, training, validation, seed, scratch, log, steps)
        progress = fit.run()
    model.to(pick_device())
    return progress


def controls(
    ctx: Context[Settings], start: Path, encoded: dict[Part, list[Known]], blanked: dict[Part, list[Known]]
) -> dict[str, float | None]:
    """The pivot AUC of two more models, after `control_steps` updates each; None where there are none.

    * `control_auc`: labels and outcomes are dealt anew, of what is learned and of what is measured alike. 0.5 says that
      the measuring makes no figure out of nothing; a biased AUC, or measured trajectories that were learned by heart,
      would show. It cannot show what a text gives away, because these labels have nothing to do with it.
    * `blanked_auc`: the labels are right, and `blanked` has the texts without words. What is above 0.5 comes from the
      form of a trajectory: the place of a search, lengths and tags. Only the rest of the model's own AUC, which is
      measured on the same trajectories, is read from words.
    """
    settings = ctx.settings
    if not settings.fit.control_steps:
        return {"control_auc": None, "blanked_auc": None}
    dealt = {part: shuffled(known, f"{settings.seed}/control/{part}") for part, known in encoded.items()}
    return {
        "control_auc": _auc_of(ctx, start, dealt, "control", dealt["validation"] + dealt["held_out"]),
        "blanked_auc": _auc_of(ctx, start, blanked, "blanked", blanked["held_out"]),
    }


def _auc_of(
    ctx: Context[Settings], start: Path, encoded: dict[Part, list[Known]], name: str, measured: Sequence[Known]
) -> float | None:
    """The pivot AUC of a model that has learned from these trajectories."""
    from tasks.reward_model.model import load

    fit, loss = ctx.settings.fit, ctx.settings.loss
    model, _ = load(start, is_new=True)
    _fit(ctx, model, encoded, name, lambda step, metrics: None, fit.control_steps)
    return judge(model, measured, fit.max_pack_tokens, loss).pivot_auc


def shuffled(known: Sequence[Known], seed: str) -> list[Known]:
    """The same trajectories with the labels of all searches, and all outcomes, dealt anew."""
    draw = random.Random(seed)
    labels = [is_pivot for one in known for is_pivot in one.pivots]
    outcomes = [one.is_right for one in known]
    draw.shuffle(labels)
    draw.shuffle(outcomes)
    given = iter(labels)
    return [
        replace(one, pivots=tuple(next(given) for _ in one.pivots), is_right=is_right)
        for one, is_right in zip(known, outcomes, strict=True)
    ]


if __name__ == "__main__":
    main("reward_model", body, Settings, *MATRIX)
