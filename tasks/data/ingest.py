"""Bring questions and a corpus into `artifacts/data`: every row checked, every link between rows checked.

Sources are a folder of real data, read in place, or files that a generator just wrote. The result is
`questions.jsonl` (sorted by id), `corpus.jsonl` (in the source's order) and `manifest.json` (counts and
hashes). Nothing is repaired without being counted in the manifest, and a failed run leaves nothing behind.
Corpora are streamed: a passage costs 8 bytes of memory; a question costs a small record, not its text.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasks.data.records import UnscorableError, passage_row, question_row, to_passage, to_question
from tasks.store import (
    DataError,
    Row,
    dump,
    read_json,
    read_jsonl,
    replacing,
    replacing_folder,
    sha256,
    write_json,
    write_jsonl,
)
from tasks.text import normalize
from tasks.types import Passage, Question

QUESTIONS, CORPUS, MANIFEST = "questions.jsonl", "corpus.jsonl", "manifest.json"


@dataclass(frozen=True)
class FolderConf:
    """What to do with rows of a folder that cannot be used as they are.

    Attributes:
        leakage: a train question that is also a dev or test question (same id, or same text after
            `tasks.text.normalize`): stop, or leave the train row out.
        unscorable: a question whose every answer normalises to nothing (such as "---"): stop, or
            leave the row out. Either way the manifest counts what was left out.
    """

    leakage: Literal["error", "drop_train"] = "error"
    unscorable: Literal["error", "drop"] = "error"


def ingest(folder: Path, out: Path, conf: FolderConf | None = None) -> Row:
    """Check the data of `folder` and write it to `out`, replacing what was there; returns the manifest.

    Reads `corpus.jsonl[.gz]`, `questions.jsonl[.gz]`, `*/questions.jsonl[.gz]` and, for the sha256 of
    unpacked files it may declare, `manifest.json`.

    Raises:
        DataError: a file, row or link between rows is wrong; `out` is then as it was before.
    """
    corpus, questions = find_corpus(folder), find_questions(folder)
    with replacing_folder(out) as work:
        survey = _Survey(conf or FolderConf())
        write_jsonl(work / CORPUS, (passage_row(passage) for passage in survey.passages(corpus)))
        survey.write_questions(questions, work / QUESTIONS)
        _verify_declared(folder, [corpus, *questions])
        return _finish(survey, work, "folder")


def publish(write: Callable[[Path], None], out: Path, kind: str) -> Row:
    """Let `write(folder)` make `questions.jsonl` and `corpus.jsonl`, check both, add the manifest.

    The files pass the same checks as a folder of real data and are published as `write` left them.

    Raises:
        DataError: as `ingest`.
    """
    with replacing_folder(out) as work:
        write(work)
        survey = _Survey(FolderConf())
        try:
            for _ in survey.passages(work / CORPUS):
                pass
            survey.read_questions([work / QUESTIONS])
        except DataError as error:  # The files vanish with the error, so their paths would mislead.
            raise DataError(str(error).replace(f"{work}/", "generated ")) from None
        return _finish(survey, work, kind)


def find_corpus(folder: Path) -> Path:
    """The corpus file of a folder; a DataError when there is none or there are two."""
    if not folder.is_dir():
        raise DataError(f"{folder}: not a folder. Set data_folder to a folder with {CORPUS} and {QUESTIONS}.")
    found = _either(folder / CORPUS)
    if found is None:
        raise DataError(f"{folder}: no {CORPUS} or {CORPUS}.gz. Add the passages, one JSON object a line.")
    return found


def find_questions(folder: Path) -> list[Path]:
    """The question files of a folder, its own first, then those of its subfolders by name."""
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found = [path for place in places if (path := _either(place / QUESTIONS)) is not None]
    if not found:
        raise DataError(f"{folder}: no {QUESTIONS}[.gz] here or in a subfolder. Add the questions, one a line.")
    return found


def _either(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    if path.is_file() and packed.is_file():
        raise DataError(f"{path.parent}: both {path.name} and {packed.name} are there. Remove one of them.")
    for one in (path, packed):
        if not one.is_file() and os.path.lexists(one):
            raise DataError(f"{one}: {_what_it_is(one)}, expected a file with one JSON object a line. Put one there.")
    return path if path.is_file() else packed if packed.is_file() else None


def _what_it_is(path: Path) -> str:
    """In words, what stands where a file should; `path` exists in some way and is no file."""
    if path.is_dir():
        return "found a folder"
    if not path.is_symlink():
        return "found neither a file nor a folder"
    try:
        path.stat()
    except FileNotFoundError:
        return f"found a link to {str(path.readlink())!r}, which does not exist"
    except OSError as error:  # A loop, most of all.
        return f"found a link that cannot be followed ({error.strerror})"
    return f"found a link to {str(path.readlink())!r}, which is neither a file nor a folder"


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is remembered of a question: where it stood, where it lies in the spool, what must not repeat."""

    id: str
    where: str
    is_train: bool
    text_key: bytes
    gold_keys: tuple[int, ...]
    dataset: str
    counted: tuple[str, ...]
    position: int = 0


