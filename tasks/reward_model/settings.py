"""The settings of `conf/reward_model/<name>.yaml`. Loads no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tasks.conf import LearningRate, Share, require
from tasks.model import Dtype
from tasks.services import Head


@dataclass(frozen=True)
class LossConf:
    """The loss of a reward model.

    Attributes:
        head: `success` has PiCA's losses, `hazard` those of its release.
        gold_weight: lambda_g, weight of the loss over pivots.
        gold_form: `gain` is -log g(t); `reward` is -log(1 + g(t)), which asks for no gain above 0.
        margin: below this gain -log g is continued by its tangent, because log g is undefined for g <= 0.
        cap: a gain above this earns nothing more; otherwise driving f(t-1) to 0 would pay without bound.
        clamp: f(t-1) counts as this at least, so that a gain stays finite.
    """

    head: Head = "success"
    gold_weight: NonNegativeFloat = 0.5
    gold_form: Literal["gain", "reward"] = "gain"
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.05
    cap: Annotated[float, Field(ge=1, le=1e6)] = 10.0
    clamp: Annotated[float, Field(gt=0, lt=0.5)] = 1e-4


@dataclass(frozen=True)
class FitConf:
    """How a reward model is trained.

    Attributes:
        batch: trajectories of an update.
        max_tokens: a longer trajectory is not trained on, and of a longer one only the turns within it are scored.
        max_pack_tokens: trajectories are packed into rows of so many tokens; one that is longer has a row of its own.
        lr, warmup_share, floor: peak learning rate, share of all updates in which it rises, and share of it at which
            the cosine ends.
        weight_decay, max_grad_norm: of the optimizer.
        max_epochs: passes over the trajectories at most.
        validate_every, patience: updates between two looks at the validation loss, and how many looks without a smaller
            one end the training.
        control_steps: updates of two more models, by which the figures are judged: one learns from shuffled labels, one
            from texts without words. 0 trains neither.
        dtype, keep_activations, num_threads: of forward passes, as in training a policy.
    """

    batch: PositiveInt
    max_tokens: PositiveInt
    max_pack_tokens: PositiveInt
    lr: LearningRate
    max_epochs: PositiveInt
    validate_every: PositiveInt
    patience: PositiveInt
    control_steps: Annotated[int, Field(ge=0)]
    warmup_share: Share = 0.03
    floor: Share = 0.1
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    dtype: Dtype = "auto"
    keep_activations: bool = True
    num_threads: PositiveInt = 1


@dataclass(frozen=True)
class RewardModelConf:
    """One file of `conf/reward_model/`.

    Attributes:
        player: who plays the training questions: a file of `conf/system/`, such as the start policy or a chat model.
        num_questions, copies: augmented training questions, and how often each is played.
        held_out: share of the questions that is kept for the figures; as many again stop the training.
        max_failed_share: largest share of plays that may fail in search; more end the stage.
        labeller: the file of `conf/service/` that says which turns are pivots.
        backbone: folder of the model that training starts from; null takes the start policy of the same seed.
        placeholder: a token of that model, at which f(t) is read.
        num_samples: labelled trajectories that the report shows for a human audit.
        loss, fit: see there.
    """

    player: str
    num_questions: PositiveInt
    copies: Annotated[int, Field(ge=1, le=1024)]
    held_out: Annotated[float, Field(gt=0, le=0.4)]
    labeller: str
    backbone: str | None
    placeholder: str
    fit: FitConf
    loss: LossConf = LossConf()
    max_failed_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    num_samples: Annotated[int, Field(ge=0, le=1000)] = 20

    def __post_init__(self) -> None:
        require(bool(self.placeholder.strip()), "placeholder", self.placeholder, "the text of one token")
        fewest = round(1 / self.held_out)
        expected = f"{fewest} or more, so that a share of held_out={self.held_out} is a question"
        require(self.num_questions >= fewest, "num_questions", self.num_questions, expected)
