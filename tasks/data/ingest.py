"""Bring questions and a corpus into `artifacts/data`: every row checked, every link between rows checked.

Sources are a folder of real data, read in place, or files that a generator just wrote. The result is
`questions.jsonl` (sorted by id), `corpus.jsonl` (in the source's order) and `manifest.json` (counts and
hashes). Nothing is repaired without being counted in the manifest, and a failed run leaves nothing behind.
Where faulty rows may be skipped, `rejected.jsonl` names each of them with its file, row and reason.
Corpora are streamed: a passage costs 8 bytes of memory; a question costs a small record, not its text.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from tasks.conf import require
from tasks.data import near
from tasks.data.decomposition import REFERENCE, hops_of
from tasks.data.defaults import PASSAGE, QUESTION, Defaults, Filled
from tasks.data.records import UnscorableError, passage_row, question_row, to_passage, to_question, wrong_field
from tasks.data.resplit import Resplit, assign, moves
from tasks.store import (
    DataError,
    OnFault,
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
from tasks.text import normalize, spelled
from tasks.types import Passage, Question

QUESTIONS, CORPUS, MANIFEST, REJECTED = "questions.jsonl", "corpus.jsonl", "manifest.json", "rejected.jsonl"
MOST_NAMED = 5
"""Files of a folder that a message names."""


@dataclass(frozen=True)
class FolderConf:
    """What to do with rows of a folder that cannot be used as they are.

    Attributes:
        leakage: a train question that is also a dev or test question (same id, or same text after
            `tasks.text.normalize`): stop, or leave the train row out.
        unscorable: a question whose every answer normalises to nothing (such as "---"): stop, or
            leave the row out. Either way the manifest counts what was left out.
        faulty_rows: a passage or question that breaks a rule (bytes that are not UTF-8, no JSON object, a missing
            or unknown field, an id for the second time, too long a passage), or the lost tail of a damaged gzip
            file. `strict` stops at the first and writes nothing. `skip_and_report` leaves the row out, keeps every
            valid one, and lists and counts each fault. A question that names a passage which is not there then
            stays without that passage and is not `gold_complete`; it is listed as well.
        max_passage_chars: title and text of a passage together; a longer one is a fault.
        resplit: shares of splits of our own, into which every question is put; None leaves the published splits.
    """

    leakage: Literal["error", "drop_train"] = "error"
    unscorable: Literal["error", "drop"] = "error"
    faulty_rows: Literal["strict", "skip_and_report"] = "strict"
    max_passage_chars: int = 100_000
    resplit: Resplit | None = None

    def __post_init__(self) -> None:
        require(self.max_passage_chars >= 1, "max_passage_chars", self.max_passage_chars, "at least 1")

    @property
    def max_row_bytes(self) -> int:
        """An upper bound of a valid row: JSON writes a character in at most 12 bytes, and ids need some more."""
        return 12 * self.max_passage_chars + (1 << 20)


def ingest(folder: Path, out: Path, conf: FolderConf | None = None) -> Row:
    """Check the data of `folder` and write it to `out`, replacing what was there; returns the manifest.

    Reads `corpus.jsonl[.gz]`, `questions.jsonl[.gz]`, `*/questions.jsonl[.gz]` and, for the sha256 of
    unpacked files it may declare, `manifest.json`.

    Raises:
        DataError: a file, row or link between rows is wrong; `out` is then as it was before.
    """
    corpus, questions, conf = find_corpus(folder), find_questions(folder), conf or FolderConf()
    with replacing_folder(out) as work, contextlib.ExitStack() as stack:
        rejected = _Rejected(folder)
        if conf.faulty_rows == "skip_and_report":
            rejected.file = stack.enter_context((work / REJECTED).open("w+b"))
        survey = _Survey(conf, rejected)
        write_jsonl(work / CORPUS, (passage_row(passage) for passage in survey.passages(corpus)))
        if survey.repeated:  # Only after reading all rows is it known which ones repeat an id.
            rejected.clear()
            write_jsonl(work / CORPUS, (passage_row(passage) for passage in survey.passages(corpus)))
        survey.write_questions(questions, work / QUESTIONS)
        _verify_declared(folder, [corpus, *questions], rejected)
        return _finish(survey, work, "folder")


def publish(write: Callable[[Path], None], out: Path, kind: str) -> Row:
    """Let `write(folder)` make `questions.jsonl` and `corpus.jsonl`, check both, add the manifest.

    The files pass the same checks as a folder of real data and are published as `write` left them.

    Raises:
        DataError: as `ingest`.
    """
    with replacing_folder(out) as work:
        write(work)
        survey = _Survey(FolderConf(), _Rejected(work))
        try:
            for _ in survey.passages(work / CORPUS):
                pass
            survey.read_questions([work / QUESTIONS])
        except DataError as error:  # The working files are deleted with the error, so their paths would mislead.
            raise DataError(str(error).replace(f"{work}/", "generated ")) from None
        return _finish(survey, work, kind)


def find_corpus(folder: Path) -> Path:
    """The corpus file of a folder; a DataError if there is none or if there are two."""
    if not folder.is_dir():
        raise DataError(
            f"{folder}: not a folder. Name one with {CORPUS} and {QUESTIONS}: `make run DATA=/path/to/folder`, or "
            "data_folder in params.yaml."
        )
    found = _either(folder / CORPUS)
    if found is None:
        raise DataError(f"{folder}: no {CORPUS} or {CORPUS}.gz. {_expected(folder)} Add the passages.")
    return found


def find_questions(folder: Path) -> list[Path]:
    """The question files of a folder, its own first, then those of its subfolders by name."""
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found = [path for place in places if (path := _either(place / QUESTIONS)) is not None]
    if not found:
        raise DataError(f"{folder}: no {QUESTIONS}[.gz] here or in a subfolder. {_expected(folder)} Add the questions.")
    return found


def _expected(folder: Path) -> str:
    """What is in a folder, and what belongs into a folder of data."""
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (
        f"Found {', '.join(names[:MOST_NAMED]) or 'an empty folder'}{more}, expected {CORPUS} with the passages and "
        f"{QUESTIONS} with the questions, one JSON object a line (docs/data.md)."
    )


def _either(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    if path.is_file() and packed.is_file():
        raise DataError(f"{path.parent}: both {path.name} and {packed.name} are there. Remove one of them.")
    for one in (path, packed):
        if not one.is_file() and os.path.lexists(one):
            raise DataError(f"{one}: {_what_it_is(one)}, expected a file with one JSON object a line. Put one there.")
    return path if path.is_file() else packed if packed.is_file() else None


def _what_it_is(path: Path) -> str:
    """What `path` is, in words; it exists and is no file."""
    if path.is_dir():
        return "found a folder"
    if not path.is_symlink():
        return "found neither a file nor a folder"
    try:
        path.stat()
    except FileNotFoundError:
        return f"found a link to {str(path.readlink())!r}, which does not exist"
    except OSError as error:  # Such as a loop of links.
        return f"found a link that cannot be followed ({error.strerror})"
    return f"found a link to {str(path.readlink())!r}, which is neither a file nor a folder"


@dataclass
class _Rejected:
    """Faulty rows of `folder`. A fault is raised while `file` is None, else written to it and counted by reason."""

    folder: Path
    file: IO[bytes] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    lost_tails: list[Row] = field(default_factory=list)
    first: str = ""

    def add(
        self, path: Path, row: int | None, error: DataError, name: object = None, outcome: str = "left out"
    ) -> None:
        """Raise the error, or write what it says.

        Args:
            path, row: where; no row for the file as a whole.
            error: the fault.
            name: the id of the row, if it has one.
            outcome: what became of the row.
        """
        if self.file is None:
            raise error
        where = str(path.relative_to(self.folder))
        if error.reason == "damaged_gzip":
            outcome = "this row and all after it are lost"
            self.lost_tails.append({"file": where, "from_row": row})
        entry = {
            "file": where,
            "row": row,
            "id": name if isinstance(name, str) and _is_text(name) else None,
            "reason": error.reason,
            "outcome": outcome,
            # Without the path of this machine, so that the file depends on the data alone.
            "fault": str(error).removeprefix(f"{path}: ").removeprefix(f"row {row}: ").replace(f"{self.folder}/", ""),
        }
        self.file.write(dump(entry).encode() + b"\n")
        self.counts[error.reason] += 1
        self.first = self.first or str(error).rstrip(".")

    def of(self, path: Path) -> OnFault | None:
        """The function that is called for unreadable rows of a file; None if they are errors."""
        return None if self.file is None else lambda row, error: self.add(path, row, error)

    def clear(self) -> None:
        """Forget all faults, because all rows are read a second time."""
        assert self.file is not None
        self.file.seek(0)
        self.file.truncate()
        self.counts.clear()
        self.lost_tails.clear()
        self.first = ""

    def told(self) -> str:
        """For a message that too few rows are left; empty where there was no fault."""
        count = self.counts.total()
        return f" ({count:,} faulty rows were left out, the first: {self.first})" if count else ""


def _is_text(name: str) -> bool:
    """Whether UTF-8 can write the text; JSON may contain half of a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Seen:
    """A question in memory: its row, its place in the spool file, and the keys that must not repeat."""

    id: str
    path: Path
    row: int
    split: str
    hops: int
    text_key: bytes
    gold_keys: tuple[int, ...]
    hop_keys: tuple[int, ...]  # Of each sub-question with its answer; of the question itself where it has none.
    dataset: str
    counted: tuple[str, ...]
    position: int = 0

    @property
    def where(self) -> str:
        return f"{self.path}: row {self.row}"

    @property
    def is_train(self) -> bool:
        return self.split == "train"