@dataclass
class _Survey:
    """The checks between rows, and the counts of the manifest, gathered while the rows stream by.

    Call `passages` first and exhaust it: questions are checked against the ids it saw.
    """

    conf: FolderConf
    corpus: Path = Path()
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # sorted, one per passage
    corpus_datasets: Counter[str] = field(default_factory=Counter)
    kept: list[_Seen] = field(default_factory=list)
    answers_dropped: int = 0
    unscorable: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    def passages(self, path: Path) -> Iterator[Passage]:
        """Stream the passages of `path`; the error for a repeated id comes after the last one."""
        self.corpus, keys = path, array("Q")
        for number, row in read_jsonl(path):
            passage = to_passage(row, f"{path}: row {number}")
            keys.append(key_of(passage.id))
            self.corpus_datasets.update(passage.datasets)
            yield passage
        if not keys:
            raise DataError(f"{path}: no passage in it, expected at least one. Add the corpus.")
        self.keys = np.frombuffer(keys, np.uint64).copy()
        self.keys.sort()
        suspects = self.keys[1:][self.keys[1:] == self.keys[:-1]]
        if len(suspects):
            _raise_repeated_passage(path, set(suspects.tolist()))

    def read_questions(self, paths: Sequence[Path]) -> None:
        """Check questions that stay where they are; they must be sorted by id."""
        seen = [_see(question, where) for question, where in self._questions(paths)]
        self._settle(seen, paths)
        assert self.kept == seen, "generated questions must come sorted by id"

    def write_questions(self, paths: Sequence[Path], target: Path) -> None:
        """Check the questions of `paths` and write them to `target`, sorted by id."""
        spool, seen = target.with_name(f".{target.name}.spool"), []
        with spool.open("w+b") as lines:
            for question, where in self._questions(paths):
                seen.append(_see(question, where, lines.tell()))
                lines.write(dump(question_row(question)).encode() + b"\n")
            self._settle(seen, paths)
            with replacing(target) as file:
                for one in self.kept:
                    lines.seek(one.position)
                    file.write(lines.readline())
        spool.unlink()

    def _questions(self, paths: Iterable[Path]) -> Iterator[tuple[Question, str]]:
        for path in paths:
            for number, row in read_jsonl(path):
                where = f"{path}: row {number}"
                try:
                    question = to_question(row, where)
                except UnscorableError as error:
                    if self.conf.unscorable == "error":
                        raise DataError(f"{error} Or set unscorable: drop in conf/data/folder.yaml.") from None
                    self.unscorable.append(row["id"])
                    continue
                self.answers_dropped += len(row["answers"]) - len(question.answers)
                self._check_links(question, where)
                yield question, where

    def _check_links(self, question: Question, where: str) -> None:
        support = [hop.support_passage_id for hop in question.decomposition if hop.support_passage_id is not None]
        for name, ids in (
            ("gold_passage_ids", question.gold_passage_ids),
            ("silver_passage_ids", question.silver_passage_ids),
            ("decomposition.support_passage_id", support),
        ):
            for passage_id in ids:
                if not self.has_passage(passage_id):
                    raise DataError(
                        f"{where}: field {name!r}: found {passage_id!r}, expected the id of a passage in "
                        f"{self.corpus}. Add the passage or remove the id."
                    )

    def has_passage(self, passage_id: str) -> bool:
        """Whether the corpus holds this id (up to a 64-bit hash collision)."""
        return contains(self.keys, key_of(passage_id))

    def _settle(self, seen: list[_Seen], paths: Sequence[Path]) -> None:
        """Set `kept`, sorted by id: `seen` without leaked train rows; raise for repeated ids and empty sides."""
        evaluated = [one for one in seen if not one.is_train]
        trained = [one for one in seen if one.is_train]
        for side in (evaluated, trained):
            _refuse_repeats(side)
        by_id = {one.id: one for one in evaluated}
        by_text = {one.text_key: one for one in reversed(evaluated)}  # Reversed: the first row of a text wins.
        kept = []
        for one in trained:
            other = by_id.get(one.id) or by_text.get(one.text_key)
            if other is None:
                kept.append(one)
            elif self.conf.leakage == "error":
                raise DataError(_leak_message(one, other))
            else:
                self.leaked.append(one.id)
        files = ", ".join(map(str, paths))
        if not kept:
            raise DataError(f"{files}: no train row{_left(self.leaked)}. Add questions with split train.")
        if not evaluated:
            raise DataError(f"{files}: no dev or test row, so nothing can be evaluated. Add some.")
        self.kept = sorted([*kept, *evaluated], key=lambda one: one.id)


