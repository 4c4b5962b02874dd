"""Answers of a model that reads, kept on the disk: equal pairs are read once, also by a run that was resumed.

A batch is stored as one line before any of its answers is used. So a resumed run reads the rest in the batches of the
run that was killed, and its answers are the same to the last bit.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tasks.reader.reading import Pair, Reading
from tasks.records.usage import Usage
from tasks.services import ServiceError
from tasks.store import DataError, digest


class KeptAnswers:
    """See `tasks.services.Reader`.

    Attributes:
        num_asked, num_cached: pairs that the model read, and pairs whose answer was known.
        usage: pairs are its calls, and tokens those of their prompts.
    """

    def __init__(self, reading: Reading, identity: str, path: Path) -> None:
        """Keep answers in a file.

        Args:
            reading: the model.
            identity: hash of the model; answers of another one are not used.
            path: the file, which is made where it is missing.
        """
        self.reading, self.path = reading, path
        self.num_asked = self.num_cached = 0
        self.usage = Usage()
        self._lengths: dict[Pair, int] = {}
        self._identity = digest(identity, reading.habits.prompt, reading.habits.max_new_tokens, reading.window)
        self._known: dict[str, str] = {}
        self._read()

    def answers(self, pairs: Sequence[Pair]) -> list[str]:
        """See `Reader`.

        Raises:
            ServiceError: the model cannot read a pair.
        """
        missing = list(dict.fromkeys(pair for pair in pairs if self._key(pair) not in self._known))
        self.num_asked += len(missing)
        self.num_cached += len(pairs) - len(missing)
        try:
            with self.usage.waiting():
                for chunk, replies in self.reading.batches(missing):
                    self._keep({self._key(pair): reply for pair, reply in zip(chunk, replies, strict=True)})
            # Of every pair, so that a resumed run, which finds answers on the disk, counts the same.
            tokens = sum(map(self._length, pairs))
        except DataError as error:
            raise ServiceError(f"services: reader: {error}") from error
        self.usage.add(Usage(len(pairs), tokens, hits=len(pairs) - len(missing)))
        return [self._known[self._key(pair)] for pair in pairs]

    def _length(self, pair: Pair) -> int:
        if pair not in self._lengths:
            self._lengths[pair] = len(self.reading.prompt_ids(*pair))
        return self._lengths[pair]

    def _key(self, pair: Pair) -> str:
        return digest(self._identity, *pair)

    def _keep(self, answers: dict[str, str]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(answers).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._known.update(answers)

    def _read(self) -> None:
        """The answers of whole lines; the rest of a line that a kill has cut off is removed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.is_file():
            return
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            os.truncate(self.path, end)
        for line in whole[:end].splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # What a damaged line held is asked again.
                known = json.loads(line)
                if isinstance(known, dict) and all(isinstance(answer, str) for answer in known.values()):
                    self._known.update(known)
