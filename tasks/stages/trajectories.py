"""Stage `trajectories`: plays augmented training questions, into `artifacts/trajectories/<reward model>-<seed>/`.

From these plays a reward model learns. The player is any system, with the search engine of this run. Finished chunks of
questions are kept, so a stage that was killed plays only the missing ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks import parts, retrieval, services, text
from tasks.augment.records import HOPS, read_hops
from tasks.data.records import read_questions
from tasks.model import Dtype
from tasks.records import schema
from tasks.records.played import PLAYED, SUMMARY, Part, PlayedRow, played_row
from tasks.records.usage import ChunkUsage, Usage, work_of
from tasks.retrieval import RetrievalError
from tasks.runner import Context, main
from tasks.store import DataError, replacing_folder, write_json
from tasks.systems import Named, Resources, System, build
from tasks.types import Question

if TYPE_CHECKING:
    from tasks.generate import GeneratorConf
    from tasks.plan import RunSettings

MATRIX = ("reward_model", "seed")
DATA, INDEX, AUGMENT = Path("artifacts/data"), Path("artifacts/index"), Path("artifacts/augment")
BASE, OUT = Path("artifacts/base"), Path("artifacts/trajectories")


@dataclass(frozen=True)
class Settings:
    """The settings that this stage reads.

    Attributes:
        reward_model, seed: the item.
        player: kind, settings and services of the system that plays.
        generator: kind and settings of the generator, which writes a policy's text.
        retriever: settings of the backend that opens the index.
        num_questions, copies, held_out, max_failed_share: see `RewardModelConf`.
        num_threads, dtype: of forward passes.
    """

    reward_model: str
    seed: int
    player: dict[str, Any]
    generator: dict[str, Any]
    retriever: dict[str, Any]
    num_questions: int
    copies: int
    held_out: float
    max_failed_share: float
    num_threads: int
    dtype: Dtype


def settings(run: RunSettings, reward_model: str, seed: int) -> Settings:
    """The reward model's player with this run's generator and index."""
    chosen, training = run.reward_model(reward_model), run.training()
    return Settings(
        reward_model=reward_model,
        seed=seed,
        player=run.system(chosen.player),
        generator=run.generator(),
        retriever=run.retriever(),
        num_questions=chosen.num_questions,
        copies=chosen.copies,
        held_out=chosen.held_out,
        max_failed_share=chosen.max_failed_share,
        num_threads=training.num_threads,
        dtype=training.dtype,
    )


@dataclass(frozen=True)
class Loaded:
    """The parts that the stage loads by kind: the player, the generator and the backend of the index."""

    player: Named
    generator: GeneratorConf
    retriever: Any


def loads(settings: Settings) -> Loaded:
    """Build what the settings name."""
    return Loaded(
        build(settings.player, "player"),
        cast("GeneratorConf", parts.make("generate", settings.generator, "generator")),
        retrieval.settings_of(settings.retriever, "retriever"),
    )


def body(ctx: Context[Settings]) -> None:
    """Play every chosen question `copies` times at temperature 1."""
    from tasks.device import use_threads

    settings = ctx.settings
    use_threads(settings.num_threads)
    questions = _questions(ctx)
    parts_ = divided(len(questions), settings.held_out)
    ctx.track_data("reward model", len(questions))

    rows, used = _played(ctx, questions, parts_)
    counts = {"questions": len(questions), "plays": len(rows), "right": sum(row.is_right for row in rows)}
    counts |= {"searches": sum(len(row.searches) for row in rows), "failed": _num_failed(rows)}
    ctx.log(0, {name: float(value) for name, value in counts.items()})
    with replacing_folder(ctx.root / OUT / f"{settings.reward_model}-{settings.seed}") as out:
        schema.write(out / PLAYED, rows)
        hashes = {"data_sha256": ctx.data_sha256, "config_sha256": ctx.config_sha256}
        write_json(out / SUMMARY, {**counts, **work_of(used, ctx.measured), **hashes})


def _questions(ctx: Context[Settings]) -> list[Question]:
    """A seeded sample of the training questions that have golden hops, in the order of the draw.

    Raises:
        DataError: none has any.
    """
    hops = read_hops(ctx.root / AUGMENT / HOPS)
    found = read_questions(ctx.root / DATA / "questions.jsonl")
    usable = [question for question in found if question.split == "train" and question.id in hops]
    if len(usable) < 1 / ctx.settings.held_out:
        raise DataError(
            f"{AUGMENT / HOPS}: found hops of {len(usable)} training questions, expected {1 / ctx.settings.held_out:g} "
            "or more to train a reward model on. Use data with decompositions (the generated world, MuSiQue)."
        )
    settings = ctx.settings
    draw = random.Random(f"{settings.seed}/reward_model/questions")
    return draw.sample(usable, min(settings.num_questions, len(usable)))


def divided(count: int, held_out: float) -> list[Part]:
    """What each question is for: the last of the draw give the figures, as many before them end the training."""
    size = max(1, round(held_out * count))
    sizes: dict[Part, int] = {"train": count - 2 * size, "validation": size, "held_out": size}
    return [part for part, number in sizes.items() for _ in range(number)]


def _played(
    ctx: Context[Settings], questions: Sequence[Question], parts_: Sequence[Part]
) -> tuple[list[PlayedRow], dict[str, Usage]]:
    """The rows of all plays, and what services did; finished chunks of questions are read from the scratch folder.

    Raises:
        RetrievalError: more plays failed in search than `max_failed_share`; chunks without one are kept.
    """
    settings, loaded = ctx.settings, loads(ctx.settings)
    retriever = retrieval.open_retriever(ctx.root / INDEX, ctx.root / DATA / "corpus.jsonl")
    policy = ctx.root / BASE / str(settings.seed) / "policy"
    bar = ctx.bar(len(questions) * settings.copies)
    failures = _Failures(settings.max_failed_share, len(questions) * settings.copies)
    played: list[PlayedRow] = []

    with services.opened(loaded.player.services, services.Resources(ctx.root, ctx.scratch)) as called:
        resources = Resources(policy, retriever, 0, lambda it: loaded.generator.start(it, settings.dtype), called)
        used = ChunkUsage(called)
        with loaded.player.kind.opened(resources) as player:
            for copy in range(settings.copies):
                for first in range(0, len(questions), player.batch_questions):
                    chunk = slice(first, first + player.batch_questions)
                    path = ctx.scratch / f"{copy:04d}-{first:08d}.jsonl"
                    if not path.is_file():
                        with used.counting(path):
                            made = _play(player, questions[chunk], parts_[chunk], copy, settings.seed, first)
                        schema.write(path, made)
                    rows = [row for _, row in schema.read(PlayedRow, path)]
                    failures.add(path, rows)
                    used.add(path)
                    played += rows
                    bar.show(len(played))
    return played, used.total


def _play(
    player: System, questions: Sequence[Question], parts_: Sequence[Part], copy: int, seed: int, first: int
) -> list[PlayedRow]:
    """One chunk, with draws of its own, so that they are the same after a kill."""
    episodes = list(player.play(questions, "sampled", (seed * 7919 + first) * 1_009 + copy))
    found = [episode.question_id for episode in episodes]
    if found != [question.id for question in questions]:
        raise DataError(f"the player gave episodes of other questions ({found[:3]} ...), expected one each, in order.")
    return [
        played_row(episode, question, copy, part, text.exact_match(episode.answer, question.answers) == 1)
        for episode, question, part in zip(episodes, questions, parts_, strict=True)
    ]


def _num_failed(rows: Sequence[PlayedRow]) -> int:
    return sum(row.status == "failed" for row in rows)


@dataclass
class _Failures:
    """Counts failed plays and remembers their chunks, which the next attempt plays again."""

    max_share: float
    num_plays: int
    num_failed: int = 0

    def __post_init__(self) -> None:
        self.chunks: list[Path] = []

    def add(self, path: Path, rows: Sequence[PlayedRow]) -> None:
        """Count a chunk; raises as `_played`."""
        if not (failed := _num_failed(rows)):
            return
        self.num_failed += failed
        self.chunks.append(path)
        if self.num_failed > self.max_share * self.num_plays:
            for chunk in self.chunks:
                chunk.unlink(missing_ok=True)
            raise RetrievalError(
                f"trajectories: {self.num_failed} of {self.num_plays} plays could not search, at most a share of "
                f"{self.max_share:g} may (max_failed_share). Mend the search and start again; other chunks are kept."
            )


if __name__ == "__main__":
    main("trajectories", body, Settings, *MATRIX)