def _see(question: Question, where: str, position: int = 0) -> _Seen:
    return _Seen(
        id=question.id,
        where=where,
        is_train=question.split == "train",
        text_key=hashlib.blake2b(normalize(question.question).encode(), digest_size=16).digest(),
        gold_keys=tuple(map(key_of, question.gold_passage_ids)),
        dataset=question.dataset,
        counted=_counted(question),
        position=position,
    )


def _counted(question: Question) -> tuple[str, ...]:
    """The manifest's counters that a question raises by one; `a.b` is counter b of group a."""
    flags = {
        "with_gold": question.gold_passage_ids,
        "with_silver": question.silver_passage_ids,
        "with_decomposition": question.decomposition,
    }
    always = ("rows", f"splits.{question.split}", f"hops.{question.hops}", f"gold_method.{question.gold_method}")
    complete = ("gold_complete", f"gold_complete_splits.{question.split}") if question.gold_complete else ()
    return (*always, *complete, *(name for name, value in flags.items() if value))


def key_of(name: str) -> int:
    """64 bits of an id's hash: what is kept of an id in memory."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def contains(keys: np.ndarray, key: int) -> bool:
    """Whether sorted `keys` [N] uint64 holds `key`."""
    at = int(np.searchsorted(keys, np.uint64(key)))
    return at < len(keys) and int(keys[at]) == key


def _raise_repeated_passage(path: Path, suspects: set[int]) -> None:
    """Read again, comparing the ids themselves: two ids may share a hash, and the message needs both rows."""
    first: dict[str, int] = {}
    for number, row in read_jsonl(path):
        if key_of(row["id"]) in suspects and first.setdefault(row["id"], number) != number:
            raise DataError(
                f"{path}: row {number}: field 'id': found {row['id']!r} again, first in row {first[row['id']]}; "
                f"expected unique ids. Remove or rename one of the rows."
            )


def _refuse_repeats(side: list[_Seen]) -> None:
    first: dict[str, _Seen] = {}
    for one in side:
        other = first.setdefault(one.id, one)
        if other is not one:
            raise DataError(
                f"{one.where}: field 'id': found {one.id!r} again, first in {other.where}; expected unique ids. "
                f"Remove or rename one of the rows."
            )


def _leak_message(train: _Seen, other: _Seen) -> str:
    same = "id" if train.id == other.id else "question"
    return (
        f"{train.where}: field {same!r}: train question {train.id!r} is also an evaluation question: "
        f"{other.id!r} in {other.where}. Remove one of the rows, or set leakage: drop_train in conf/data/folder.yaml "
        f"to leave such train rows out."
    )


def _left(leaked: list[str]) -> str:
    return f" is left after {len(leaked)} that repeat evaluation questions were dropped" if leaked else ""


def _verify_declared(folder: Path, paths: list[Path]) -> None:
    """Compare the unpacked files with the sha256 that the folder's own manifest.json declares for them."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return
    declared = _declared(read_json(manifest))
    for path in paths:
        name = path.relative_to(folder).as_posix().removesuffix(".gz")
        expected, found = declared.get(name), _sha256_unpacked(path)
        if expected is not None and expected != found:
            raise DataError(
                f"{path}: the unpacked file has sha256 {found}, but {manifest} declares {expected}. The file was "
                f"changed or damaged: copy it again, or correct the manifest."
            )


