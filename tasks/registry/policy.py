"""A registered policy as MLflow loads it: the script that `mlflow.pyfunc.load_model` runs; no pickle is read.

`predict` takes a frame with the column `question` and gives `answer` and `searches`, what was searched for, in order.
The index of the search is that of the model, or the folder `index` of `model_config`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel

from tasks import conf, retrieval
from tasks.data.records import read_questions
from tasks.evaluate.play import Evaluation, evaluate
from tasks.model_files import require_weights
from tasks.registry import card as cards
from tasks.stages.evaluate import Settings, loads
from tasks.systems import Resources
from tasks.types import Question


class RegisteredPolicy(PythonModel):
    """A policy at play.

    Attributes:
        card: what is known of it.
        questions: those that it was measured with.
    """

    def load_context(self, context: Any) -> None:
        """Open weights and index; they stay open as long as this object lives."""
        files = {name: Path(path) for name, path in context.artifacts.items()}
        self.card = cards.read(files["card"])
        self.questions = list(read_questions(files["questions"]))
        settings = conf.fill(Settings, self.card.settings, "card.json: settings")
        loaded = loads(settings)
        chosen = (context.model_config or {}).get("index") or files.get("index")
        if chosen is None:
            raise ValueError(
                "this model has no index of its own, because that was too large. Name the folder: "
                "mlflow.pyfunc.load_model(..., model_config={'index': 'artifacts/index'})"
            )

        require_weights(files["policy"], self.card.policy_sha256)
        resources = Resources(
            policy=files["policy"],
            retriever=retrieval.open_retriever(Path(chosen)),
            top_k=settings.top_k,
            start_generator=lambda folder: loaded.generator.start(folder, settings.dtype),
            services={},
        )
        self._open = contextlib.ExitStack()
        self.system = self._open.enter_context(loaded.system.kind.opened(resources))

    # Without types: MLflow would take them for the signature, which it is given.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Answer and searches of every question, greedily played."""
        texts = [str(text) for text in model_input["question"]]
        asked = [Question(f"asked-{i}", "asked", "test", text, ("-",), 1) for i, text in enumerate(texts)]
        rows = []
        for first in range(0, len(asked), self.system.batch_questions):
            for episode in self.system.play(asked[first : first + self.system.batch_questions], "greedy", 0):
                searched = [query for turn in episode.turns if turn.executed for query in turn.action.searches]
                rows.append({"answer": episode.answer or "", "searches": searched})
        return pd.DataFrame(rows, columns=["answer", "searches"])

    def measure(self, questions: Sequence[Question]) -> Evaluation:
        """Play and score these questions greedily, as the stage `evaluate` does.

        Raises:
            RetrievalError: a search failed.
        """
        with tempfile.TemporaryDirectory() as scratch:
            return evaluate(self.system, questions, False, self.card.system, self.card.seed, 1, Path(scratch))


mlflow.models.set_model(RegisteredPolicy())
