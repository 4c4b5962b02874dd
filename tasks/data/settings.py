"""The settings of `conf/data/<name>.yaml`: where the data comes from and which splits serve what. Reads no data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.conf import require
from tasks.data.ingest import FolderConf
from tasks.data.world import WorldConf


@dataclass(frozen=True)
class DataConf:
    """One file of `conf/data/`; the section named like `kind` must be there, the other one not.

    Attributes:
        kind: `world` generates the data, `folder` reads it from the folder that `params.yaml` names.
        validation_split: measured during training.
        evaluate_splits: for the result table the first of these that a dataset has is played.
        world: settings of the generator.
        folder: what to do with rows that cannot be used as they are.
    """

    kind: Literal["world", "folder"]
    validation_split: Literal["dev", "test"]
    evaluate_splits: tuple[str, ...]
    world: WorldConf | None = None
    folder: FolderConf | None = None

    def __post_init__(self) -> None:
        splits = self.evaluate_splits
        require(bool(splits) and set(splits) <= {"dev", "test"}, "evaluate_splits", list(splits), "dev and/or test")
        for kind, found in (("world", self.world), ("folder", self.folder)):
            wanted = kind == self.kind
            expected = f"{'the' if wanted else 'no'} section {kind!r}, because kind is {self.kind!r}"
            require((found is not None) == wanted, kind, found, expected)
        if self.folder is not None and self.folder.resplit is not None:
            shares = self.folder.resplit.shares
            missing = [name for name in ("train", self.validation_split, *splits) if name not in shares]
            uses = "training, validation_split and evaluate_splits need it"
            require(
                not missing, "folder: resplit", shares, f"a share for {' and '.join(dict.fromkeys(missing))}: {uses}"
            )
