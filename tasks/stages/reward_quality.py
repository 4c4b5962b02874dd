"""Stage `reward_quality`: a reward model's figures on policies it never saw, into `artifacts/quality/<name>-<seed>/`.

It reads the recorded evaluation trajectories of every system of the same seed: questions of other splits, played after
training. A reward model learns from plays of one player; how far its figures hold on other policies is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import parts, services, trained
from tasks.data.records import read_questions
from tasks.records import schema
from tasks.records.played import SUMMARY
from tasks.records.trajectories import TrajectoryRow, TurnRow
from tasks.records.usage import usages, work_of
from tasks.reward_model.card import Card
from tasks.reward_model.quality import QUALITY, Judged, Quality, measure
from tasks.reward_model.reading import encode
from tasks.reward_model.settings import LossConf
from tasks.runner import Context, main
from tasks.services import Labeller, Resources
from tasks.store import replacing_folder, write_json
from tasks.text import exact_match
from tasks.types import Action, Question, Turn

if TYPE_CHECKING:
    from tasks.plan import RunSettings

MATRIX = ("reward_model", "seed")
DATA, EVALUATED, OUT = Path("artifacts/data"), Path("artifacts/evaluate"), Path("artifacts/quality")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        reward_model, seed: the item.
        systems: whose trajectories are read.
        labeller: kind and settings of the service that says which searches are pivots.
        loss: meaning of the model's number.
        num_threads: of forward passes.
    """

    reward_model: str
    seed: int
    systems: tuple[str, ...]
    labeller: dict[str, Any]
    loss: LossConf
    num_threads: int


def settings(run: RunSettings, reward_model: str, seed: int) -> Settings:
    """The reward model's labeller, and all systems of the run."""
    chosen = run.reward_model(reward_model)
    labeller = run.service("labeller", chosen.labeller)
    return Settings(reward_model, seed, run.params.systems, labeller, chosen.loss, chosen.fit.num_threads)


def loads(settings: Settings) -> services.Kind:
    """The labeller."""
    kind: services.Kind = parts.make(services.ROOM, settings.labeller, "labeller")
    return kind


def body(ctx: Context[Settings]) -> None:
    """Label and measure the trajectories of each system; questions without golden hops are left out."""
    from tasks.device import use_threads
    from tasks.model import pick_device
    from tasks.reward_model.model import opened

    settings, name = ctx.settings, f"{ctx.settings.reward_model}-{ctx.settings.seed}"
    use_threads(settings.num_threads)
    found = trained.find(ctx.root, [settings.reward_model], settings.seed)
    folder = found[settings.reward_model].checked(ctx.root)
    model, tokenizer, card = opened(folder)
    model = model.to(pick_device())
    questions = {one.id: one for one in read_questions(ctx.root / DATA / "questions.jsonl") if one.decomposition}

    figures: dict[str, Quality] = {}
    with loads(settings).opened(Resources(ctx.root, ctx.scratch)) as labeller:
        for system in ctx.progress(settings.systems, len(settings.systems)):
            path = ctx.root / EVALUATED / f"{system}-{settings.seed}" / "trajectories.jsonl"
            played = [pair for _, row in schema.read(TrajectoryRow, path) if (pair := _played(row, questions))]
            judged = list(_judged(played, labeller, model, tokenizer, card))
            if judged:
                figures[system] = measure(judged, settings.loss.clamp, settings.loss.head == "hazard")
        used = work_of(usages({"labeller": labeller}), ctx.measured)
    with replacing_folder(ctx.root / OUT / name) as out:
        write_json(out / QUALITY, {system: schema.plain(one) for system, one in figures.items()})
        write_json(out / SUMMARY, {"plays": sum(one.num_trajectories for one in figures.values()), **used})
    for system, one in figures.items():
        print(f"{system}: pivot AUC {one.pivot_auc}, ECE {one.ece:.3f} on {one.num_trajectories} plays", flush=True)


Played = tuple[Question, list[Turn], bool]
"""A question, the turns of its play, and whether its answer is right."""


def _played(row: TrajectoryRow, questions: dict[str, Question]) -> Played | None:
    """A recorded play of a question with golden hops that ended without a failed search; else None."""
    question = questions.get(row.question_id)
    if question is None or row.status == "failed":
        return None
    return question, [_turn(turn) for turn in row.turns], exact_match(row.answer, row.answers) == 1


def _turn(row: TurnRow) -> Turn:
    text = "".join(row.tokens) if row.tokens is not None else row.text or ""
    action = Action(row.kind, row.content)
    return Turn(action, text=text, observation=row.observation, executed=row.executed)


def _judged(played: list[Played], labeller: Labeller, model: Any, tokenizer: Any, card: Card) -> Iterator[Judged]:
    """What the model says of each play that could be labelled and that it can read to the end."""
    from tasks.reward_model.model import probabilities

    labels = list(labeller.label((question, turns) for question, turns, _ in played))
    encoded = [
        encode(tokenizer, card.placeholder_id, question.question, turns, card.max_tokens)
        for question, turns, _ in played
    ]
    values = probabilities(model, encoded, card.max_pack_tokens)
    for (question, turns, is_right), found, one, f in zip(played, labels, encoded, values, strict=True):
        is_labelled = found.labels is not None and len(found.labels) == sum(turn.executed for turn in turns)
        if is_labelled and not one.is_cut:
            yield Judged(f, found.labels or (), is_right, question.hops)


if __name__ == "__main__":
    main("reward_quality", body, Settings, *MATRIX)
