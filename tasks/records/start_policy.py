"""What is recorded of start policies.

`format.json` says what a pretrained model was taught the format of a search agent with, `words.json` how much of the
data a policy of random weights has words for.
"""

from __future__ import annotations

from tasks.records.schema import Count, Share, row

FILE, WORDS = "format.json", "words.json"
KNOWN_WELL = 0.95
"""Share of known words from which on a policy reads what it is given."""


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


@row
class KnownWords:
    """The share of running words that are one token of a tiny policy, in the questions and in the first passages."""

    questions: Share
    passages: Share

    def sentence(self) -> str:
        """For people, with what can read the other words.

        >>> KnownWords(questions=0.634, passages=0.5).sentence()[:74]
        'The tiny policy knows 0.63 of the words in the questions and 0.50 of those'
        """
        told = (
            f"The tiny policy knows {self.questions:.2f} of the words in the questions and {self.passages:.2f} of "
            "those in the passages"
        )
        if min(self.questions, self.passages) >= KNOWN_WELL:
            return f"{told}."
        return (
            f"{told}; it reads the others in pieces and will hardly answer with them. A model that reads "
            "them all: MODEL=smollm2-135m SCALE=small (docs/model.md)."
        )
