"""`format.json` says what a pretrained model was taught the format of a search agent with."""

from __future__ import annotations

from tasks.records.schema import Count, row

FILE = "format.json"


@row
class FormatRecord:
    """The supervised training of one start policy, in `artifacts/base/<seed>/`.

    Attributes:
        num_weights: of the model.
        plans: training questions whose plan was searched.
        demonstrations: plans that brought back what they looked for.
        trained: demonstrations that training read, repetitions counted.
        tokens: of these, prompts and observations included.
        written_tokens: of these, the ones a policy would write, which carry the loss.
    """

    num_weights: Count
    plans: Count
    demonstrations: Count
    trained: Count
    tokens: Count
    written_tokens: Count