@dataclass
class _Survey:
    """The checks between rows, and the counts of the manifest, gathered while the rows stream by.

    Call `passages` first and exhaust it: questions are checked against the ids it saw. If that leaves `repeated`
    filled, call and exhaust it once more.
    """

    conf: FolderConf
    rejected: _Rejected
    corpus: Path = Path()
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))  # sorted, one per passage
    repeated: frozenset[int] = frozenset()  # keys of ids that several rows have, the later ones to be left out
    corpus_datasets: Counter[str] = field(default_factory=Counter)
    kept: list[_Seen] = field(default_factory=list)
    answers_dropped: int = 0
    unscorable: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    texts: near.Texts = field(default_factory=near.Texts)  # Of questions that are written, not of generated ones.
    moves: Row | None = None  # From published splits to our own.
    renamed: Row | None = None  # Ids of several datasets, where questions were named apart.
    filled: dict[str, Filled] = field(default_factory=lambda: {"corpus": Filled(), "questions": Filled()})

    def passages(self, path: Path) -> Iterator[Passage]:
        """Stream the passages of `path`; a repeated id is an error after the last passage."""
        self.corpus, keys = path, array("Q")
        self.corpus_datasets.clear()
        first: dict[str, int] = {}
        self.filled["corpus"] = Filled()
        defaults = Defaults.of(path, PASSAGE, self.filled["corpus"], self.conf.max_row_bytes)
        for number, row in read_jsonl(path, self.rejected.of(path), self.conf.max_row_bytes):
            where = f"{path}: row {number}"
            try:
                passage = to_passage(defaults.passage(row, number), where)
                self._check_size(passage, where)
                key = key_of(passage.id)
                if key in self.repeated and first.setdefault(passage.id, number) != number:
                    raise _repeated(where, passage.id, f"row {first[passage.id]}")
            except DataError as error:
                self.rejected.add(path, number, error, row.get("id"))
                continue
            keys.append(key)
            self.corpus_datasets.update(passage.datasets)
            yield passage

        if not keys:
            raise DataError(f"{path}: no passage in it{self.rejected.told()}, expected at least one. Add the corpus.")

        self.keys = np.frombuffer(keys, np.uint64).copy()
        self.keys.sort()
        self.repeated = frozenset(self.keys[1:][self.keys[1:] == self.keys[:-1]].tolist()) - self.repeated
        if self.repeated and self.rejected.file is None:
            refuse_repeats(path, self.repeated)
            self.repeated = frozenset()  # No error was raised, so these are different ids with the same hash.

    def _check_size(self, passage: Passage, where: str) -> None:
        size = len(passage.title) + len(passage.text)
        if size > self.conf.max_passage_chars:
            raise DataError(
                f"{where}: field 'text': found {size:,} characters with the title, expected at most "
                f"{self.conf.max_passage_chars:,}. Split the passage, or raise max_passage_chars in "
                "conf/data/folder.yaml.",
                "too_long",
            )

    def read_questions(self, paths: Sequence[Path]) -> None:
        """Check questions that are not written again; they must be sorted by id."""
        seen = [_see(question, path, row) for question, path, row in self._questions(paths)]
        self._settle(seen, paths)
        assert self.kept == seen, "generated questions must come sorted by id"

    def write_questions(self, paths: Sequence[Path], target: Path) -> None:
        """Check the questions of `paths` and write them to `target`, sorted by id."""
        spool, seen = target.with_name(f".{target.name}.spool"), []
        with spool.open("w+b") as lines:
            for question, path, row in self._questions(paths):
                seen.append(_see(question, path, row, lines.tell()))
                self.texts.add(seen[-1].text_key, question)
                lines.write(dump(question_row(question)).encode() + b"\n")
            self._settle(self._named_apart(seen), paths)
            is_changed = self.moves is not None or self.renamed is not None
            with replacing(target) as file:
                for one in self.kept:
                    lines.seek(one.position)
                    line = lines.readline()
                    file.write(_changed(line, one) if is_changed else line)
        spool.unlink()

    def _named_apart(self, seen: list[_Seen]) -> list[_Seen]:
        """The questions, all called `<dataset>/<id>` if an id stands in several datasets.

        Which rows share an id is a fact of the whole folder, so the new names depend on no order of files and rows.
        """
        datasets: dict[str, set[str]] = {}
        for one in seen:
            datasets.setdefault(one.id, set()).add(one.dataset)
        repeated = sorted(name for name, found in datasets.items() if len(found) > 1)
        if not repeated:
            return seen
        self.renamed = {"repeated": len(repeated), "example": repeated[0]}
        return [replace(one, id=f"{one.dataset}/{one.id}") for one in seen]

    def _questions(self, paths: Iterable[Path]) -> Iterator[tuple[Question, Path, int]]:
        for path in paths:
            defaults = Defaults.of(path, QUESTION, self.filled["questions"], self.conf.max_row_bytes)
            for number, row in read_jsonl(path, self.rejected.of(path), self.conf.max_row_bytes):
                try:
                    row = defaults.question(row, number)
                    question = to_question(row, f"{path}: row {number}")
                    _check_references(question, f"{path}: row {number}")
                except UnscorableError as error:
                    if self.conf.unscorable == "error":
                        raise DataError(f"{error} Or set unscorable: drop in conf/data/folder.yaml.") from None
                    self.unscorable.append(row["id"])
                    continue
                except DataError as error:
                    self.rejected.add(path, number, error, row.get("id"))
                    continue
                self.answers_dropped += len(row["answers"]) - len(question.answers)
                yield self._linked(question, path, number), path, number

    def _linked(self, question: Question, path: Path, number: int) -> Question:
        """The question without passages that the corpus lacks; each of them is a fault."""
        support = [hop.support_passage_id for hop in question.decomposition if hop.support_passage_id is not None]
        lost: dict[str, set[str]] = {}
        for name, ids in (
            ("gold_passage_ids", question.gold_passage_ids),
            ("silver_passage_ids", question.silver_passage_ids),
            ("decomposition.support_passage_id", support),
        ):
            lost[name] = {passage_id for passage_id in ids if not self.has_passage(passage_id)}
            if lost[name]:
                found = next(passage_id for passage_id in ids if passage_id in lost[name])
                more = f" and {len(lost[name]) - 1} more" if len(lost[name]) > 1 else ""
                error = DataError(
                    f"{path}: row {number}: field {name!r}: found {found!r}{more}, expected the id of a passage in "
                    f"{self.corpus}. Add the passage or remove the id.",
                    "missing_passage",
                )
                self.rejected.add(path, number, error, question.id, "kept without the passage")
        return _without(question, **lost) if any(lost.values()) else question

    def has_passage(self, passage_id: str) -> bool:
        """Whether the corpus holds this id (up to a 64-bit hash collision)."""
        return contains(self.keys, key_of(passage_id))

    def _settle(self, seen: list[_Seen], paths: Sequence[Path]) -> None:
        """Set `kept`, sorted by id: `seen` without leaked train rows; raise for repeated ids and empty sides."""
        if self.conf.resplit is not None:
            self.kept = sorted(self._resplit(self._unrepeated(seen), self.conf.resplit, paths), key=lambda one: one.id)
            return

        evaluated = [one for one in seen if not one.is_train]
        trained = [one for one in seen if one.is_train]
        evaluated, trained = self._unrepeated(evaluated), self._unrepeated(trained)
        by_id = {one.id: one for one in evaluated}
        # Reversed, so that the first row with a text is kept.
        by_text = {one.text_key: one for one in reversed(evaluated)}
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
            left_out = f"{_dropped_as_leaked(self.leaked)}{self.rejected.told()}"
            folder = shlex.quote(str(self.rejected.folder))
            raise DataError(
                f"{files}: no train row{left_out}. Add questions with split train, or have all of them split anew: "
                f"DATA=resplit DATA_FOLDER={folder}."
            )
        if not evaluated:
            raise DataError(
                f"{files}: no dev or test row{self.rejected.told()}, so nothing can be evaluated. Add some, or write "
                "`split` into the rows: where it is missing it is drawn by a hash of the question, 8 to 1 to 1."
            )
        self.kept = sorted([*kept, *evaluated], key=lambda one: one.id)

    def _resplit(self, seen: list[_Seen], conf: Resplit, paths: Sequence[Path]) -> list[_Seen]:
        """The questions in splits of our own; `moves` counts where they come from."""
        rows = [((one.dataset, one.hops), one.text_key) for one in seen]
        splits = assign(rows, self.texts.pairs(), conf)
        for name in conf.shares:
            if name not in splits:
                files = ", ".join(map(str, paths))
                help = f"Add questions, or raise the share of {name}" if seen else "Add questions"
                raise DataError(
                    f"{files}: resplit={conf.shares}: found no {name} question among {len(seen):,}{self._left_out()}, "
                    f"expected one or more. {help}."
                )
        self.moves = moves((one.dataset, one.split, new) for one, new in zip(seen, splits, strict=True))
        return [replace(one, split=new) for one, new in zip(seen, splits, strict=True)]

    def _left_out(self) -> str:
        count = len(self.unscorable)
        more = f" ({count:,} more were left out, because none of their answers survives normalisation)" * bool(count)
        return more + self.rejected.told()

    def _unrepeated(self, side: list[_Seen]) -> list[_Seen]:
        """The questions of one side without those that repeat an id; each of them is a fault."""
        first: dict[str, _Seen] = {}
        for one in side:
            other = first.setdefault(one.id, one)
            if other is not one:
                self.rejected.add(one.path, one.row, _repeated(one.where, one.id, other.where), one.id)
        return list(first.values())


