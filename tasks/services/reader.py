"""A frozen model in this process that answers from evidence, and was trained for that by the stage `reader`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PositiveInt

from tasks.reader.reading import open_folder
from tasks.services import Resources, Role, ServiceError
from tasks.services.read_answers import KeptAnswers


@dataclass(frozen=True)
class TrainedReader:
    """A model of `conf/reader/`; its prompt is the one that it was trained with.

    Attributes:
        model: file of `conf/reader/`.
        batch: pairs that are read at once.
    """

    role: ClassVar[Role] = "reader"
    needs_reference: ClassVar[bool] = False

    model: str
    batch: PositiveInt

    @contextlib.contextmanager
    def opened(self, resources: Resources) -> Iterator[KeptAnswers]:
        """Load the model of this run and seed.

        Raises:
            DataError: another model stands in its folder than the one that was planned for.
        """
        if self.model not in resources.models:
            raise ServiceError(
                f"services: reader: model={self.model!r}: this run has trained {sorted(resources.models)}. Add it to "
                "`readers` in params.yaml."
            )
        trained = resources.models[self.model]
        reading = open_folder(trained.checked(resources.root), None, None, self.batch, "float32")
        yield KeptAnswers(reading, trained.sha256, resources.scratch / "reader.jsonl")


PART = TrainedReader
