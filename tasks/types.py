"""The nouns every room shares, as frozen dataclasses.

Nothing here computes: a record is what was read, retrieved, generated or scored. The types of a question, a hop and a
passage are also the schema of their rows (`tasks/records/schema.py` checks them where a file is read). An episode is
the record of a played question, whoever played it; a trajectory is an episode whose tokens are known. Token ids are
the truth about a trajectory; every text field is a decoded view of them.
"""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, Strict, with_config

Split = Literal["train", "dev", "test"]
ActionKind = Literal["search", "answer", "invalid"]
Status = Literal["answered", "open", "overflow", "failed"]
Mode = Literal["greedy", "sampled"]
MAX_HOPS = 4
ALL = "all"
"""In a result table the name of all datasets, hops or seeds together; no dataset may have it."""

AnyText = Annotated[str, Field(min_length=0)]  # A bound, even this one, makes pydantic look at the characters.
"""Text of Unicode characters: no half of a surrogate pair."""
Text = Annotated[str, Field(pattern=r"[^\s\x1c-\x1f]")]
"""Text that is not blank."""
Flag = Annotated[bool, Strict()]
Hops = Annotated[int, Strict(), Field(ge=1, le=MAX_HOPS)]


def require_dataset_name(name: str) -> str:
    """The name, which a terminal shows as it is, a spreadsheet takes for text, and nobody takes for all datasets.

    Raises:
        ValueError: it is none; says what is expected.
    """
    looks_like = unicodedata.normalize("NFKC", name).casefold()  # Letters of full width look like others.
    if not (name.isprintable() and name[:1].isalnum() and name == name.strip() and looks_like.strip() != ALL):
        raise ValueError(f"a printable name that begins with a letter or digit, ends in no blank and is not {ALL!r}")
    return name


DatasetName = Annotated[Text, AfterValidator(require_dataset_name)]

_only_these_fields = with_config(ConfigDict(extra="forbid"))


@_only_these_fields
@dataclass(frozen=True)
class Hop:
    """One step of a question's decomposition; `#1`, `#2` in `question` and `queries` stand for earlier answers."""

    question: Text
    answer: Text
    support_passage_id: Text | None = None
    queries: tuple[Text, ...] = ()


@_only_these_fields
@dataclass(frozen=True)
class Question:
    """One row of `questions.jsonl`; `answers[0]` is the main answer, the rest are aliases.

    `gold_passages` are the passages of `gold_passage_ids` that the corpus has, in that order. Only the stage `inputs`
    fills them, for methods whose rewards read them.
    """

    id: Text
    dataset: DatasetName
    split: Split
    question: Text
    answers: Annotated[tuple[Text, ...], Field(min_length=1)]
    hops: Hops
    type: Text | None = None
    decomposition: tuple[Hop, ...] = ()
    gold_passage_ids: tuple[Text, ...] = ()
    gold_method: Literal["annotated", "derived", "none"] = "none"
    gold_complete: Flag = False
    silver_passage_ids: tuple[Text, ...] = ()
    source: AnyText = ""
    gold_passages: tuple[Passage, ...] = ()


@_only_these_fields
@dataclass(frozen=True)
class Passage:
    """One row of `corpus.jsonl`."""

    id: Text
    title: AnyText
    text: Text
    datasets: tuple[DatasetName, ...] = ()


@dataclass(frozen=True)
class Hit:
    """One retrieved passage; a higher `score` is better, scales differ between retrievers."""

    passage_id: str
    score: float
    title: str
    text: str


@dataclass(frozen=True)
class Action:
    """What one call of the policy asked for; `content` is the stripped text inside the tag pair.

    `queries` holds those of a call that may ask several; `note` is what the environment has to say about the call.
    """

    kind: ActionKind
    content: str = ""
    queries: tuple[str, ...] = ()
    note: str = ""

    @property
    def searches(self) -> tuple[str, ...]:
        """The queries of a search, none of anything else."""
        return (self.queries or (self.content,)) if self.kind == "search" else ()


@dataclass(frozen=True)
class Turn:
    """One call of a model and the observation it caused.

    Positions are indices into `Trajectory.response_ids`: the policy wrote `[start, end)`, the
    environment appended `[end, observation_end)`. The token that completes the action's closing tag is
    `end - 1`; rewards of this turn land there. All three are 0 in an episode without tokens. `text` and
    `observation` are decoded views. `hits` are what the retriever returned, query by query; observations may show
    less of them.
    """

    action: Action
    start: int = 0
    end: int = 0
    observation_end: int = 0
    text: str = ""
    observation: str = ""
    executed: bool = False
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True)
class Cost:
    """Tokens that playing a question took: written by the model, and read by it (prompts and observations)."""

    generated_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True)
