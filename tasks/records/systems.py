"""`system.json` describes one system with one seed, trained or not."""

from __future__ import annotations

from pathlib import Path

from tasks.records import schema
from tasks.records.schema import Count, row
from tasks.store import DataError, read_json, write_json
from tasks.types import Flag, Text

FILE = "system.json"


@row
class SystemRecord:
    """One system and seed, in `artifacts/train/<name>-<seed>/`.

    Attributes:
        name, seed: of the system.
        kind: file of `tasks/systems/` that plays it.
        policy: folder of the weights below the root of the clone, null if a system has no weights.
        policy_sha256: hash of the weights, or of the settings if there are no weights.
        made_by: the stage that made the weights, such as `base@0`.
        is_trained: whether this folder also has the summary, metrics and trajectories of a training.
        index_sha256, corpus_sha256: hash of the manifest of the index that the policy was taught with, and of the
            passages in it; null if it was taught with none here.
    """

    name: Text
    seed: Count
    kind: Text
    policy: Text | None
    policy_sha256: Text
    made_by: Text
    is_trained: Flag
    index_sha256: Text | None = None
    corpus_sha256: Text | None = None


def read(folder: Path) -> SystemRecord:
    """The system that a folder of `artifacts/train/` describes.

    Raises:
        DataError: the file is missing or malformed, or describes another system than the folder's name.
    """
    path = folder / FILE
    record = schema.parse(SystemRecord, read_json(path), str(path))
    if folder.name != f"{record.name}-{record.seed}":
        raise DataError(f"{path}: found {record.name}-{record.seed}, expected {folder.name}: run `train` again.")
    return record


def write(folder: Path, record: SystemRecord) -> None:
    """Write the description into its folder."""
    write_json(folder / FILE, schema.plain(record))
