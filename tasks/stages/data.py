"""Stage `data`: the generated world or a folder of real data becomes `artifacts/data`. Checks live in `tasks.data`."""

from __future__ import annotations

from pathlib import Path

from tasks import conf
from tasks.data.ingest import REJECTED, fault_lines, ingest, publish
from tasks.data.settings import DataConf
from tasks.data.world import write_world
from tasks.runner import Context, run
from tasks.store import Row

OUT = Path("artifacts/data")


def main() -> None:
    """Entry point."""
    run("data", _body)


def _body(ctx: Context) -> None:
    settings = conf.load(DataConf, "data", ctx.params.data, root=ctx.root)
    manifest = _make(settings, ctx)
    counts = {"passages": manifest["corpus"]["rows"]}
    for split in ("train", "dev", "test"):
        counts[f"questions_{split}"] = sum(q["splits"].get(split, 0) for q in manifest["questions"].values())
    ctx.log(0, {name: float(count) for name, count in counts.items()})
    ctx.track.set_tags({"data_sha256": manifest["data_sha256"]})
    _print(counts, manifest)


def _make(settings: DataConf, ctx: Context) -> Row:
    out = ctx.root / OUT
    if settings.world is not None:
        world = settings.world
        return publish(lambda folder: write_world(world, folder), out, "world")
    if not ctx.params.data_folder:
        raise ValueError(
            "params.yaml: data_folder is empty, but data is 'folder'. Name the folder that holds the data."
        )
    return ingest(ctx.root / ctx.params.data_folder, out, settings.folder)


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


if __name__ == "__main__":
    main()