def _check_references(question: Question, where: str) -> None:
    """`#k` is the answer of the k-th sub-question, which must come before it: none can search for its own answer."""
    for number, hop in enumerate(question.decomposition, start=1):
        for text in (hop.question, *hop.queries):
            odd = next((int(k) for k in REFERENCE.findall(text) if not 1 <= int(k) < number), None)
            if odd is not None:
                known = f"at most #{number - 1}" if number > 1 else "no #k"
                expected = (
                    f"{known}, for #{odd} is the answer of sub-question {odd}; write 'number {odd}' if you mean that"
                )
                raise wrong_field(where, f"decomposition[{number - 1}]", text, expected)


def _changed(line: bytes, one: _Seen) -> bytes:
    return dump({**json.loads(line), "id": one.id, "split": one.split}).encode() + b"\n"


def _without(question: Question, **lost: set[str]) -> Question:
    """The question without the lost ids of each field; it is no longer `gold_complete` if a support is lost."""
    support = lost["decomposition.support_passage_id"]
    gold = tuple(one for one in question.gold_passage_ids if one not in lost["gold_passage_ids"])
    hops = (
        replace(h, support_passage_id=None) if h.support_passage_id in support else h for h in question.decomposition
    )
    return replace(
        question,
        gold_passage_ids=gold,
        gold_method=question.gold_method if gold else "none",
        gold_complete=question.gold_complete and not lost["gold_passage_ids"] and not support,
        silver_passage_ids=tuple(one for one in question.silver_passage_ids if one not in lost["silver_passage_ids"]),
        decomposition=tuple(hops),
    )


