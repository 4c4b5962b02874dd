"""Stage `data`: the generated world or a folder of real data becomes `artifacts/data`. Checks live in `tasks.data`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.data.ingest import MANIFEST, REJECTED, FolderConf, fault_lines, ingest, is_resplit, publish, shared_hops
from tasks.data.resplit import NOTE
from tasks.data.world import WorldConf, write_world
from tasks.runner import Context, main
from tasks.store import Row

if TYPE_CHECKING:
    from tasks.plan import RunSettings

OUT = Path("artifacts/data")
FEW, OWN_SHARE = 1000, 0.6
"""Where fewer train questions than `FEW` are published, the run names `conf/data/resplit.yaml`, if that gives more."""


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        world: settings of the generator; None if real data is read.
        folder: what happens to faulty rows of real data.
        data_folder: the folder of real data.
    """

    world: WorldConf | None
    folder: FolderConf | None
    data_folder: str


def settings(run: RunSettings) -> Settings:
    """The settings in `conf/data/` that make the data; other stages read which split is used for what."""
    chosen = run.data
    if chosen.world is None and not run.params.data_folder:
        raise ValueError(
            f"params.yaml: data_folder is empty, but data is {run.params.data!r}. Name the folder that holds the data."
        )
    return Settings(chosen.world, chosen.folder, "" if chosen.world else run.params.data_folder)


def body(ctx: Context[Settings]) -> None:
    """Write `artifacts/data/`."""
    manifest = _make(ctx.settings, ctx.root)
    counts = {"passages": manifest["corpus"]["rows"]}
    for split in ("train", "dev", "test"):
        counts[f"questions_{split}"] = sum(q["splits"].get(split, 0) for q in manifest["questions"].values())
    ctx.log(0, {name: float(count) for name, count in counts.items()})
    ctx.track.set_tags({"data_sha256": manifest["data_sha256"]}, shared=True)
    _print(counts, manifest)
    for line in _about_splits(manifest, counts, ctx.settings.data_folder):
        print(line, flush=True)


def _make(settings: Settings, root: Path) -> Row:
    if (world := settings.world) is not None:
        return publish(lambda folder: write_world(world, folder), root / OUT, "world")
    return ingest(root / settings.data_folder, root / OUT, settings.folder)


def _print(counts: dict[str, int], manifest: Row) -> None:
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()), flush=True)
    leaked, unscorable = manifest["leakage"]["train_rows_dropped"], manifest["unscorable"]["rows_dropped"]
    if leaked:
        print(f"left out, train rows that repeat evaluation questions: {len(leaked)}", flush=True)
    if unscorable:
        print(f"left out, questions whose answers normalise to nothing: {len(unscorable)}", flush=True)
    for line in fault_lines(manifest):
        print(line, flush=True)
    if manifest["faulty_rows"]["by_reason"]:
        print(f"each fault with its file, row and reason: {OUT / REJECTED}", flush=True)


def _about_splits(manifest: Row, counts: dict[str, int], folder: str) -> Iterator[str]:
    """Who decided on the splits of real data, near-duplicates across them, and another split where few train."""
    if is_resplit(manifest):
        shares = ", ".join(f"{name} {share:g}" for name, share in manifest["resplit"]["shares"].items())
        yield (
            f"{NOTE} Shares: {shares}. Published splits: {OUT / MANIFEST}; `resplit: null` in conf/data, where it "
            "stands for this scale, keeps them"
        )
    yield from shared_hops(manifest)
    near = manifest.get("near_duplicates", {})
    if near.get("pairs"):
        across, trained = sum(near["pairs_across_splits"].values()), near["train_rows_near_evaluation"]
        yield (
            f"near-duplicates: {near['pairs']:,} pairs of questions, {across:,} across splits; train questions that "
            f"are near an evaluation question: {trained:,}"
        )
    if left_out := near.get("comparisons_left_out"):
        yield f"near-duplicates: {left_out:,} comparisons by frequent words were left out, so some pairs may be missing"

    train, total = counts["questions_train"], sum(counts[f"questions_{split}"] for split in ("train", "dev", "test"))
    if manifest["kind"] == "folder" and not is_resplit(manifest) and train < min(FEW, int(OWN_SHARE * total)):
        yield (
            f"only {train:,} of {total:,} questions are for training; DATA=resplit DATA_FOLDER={shlex.quote(folder)} "
            "makes them 6 of 10, in a split of our own that is not comparable with papers (docs/data.md)"
        )


if __name__ == "__main__":
    main("data", body, Settings)
