"""What the manifest of the data says that a reader of a number must know, in sentences. Reads no files.

A default or a repair that changes what a number means has its sentence here; the stage `data` prints it and the report
shows it.
"""

from __future__ import annotations

from typing import Any

from tasks.data.resplit import NOTE
from tasks.store import Row


def is_resplit(manifest: Any) -> bool:
    """Whether `conf/data` gave every question a split of our own."""
    return isinstance(manifest, dict) and "resplit" in manifest


def own_split(manifest: Any) -> list[str]:
    """A sentence where the split of questions is ours; nothing where all rows name theirs.

    >>> own_split({"filled_in": {"questions": {"split": 3}}, "files": {"questions.jsonl": {"rows": 5}}})[0][:51]
    '3 of 5 questions name no split; theirs is our own: '
    """
    if is_resplit(manifest):
        return [NOTE]
    count = _filled(manifest, "split")
    if not count:
        return []
    rows = manifest["files"]["questions.jsonl"]["rows"]
    whose = "No row of the questions names a split; it is our own"
    if count < rows:
        whose = f"{count:,} of {rows:,} questions name no split; theirs is our own"
    return [
        f"{whose}: train, dev and test, 8 to 1 to 1, drawn by a hash of the question. Not comparable with papers; "
        "write `split` into the rows to have another."
    ]


def notes(manifest: Any) -> list[str]:
    """What one must know of the questions before any number that is measured on them, a sentence each.

    >>> notes({"resplit": {}, "near_duplicates": {"train_rows_near_evaluation": 0}})
    ['Our own split of published rows; not comparable with papers.']
    """
    found = manifest.get("near_duplicates", {}) if isinstance(manifest, dict) else {}
    count = found.get("train_rows_near_evaluation", 0)
    close = f"Train questions that are near-duplicates of evaluation questions: {count:,}."
    return [*own_split(manifest), *[close] * bool(count), *shared_hops(manifest), *defaults(manifest)]


def defaults(manifest: Any) -> list[str]:
    """What rows of own data did not say and a number depends on, or what of them was changed or left out."""
    if not isinstance(manifest, dict) or manifest.get("kind") != "folder":
        return []
    lines = []
    if renamed := manifest.get("renamed_ids"):
        lines.append(
            f"{renamed['repeated']:,} ids, such as {renamed['example']!r}, stand in more than one dataset: every "
            "question is called <dataset>/<its id>."
        )
    if count := _filled(manifest, "hops"):
        lines.append(f"{count:,} questions say neither `hops` nor `decomposition` and count as questions of one hop.")

    rows = manifest["files"]["questions.jsonl"]["rows"]
    with_gold = sum(one["with_gold"] for one in manifest["questions"].values())
    if rows and not with_gold:
        lines.append("No question names gold passages, so gold recall is not measured.")
    elif with_gold < rows:
        lines.append(f"{with_gold:,} of {rows:,} questions name gold passages; gold recall is measured on these alone.")
    if count := manifest["leakage"]["repeated_question_texts"]:
        lines.append(f"{count:,} questions repeat the text of another one.")
    if count := manifest["leakage"]["gold_passages_of_train_and_evaluation"]:
        lines.append(f"{count:,} passages are gold for both a train and an evaluation question.")
    return [*lines, *_left_out(manifest), *_respelled(manifest)]


def _left_out(manifest: Row) -> list[str]:
    parts = {
        "train questions that repeat evaluation questions": len(manifest["leakage"]["train_rows_dropped"]),
        "questions whose answers normalise to nothing": len(manifest["unscorable"]["rows_dropped"]),
        "answers that do": manifest["unscorable"]["aliases_dropped"],
    }
    if parts["answers that do"] and not parts["questions whose answers normalise to nothing"]:
        parts["answers that normalise to nothing"] = parts.pop("answers that do")
    said = [f"{count:,} {what}" for what, count in parts.items() if count]
    return [f"Left out: {', '.join(said)}."] if said else []


def _respelled(manifest: Row) -> list[str]:
    counts = manifest.get("respelled", {})
    said = [f"{count:,} {'passages' if name == 'corpus' else name}" for name, count in counts.items() if count]
    return [f"Brought into one spelling (composed letters, line ends): {' and '.join(said)}."] if said else []


def _filled(manifest: Any, name: str) -> int:
    filled = manifest.get("filled_in", {}) if isinstance(manifest, dict) else {}
    return int(filled.get("questions", {}).get(name, 0))


def shared_hops(manifest: Any) -> list[str]:
    """A sentence on sub-questions that training and evaluation share; nothing where they share none.

    >>> shared_hops({"sub_questions": {"evaluation_rows": 9, "last_in_training": 4, "all_in_training": 1}})
    ['Of 9 evaluation questions with sub-questions, 4 have their last one, with its answer, in training, and 1 all.']
    """
    found = manifest.get("sub_questions", {}) if isinstance(manifest, dict) else {}
    if not (last := found.get("last_in_training", 0)):
        return []
    return [
        f"Of {found['evaluation_rows']:,} evaluation questions with sub-questions, {last:,} have their last one, with "
        f"its answer, in training, and {found['all_in_training']:,} all."
    ]


def fault_lines(manifest: Any) -> list[str]:
    """What a manifest says of faulty rows, for people: nothing where there were none.

    >>> fault_lines({"faulty_rows": {"by_reason": {"not_utf8": 2}, "lost_tails": [{"file": "a.gz", "from_row": 7}]}})
    ['faulty rows: 2 (2 not_utf8)', 'damaged: a.gz, row 7 and all after it are lost']
    """
    faults = manifest.get("faulty_rows", {}) if isinstance(manifest, dict) else {}
    counts: Row = faults.get("by_reason", {})
    parts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
    lines = [f"faulty rows: {sum(counts.values()):,} ({parts})"] if counts else []
    tails = faults.get("lost_tails", [])
    return lines + [f"damaged: {tail['file']}, row {tail['from_row']} and all after it are lost" for tail in tails]
