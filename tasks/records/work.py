"""What training did, and the seconds in which it did so."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class Work:
    """Tokens and floating-point operations, and the seconds that they took, which another run would not repeat.

    Attributes:
        written: tokens that were sampled in play.
        prefilled: tokens that were read in play without being sampled.
        play_s: seconds of that play without searches and rewards. Those of a step that was played ahead count in full,
            although training waited only for some of them.
        trained: tokens with a loss in the updates; those of a second epoch count again.
        read: tokens that the updates read, without padding; what is read once for several samples counts once.
        flop: floating-point operations of the updates of policy and critic (`tasks/flops.py`); 0 where unknown.
        learn_s: seconds of the updates.
    """

    written: int = 0
    prefilled: int = 0
    play_s: float = 0.0
    trained: int = 0
    read: int = 0
    flop: float = 0.0
    learn_s: float = 0.0

    def add(self, other: Work) -> None:
        """Count this work as well."""
        for name, amount in vars(other).items():
            setattr(self, name, getattr(self, name) + amount)

    def take(self) -> Work:
        """The work since this was last asked."""
        taken = replace(self)
        vars(self).update(vars(Work()))
        return taken

    def rates(self) -> dict[str, float]:
        """Metrics of a step; a rate of which nothing was done or nothing is known is left out.

        >>> Work(written=30, prefilled=60, play_s=2.0).rates()
        {'tokens_per_s/written': 15.0, 'tokens_per_s/prefilled': 30.0}
        """
        rates = {
            "tokens_per_s/written": (self.written, self.play_s),
            "tokens_per_s/prefilled": (self.prefilled, self.play_s),
            "tokens_per_s/trained": (self.trained, self.learn_s),
            "tokens_per_s/read_in_learning": (self.read, self.learn_s),
            "flop_per_s/learning": (self.flop, self.learn_s),
        }
        return {name: amount / seconds for name, (amount, seconds) in rates.items() if amount and seconds}
