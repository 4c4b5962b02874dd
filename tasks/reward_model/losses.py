"""The losses of a reward model on the logits at the places of one trajectory.

Everything is computed from log-sigmoids, so that no f near 0 or 1 gives an infinite or undefined number.
Shapes: P places, the first after the question, the last at the end of the trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tasks.reward_model.settings import LossConf


def gains(logits: Tensor, conf: LossConf) -> Tensor:
    """[P - 1] g(t) = f(t) / f(t-1) - 1 for t = 1, 2, ...

    PiCA Eq. 3 (arXiv 2605.09287; docs/methods/pica.md)

    f(t-1) counts as `clamp` at least; below it the gain has no gradient that would push f(t-1) further down.
    """
    log_f = logsigmoid(logits)
    before = log_f[:-1].clamp(min=math.log(conf.clamp))
    return torch.expm1(log_f[1:] - before)


def negative_log_gain(gain: Tensor, conf: LossConf) -> Tensor:
    """-log g above `margin`, its tangent below, constant above `cap`.

    PiCA Eq. 8 (arXiv 2605.09287; docs/methods/pica.md), which is undefined for g <= 0 and unbounded above.

    >>> negative_log_gain(torch.tensor([0.5, 0.05, 0.0, -0.2]), LossConf())
    tensor([0.6931, 2.9957, 3.9957, 7.9957])
    """
    log = -gain.clamp(min=conf.margin, max=conf.cap).log()
    tangent = -math.log(conf.margin) - (gain - conf.margin) / conf.margin
    return torch.where(gain < conf.margin, tangent, log)


def gold_loss(logits: Tensor, pivots: Sequence[bool], conf: LossConf) -> Tensor:
    """The sum over pivots of -log g(t), or of -log(1 + g(t)) where `gold_form` says so.

    PiCA Eq. 8 (arXiv 2605.09287; docs/methods/pica.md)

    Args:
        logits: [P].
        pivots: of each search; the t-th is read at place t.
        conf: see `LossConf`.
    """
    is_pivot = torch.tensor([*pivots, *[False] * (len(logits) - 1 - len(pivots))], device=logits.device)
    gain = gains(logits, conf)
    is_gain = conf.gold_form == "gain"
    each = negative_log_gain(gain, conf) if is_gain else -torch.log1p(gain.clamp(max=conf.cap))
    return torch.where(is_pivot, each, 0.0).sum()


def final_loss(logits: Tensor, is_right: bool) -> Tensor:
    """-log f(T) of a right answer, -log(1 - f(T)) of a wrong one.

    PiCA Eq. 9 (arXiv 2605.09287; docs/methods/pica.md)
    """
    return -logsigmoid(logits[-1] if is_right else -logits[-1])


def hazard_loss(logits: Tensor, pivots: Sequence[bool], is_right: bool) -> Tensor:
    """The release's loss, in which the sigmoid is a hazard: the first error happens at this step.

    PiCA loss.py:606 (novdream/PiCA@35b15c7; docs/methods/pica.md)

    The steps are the searches and the end; the place after the question is none. The release has one more term, which
    compares neighbouring tokens, never neighbouring steps.
    """
    hazards, survivals = logsigmoid(logits[1:]), logsigmoid(-logits[1:])
    if is_right:
        return -survivals.sum()
    first = next((t for t, is_pivot in enumerate(pivots) if not is_pivot), len(hazards) - 1)
    # 1 - S from the logarithm of S; a wrong answer with S of almost 1 costs log(1e-5) at most.
    ends_wrong = -(-torch.expm1(survivals.sum())).clamp(min=1e-5).log()
    at_first = -(hazards[first] + survivals[:first].sum())
    return ends_wrong + at_first


def losses(logits: Tensor, pivots: Sequence[bool], is_right: bool, conf: LossConf) -> tuple[Tensor, Tensor]:
    """L_final and L_gold of one trajectory; their weighted sum is its loss. The hazard's loss has no second part.

    PiCA Eq. 10 (arXiv 2605.09287; docs/methods/pica.md)
    """
    if conf.head == "hazard":
        return hazard_loss(logits, pivots, is_right), torch.zeros((), device=logits.device)
    return final_loss(logits, is_right), gold_loss(logits, pivots, conf)