def _declared(manifest: Any) -> dict[str, str]:
    """`{file: sha256}` from `corpus.sha256`, `questions.<subfolder>.sha256` and `files.<file>.sha256`."""
    groups = manifest if isinstance(manifest, dict) else {}
    entries: dict[str, Any] = {CORPUS: groups.get("corpus")}
    for group, name in (("questions", "{}/" + QUESTIONS), ("files", "{}")):
        members = groups.get(group)
        entries |= {name.format(key): entry for key, entry in members.items()} if isinstance(members, dict) else {}
    pairs = ((name, entry.get("sha256")) for name, entry in entries.items() if isinstance(entry, dict))
    return {name: value for name, value in pairs if isinstance(value, str)}


def _sha256_unpacked(path: Path) -> str:
    if path.suffix != ".gz":
        return sha256(path)
    total = hashlib.sha256()
    with gzip.open(path, "rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _finish(survey: _Survey, work: Path, kind: str) -> Row:
    """Write the manifest beside the finished files; it names no path, time or machine."""
    files = {
        CORPUS: {"rows": len(survey.keys), "sha256": sha256(work / CORPUS)},
        QUESTIONS: {"rows": len(survey.kept), "sha256": sha256(work / QUESTIONS)},
    }
    trained = {key for one in survey.kept if one.is_train for key in one.gold_keys}
    evaluated = {key for one in survey.kept if not one.is_train for key in one.gold_keys}
    manifest = {
        "kind": kind,
        "data_sha256": hashlib.sha256(dump(files).encode()).hexdigest(),
        "files": files,
        "corpus": {"rows": len(survey.keys), "by_dataset": dict(survey.corpus_datasets)},
        "questions": _by_dataset(survey.kept),
        "leakage": {
            "policy": survey.conf.leakage,
            "train_rows_dropped": sorted(survey.leaked),
            "repeated_question_texts": len(survey.kept) - len({one.text_key for one in survey.kept}),
            "gold_passages_of_train_and_evaluation": len(trained & evaluated),
        },
        "unscorable": {
            "policy": survey.conf.unscorable,
            "rows_dropped": sorted(survey.unscorable),
            "aliases_dropped": survey.answers_dropped,
        },
    }
    write_json(work / MANIFEST, manifest)
    return manifest


def _by_dataset(kept: list[_Seen]) -> dict[str, Row]:
    """Counts per dataset: rows, gold_complete, with_..., and per split, hop count and gold method."""
    counts: dict[str, Counter[str]] = {}
    for one in kept:
        counts.setdefault(one.dataset, Counter()).update(one.counted)
    result: dict[str, Row] = {}
    for dataset, counter in counts.items():
        row: Row = dict.fromkeys(("gold_complete", "with_gold", "with_silver", "with_decomposition"), 0)
        for name, count in counter.items():
            group, _, key = name.partition(".")
            if key:
                row.setdefault(group, {})[key] = count
            else:
                row[group] = count
        result[dataset] = row
    return result