def _see(question: Question, path: Path, row: int, position: int = 0) -> _Seen:
    return _Seen(
        id=question.id,
        path=path,
        row=row,
        split=question.split,
        hops=question.hops,
        text_key=hashlib.blake2b(normalize(question.question).encode(), digest_size=16).digest(),
        gold_keys=tuple(map(key_of, question.gold_passage_ids)),
        hop_keys=tuple(key_of(f"{normalize(hop.question)}\n{normalize(hop.answer)}") for hop in hops_of(question)),
        dataset=question.dataset,
        counted=_counted(question),
        position=position,
    )


def _counted(question: Question) -> tuple[str, ...]:
    """The counters of the manifest that a question increases by one in any split; `a.b` is counter b of group a."""
    flags = {
        "with_gold": question.gold_passage_ids,
        "with_silver": question.silver_passage_ids,
        "with_decomposition": question.decomposition,
    }
    always = ("rows", f"hops.{question.hops}", f"gold_method.{question.gold_method}")
    complete = ("gold_complete",) if question.gold_complete else ()
    return (*always, *complete, *(name for name, value in flags.items() if value))


def key_of(name: str) -> int:
    """64 bits of an id's hash, which stand for the id in memory."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def contains(keys: np.ndarray, key: int) -> bool:
    """Whether sorted `keys` [N] uint64 holds `key`."""
    at = int(np.searchsorted(keys, np.uint64(key)))
    return at < len(keys) and int(keys[at]) == key


def _repeated(where: str, name: str, first: str) -> DataError:
    return DataError(
        f"{where}: field 'id': found {name!r} again, first in {first}; expected unique ids. "
        "Remove or rename one of the rows.",
        "duplicate_id",
    )


def refuse_repeats(path: Path, suspects: Collection[int]) -> None:
    """Read a corpus again, comparing the ids themselves: two ids may share a hash, and the message needs both rows.

    Raises:
        DataError: two rows have one id.
    """
    first: dict[str, int] = {}
    for number, row in read_jsonl(path):
        if "id" not in row:
            continue
        name = spelled(row["id"])
        if key_of(name) in suspects and first.setdefault(name, number) != number:
            raise _repeated(f"{path}: row {number}", name, f"row {first[name]}")


def _leak_message(train: _Seen, other: _Seen) -> str:
    same = "id" if train.id == other.id else "question"
    return (
        f"{train.where}: field {same!r}: train question {train.id!r} is also an evaluation question: "
        f"{other.id!r} in {other.where}. Remove one of the rows, or set leakage: drop_train in conf/data/folder.yaml "
        f"to leave such train rows out."
    )


def _dropped_as_leaked(leaked: list[str]) -> str:
    return f" is left after {len(leaked)} that repeat evaluation questions were dropped" if leaked else ""


def _verify_declared(folder: Path, paths: list[Path], rejected: _Rejected) -> None:
    """Compare the uncompressed files with the sha256 in the folder's own manifest.json."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return
    declared = _declared(read_json(manifest))
    torn = {tail["file"] for tail in rejected.lost_tails}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        expected = declared.get(name.removesuffix(".gz"))
        if expected is None or name in torn:  # A damaged file is already reported, and cannot be uncompressed.
            continue
        found = _sha256_unpacked(path)
        if expected != found:
            message = (
                f"{path}: the unpacked file has sha256 {found}, but {manifest} declares {expected}. The file was "
                f"changed or damaged: copy it again, or correct the manifest."
            )
            rejected.add(path, None, DataError(message, "other_checksum"), outcome="the file was read as it is")


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
    """Write the manifest into the folder of the finished files; it contains no path, time or machine."""
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
        "faulty_rows": {
            "policy": survey.conf.faulty_rows,
            "max_passage_chars": survey.conf.max_passage_chars,
            "by_reason": dict(survey.rejected.counts),
            "lost_tails": survey.rejected.lost_tails,
        },
    }
    if kind == "folder":  # Questions of a generator share their templates.
        manifest["near_duplicates"] = _near_duplicates(survey)
        manifest["sub_questions"] = _shared_hops(survey.kept)
    if survey.moves is not None and survey.conf.resplit is not None:
        manifest["resplit"] = {"shares": survey.conf.resplit.shares, "published": survey.moves}
    if survey.renamed is not None:
        manifest["renamed_ids"] = survey.renamed
    # Rows that say everything, in our spelling, have the manifest that they always had.
    if any(filled.counts for filled in survey.filled.values()):
        manifest["filled_in"] = {name: dict(sorted(one.counts.items())) for name, one in survey.filled.items()}
    if any(filled.respelled for filled in survey.filled.values()):
        manifest["respelled"] = {name: filled.respelled for name, filled in survey.filled.items()}
    write_json(work / MANIFEST, manifest)
    return manifest


