"""Stage `data`: the generated world or a folder of real data becomes `artifacts/data`. Checks live in `tasks.data`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.base.vocabulary import Vocabulary, known
from tasks.data.ingest import CORPUS, MANIFEST, QUESTIONS, REJECTED, FolderConf, ingest, publish
from tasks.data.notes import defaults, fault_lines, is_resplit, own_split, shared_hops
from tasks.data.records import read_passages, read_questions
from tasks.data.resplit import NOTE
from tasks.data.world import WorldConf, write_world
from tasks.records.start_policy import KnownWords
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
        vocabulary: of a tiny policy that will read real data; the stage says how much of it the policy knows.
    """

    world: WorldConf | None
    folder: FolderConf | None
    data_folder: str
    vocabulary: Vocabulary | None = None


def settings(run: RunSettings) -> Settings:
    """The settings in `conf/data/` that make the data; other stages read which split is used for what."""
    chosen = run.data
    if chosen.world is None and not run.params.data_folder:
        raise ValueError(
            f"params.yaml: data_folder is empty, but data is {run.params.data!r}. Name the folder that holds the data."
        )
    if chosen.world is not None:
        return Settings(chosen.world, None, "")
    prompt, grammar = run.model_prompting
    vocabulary = None
    if run.model.tiny is not None and prompt is not None and grammar is not None:
        vocabulary = Vocabulary(run.model.tiny.max_vocab, prompt, grammar.literals)
    return Settings(None, chosen.folder, run.params.data_folder, vocabulary)


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
    if ctx.settings.vocabulary is not None:
        print(_known(ctx.settings.vocabulary, ctx.root).sentence(), flush=True)


def _known(vocabulary: Vocabulary, root: Path) -> KnownWords:
    """How much of the data a tiny policy will know, before hours go into its training."""
    questions = list(read_questions(root / OUT / QUESTIONS))
    training = [question for question in questions if question.split == "train"]
    tokenizer = vocabulary.learned(training, read_passages(root / OUT / CORPUS))
    return known(tokenizer, questions, read_passages(root / OUT / CORPUS))


def _make(settings: Settings, root: Path) -> Row:
    if (world := settings.world) is not None:
        return publish(lambda folder: write_world(world, folder), root / OUT, "world")
    return ingest(root / settings.data_folder, root / OUT, settings.folder)


def _print(counts: dict[str, int], manifest: Row) -> None:
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()), flush=True)
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
    else:
        yield from own_split(manifest)
    yield from defaults(manifest)
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