class Episode:
    """The record of one played question.

    Attributes:
        question_id: the question.
        turns: in order.
        status: `answered`, `open` (out of turns), `overflow` (out of tokens) or `failed` (a search failed).
        answer: None without one.
        error: why a failed episode failed.
        cost: tokens read and written; zero where a system does not count them.
    """

    question_id: str
    turns: tuple[Turn, ...]
    status: Status
    answer: str | None = None
    error: str | None = None
    cost: Cost = Cost()

    @property
    def num_searches(self) -> int:
        """Searches that were executed."""
        return sum(turn.executed for turn in self.turns)

    @property
    def response_text(self) -> str:
        """All turns as text, with the observations between them."""
        return "".join(turn.text + turn.observation for turn in self.turns)


@dataclass(frozen=True)
class Tokens:
    """The tokens of one played question.

    `response_ids`, `loss_mask` and `sampler_logprobs` have one entry per token after the prompt;
    `loss_mask` is True on tokens the policy wrote, `sampler_logprobs` is 0.0 elsewhere.
    """

    question_id: str
    group_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    sampler_logprobs: tuple[float, ...]

    @property
    def num_generated(self) -> int:
        """Tokens the policy wrote."""
        return sum(self.loss_mask)

    @property
    def last_generated(self) -> int:
        """Index of the last token the policy wrote, -1 if it wrote none; outcome rewards land there."""
        return max((i for i, own in enumerate(self.loss_mask) if own), default=-1)


@dataclass(frozen=True)
class Trajectory(Episode, Tokens):
    """An episode with its tokens, which also give its cost. Fields come in the order of `Tokens`, then `Episode`."""

    cost: Cost = field(init=False, default=Cost())

    def __post_init__(self) -> None:
        read = len(self.prompt_ids) + len(self.response_ids) - self.num_generated
        object.__setattr__(self, "cost", Cost(self.num_generated, read))


@dataclass(frozen=True)
class Sample:
    """What is trained: tokens that follow a context.

    A trajectory of independent play is one sample. A candidate for the next turn is one, too: the turns before it are
    its context, whoever wrote them.

    Attributes:
        question_id: the question that was played.
        group_id: samples of one group are compared with each other.
        prefix_ids: context, which is read and never trained.
        ids: the tokens after it.
        trained: one entry per token of `ids`, True on those that are trained; never True on one the policy did not
            write.
        sampler_logprobs: one entry per token of `ids`, 0.0 where `trained` is False.
        weight: factor of this sample's part of the loss.
    """

    question_id: str
    group_id: str
    prefix_ids: tuple[int, ...]
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    sampler_logprobs: tuple[float, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Note:
    """What a part wants a reader to see beside a turn, such as a judge's score with its reason.

    Notes are recorded and shown. Nothing that trains reads them.

    Attributes:
        turn: index in the trajectory's `turns`; -1 is the question, before the first turn.
        name: what the note is about, such as `f`; the values of one name are drawn as a curve over the turns.
        value: a finite number, None without one.
        text: a reason, an answer, or an action.
        taken: whether an action that was drawn here was taken; None for a note that is about no such choice.
    """

    turn: int
    name: str
    value: float | None
    text: str = ""
    taken: bool | None = None

    def __post_init__(self) -> None:
        if self.turn < -1 or not self.name.strip() or not (self.value is None or math.isfinite(self.value)):
            raise ValueError(
                f"note {self.name!r} of turn {self.turn}: found value {self.value!r}, expected a name, a turn of -1 or "
                "more and a finite number or None. Mend the part that made the note."
            )


@dataclass(frozen=True)
class Scores:
    """Rewards of one trajectory or sample.

    Attributes:
        outcome: the reward of the whole, without the rewards of single turns.
        placed: (index, value) pairs; values at one index add up. An index counts the tokens of a trajectory's
            `response_ids`, or of a sample's `ids`.
        components: what the reward was computed from, by name, such as `em`; metrics and filters read them.
        notes: for readers of the report; see `Note`.
    """

    outcome: float
    placed: tuple[tuple[int, float], ...]
    components: dict[str, float] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
