"""Stage `labels`: which searches of played trajectories are pivots, into `artifacts/labels/<reward model>-<seed>/`.

Replies of a chat model are cached, so a stage that was killed pays for none twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import parts, services
from tasks.augment.records import HOPS, read_hops
from tasks.data.expectations import check
from tasks.records import schema
from tasks.records.played import LABELS, PLAYED, SAMPLES, SUMMARY, LabelRow, PlayedRow
from tasks.records.usage import usages, work_of
from tasks.reward_model.labelling import Counts, label, samples
from tasks.runner import Context, main
from tasks.services import Resources
from tasks.store import DataError, read_json, replacing_folder, write_json

if TYPE_CHECKING:
    from tasks.plan import RunSettings

MATRIX = ("reward_model", "seed")
AUGMENT, TRAJECTORIES, OUT = Path("artifacts/augment"), Path("artifacts/trajectories"), Path("artifacts/labels")
DOCS = Path(".scratch/data_docs")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        reward_model, seed: the item.
        labeller: kind and settings of the service that labels.
        num_samples: rows for the human audit.
    """

    reward_model: str
    seed: int
    labeller: dict[str, Any]
    num_samples: int


def settings(run: RunSettings, reward_model: str, seed: int) -> Settings:
    """The labeller of the reward model."""
    chosen = run.reward_model(reward_model)
    return Settings(reward_model, seed, run.service("labeller", chosen.labeller), chosen.num_samples)


def loads(settings: Settings) -> services.Kind:
    """The labeller."""
    kind: services.Kind = parts.make(services.ROOM, settings.labeller, "labeller")
    return kind


def body(ctx: Context[Settings]) -> None:
    """Label every play, count what was dropped and why, and check the rows.

    Raises:
        DataError: nothing could be labelled, or a row breaks an expectation.
    """
    settings, counts = ctx.settings, Counts()
    item = f"{settings.reward_model}-{settings.seed}"
    folder, hops = ctx.root / TRAJECTORIES / item, read_hops(ctx.root / AUGMENT / HOPS)
    total = int(read_json(folder / SUMMARY)["plays"])
    played = (row for _, row in schema.read(PlayedRow, folder / PLAYED))

    with replacing_folder(ctx.root / OUT / item) as out:
        with loads(settings).opened(Resources(ctx.root, ctx.scratch)) as labeller:
            rows = list(label(ctx.progress(played, total), hops, labeller, counts))
        used = work_of(usages({"labeller": labeller}), ctx.measured)
        _require_parts(rows, counts, item)
        schema.write(out / LABELS, rows)
        _check(ctx.root, out)
        schema.write(out / SAMPLES, samples(rows, settings.num_samples, f"{settings.seed}/audit"))
        write_json(out / SUMMARY, {**counts.plain, "labeller": settings.labeller[parts.KIND], **used})
    ctx.log(0, {name: float(value) for name, value in counts.plain.items() if name != "dropped"})
    dropped = ", ".join(f"{reason} {count}" for reason, count in counts.plain["dropped"].items()) or "none"
    print(
        f"{counts.kept} of {counts.read} trajectories labelled, {counts.pivots} pivots of {counts.searches} searches; "
        f"dropped: {dropped}",
        flush=True,
    )


def _require_parts(rows: list[LabelRow], counts: Counts, item: str) -> None:
    missing = [part for part in ("train", "validation", "held_out") if not any(row.part == part for row in rows)]
    if missing:
        raise DataError(
            f"labels of {item}: no trajectory is left for {', '.join(missing)} ({counts.kept} of {counts.read} kept, "
            f"dropped: {counts.plain['dropped']}). Play more questions, or mend the labeller."
        )


def _check(root: Path, out: Path) -> None:
    try:
        check("labels", [out / LABELS], root / DOCS)
    except DataError as error:  # The working folder is deleted with the error, so its path would mislead.
        raise DataError(str(error).replace(f"{out}/", "new ").replace(f"{root}/", "")) from None


if __name__ == "__main__":
    main("labels", body, Settings, *MATRIX)
