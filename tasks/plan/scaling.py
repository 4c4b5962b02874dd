"""How long a step takes with more devices: a sum of parts that were measured with one, or assumed.

Play and learning are divided among the devices. What is not divided is what limits: the searches of a turn, which all
rows wait for; the exchange of gradients and weights, whose bytes do not shrink with more workers; the hand-over of the
weights. Nothing overlaps here, so a run that plays ahead or lets each row go on by itself takes less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Speeds:
    """What one device, or one link, does in a second.

    Attributes:
        written: tokens that a generator writes, all of its rows together.
        read: tokens that a generator reads.
        passed: tokens of a forward pass of a worker.
        learned: tokens of a forward and a backward pass of a worker.
        exchanged: bytes that each worker exchanges with the others within a host.
        exchanged_between: likewise between hosts.
        handed: bytes of weights that pass a socket.
        search_s: seconds of one round of searches of all rows.
    """

    written: float
    read: float
    passed: float
    learned: float
    exchanged: float
    exchanged_between: float
    handed: float
    search_s: float


@dataclass(frozen=True)
class Work:
    """What a step has to do.

    Attributes:
        written, read: tokens of all rollouts.
        rounds: of searches.
        passes: tokens of forward passes before the first update: old log-probabilities, reference, values.
        learned: tokens of updates.
        updates: optimizer steps, after each of which changed weights are put together again.
        batches: micro-batches of all updates, each with an exchange of gradients in ZeRO-2; 0 for ZeRO-1, which
            exchanges them once an update.
        weights: under training, policy and critic.
        handed: bytes of weights that a generator gets.
    """

    written: float
    read: float
    rounds: float
    passes: float
    learned: float
    updates: int
    batches: int
    weights: float
    handed: float


def step_seconds(speeds: Speeds, work: Work, devices: int, per_host: int = 8) -> dict[str, float]:
    """Seconds of a step by part, with a worker and a generator on each device.

    The exchange is that of DeepSpeed's ZeRO-1 and 2, with 4 bytes a number. Gradients are added up by an all-reduce, a
    ring in which a worker sends 2 (W - 1) / W of the bytes, and ZeRO-2 does so after each of its micro-batches, since
    no worker keeps all of them. Changed weights are put together by an all-gather, (W - 1) / W of the bytes. Several
    workers hand them to the stage, which sends them to all generators at once.
    """
    hosts = math.ceil(devices / per_host)
    link = speeds.exchanged if hosts == 1 else min(speeds.exchanged, speeds.exchanged_between)
    gathered = 4 * work.weights * (devices - 1) / devices
    reductions = max(work.updates, math.ceil(work.batches / devices))
    sent = reductions * 2 * gathered + work.updates * gathered
    return {
        "play": (work.written / speeds.written + work.read / speeds.read) / devices,
        "search": work.rounds * speeds.search_s,
        "logprobs": work.passes / speeds.passed / devices,
        "learn": work.learned / speeds.learned / devices,
        "exchange": sent / link,
        "hand_over": work.handed * (1 + (devices > 1)) / speeds.handed,
    }


def efficiency(speeds: Speeds, work: Work, devices: int, per_host: int = 8) -> float:
    """Share of the work of so many devices that is not spent on what they cannot divide: 1 for one device."""
    alone, together = (sum(step_seconds(speeds, work, count, per_host).values()) for count in (1, devices))
    return alone / (devices * together)