def _near_duplicates(survey: _Survey) -> Row:
    rows: dict[bytes, list[tuple[str, str]]] = {}
    for one in survey.kept:
        rows.setdefault(one.text_key, []).append((one.id, one.split))
    found = near.counted(survey.texts.pairs(), rows)
    return {**found, "comparisons_left_out": survey.texts.num_left_out}


def _shared_hops(kept: Sequence[_Seen]) -> Row:
    """Evaluation questions with a decomposition, and how many of them share sub-questions, with answers, with training.

    A train question without a decomposition is its own sub-question.
    """
    trained = {key for one in kept if one.is_train for key in one.hop_keys}
    evaluated = [one.hop_keys for one in kept if not one.is_train and "with_decomposition" in one.counted]
    return {
        "evaluation_rows": len(evaluated),
        "last_in_training": sum(keys[-1] in trained for keys in evaluated),
        "all_in_training": sum(trained.issuperset(keys) for keys in evaluated),
    }


def _by_dataset(kept: list[_Seen]) -> dict[str, Row]:
    """Counts per dataset: rows, gold_complete, with_..., and per split, hop count and gold method."""
    counts: dict[str, Counter[str]] = {}
    for one in kept:
        by_split = ["splits", "gold_complete_splits"] if "gold_complete" in one.counted else ["splits"]
        names = (*one.counted, *(f"{name}.{one.split}" for name in by_split))
        counts.setdefault(one.dataset, Counter()).update(names)
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
