"""The peak of a run's memory, and the settings that lower it until it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tasks.base.settings import FormatConf
from tasks.model import LoraConf
from tasks.plan.machine import Machine, Memory
from tasks.plan.memory import START, Demand, Phase, Place, phases

LORA_RANK = 16
VLLM_SHARES = (0.4, 0.3, 0.2)
FEWEST_ROWS = 4

Systems = Sequence[tuple[str, Demand]]
"""Every system that is trained, with what its memory depends on."""
Level = tuple[str, Callable[[Demand], Demand]]
"""A setting as a person writes it, and a demand with it."""
NOTHING_TAUGHT: Level = (
    "`format: null`, which teaches the model nothing",
    lambda demand: replace(demand, teaching=None),
)


@dataclass(frozen=True)
class Peak:
    """The phase of a system that takes the largest share of the memory at its place."""

    system: str
    phase: Phase
    place: Place
    memory: Memory

    @property
    def size(self) -> int:
        """Bytes that the phase takes at most."""
        return self.phase.size(self.place)

    @property
    def share(self) -> float:
        """Of the memory that there is."""
        return self.size / max(1, self.memory.size)


def worst(systems: Systems, of_phase: str = "") -> Peak:
    """The peak of a run, or of its phase of this name; of equal ones the first."""
    peaks = [
        Peak(name, phase, place, memory)
        for name, demand in systems
        for phase in phases(demand)
        if of_phase in ("", phase.name)
        for place, memory in _places(demand.machine)
    ]
    return max(peaks, key=lambda peak: peak.share)


def _places(machine: Machine) -> Iterator[tuple[Place, Memory]]:
    yield "memory", machine.host
    if machine.gpu is not None:
        yield "GPU", machine.gpu


def helping(systems: Systems) -> list[tuple[str, Peak]]:
    """Settings that together make a run fit, each with the peak that it leaves; if none is enough, all that help.

    They are tried in the order of what they cost: time, then other last bits of results, then another experiment. Of
    one kind the mildest level that is enough is taken, else the one that helps most. A setting that lowers another
    phase than the peak's helps only after others, so all are tried again after each.
    """
    steps: list[tuple[str, Peak]] = []
    now, used = worst(systems), set[int]()
    while now.share > 1:
        for number, levels in enumerate(_kinds(systems)):
            tried = [(text, changed, worst(changed)) for text, changed in _applied(levels, systems)]
            better = [one for one in tried if one[2].share < now.share and number not in used]
            if better:
                enough = [one for one in better if one[2].share <= 1]
                text, systems, now = enough[0] if enough else min(better, key=lambda one: one[2].share)
                steps.append((text, now))
                used.add(number)
                break
        else:
            break
    return steps


def helping_to_teach(systems: Systems) -> tuple[str, Peak] | None:
    """The mildest settings with which stage `base` fits, and the peak that they leave it; the strongest if none does.

    None where nothing is taught.
    """
    demands = [demand for _, demand in systems]
    teaching = demands[0].teaching
    if teaching is None:
        return None
    section = "format" if isinstance(teaching, FormatConf) else "base"
    longest, prompt = max(d.longest for d in demands), max(d.rollout.max_prompt_tokens for d in demands)

    levels: list[Level] = [
        (f"`{section}: max_batch_tokens: {n}`", partial(_taught_with, n=n))
        for n in _halves(teaching.max_batch_tokens, longest)
    ]
    levels += [
        (f"`{section}: max_batch_tokens: {n}` and `rollout: max_total_tokens: {n}`", partial(_taught_shorter, n=n))
        for n in _halves(longest, 2 * prompt)
    ]
    levels += [NOTHING_TAUGHT] if section == "format" else []
    tried = [(text, worst(changed, START)) for text, changed in _applied(levels, systems)]
    return next((one for one in tried if one[1].share <= 1), tried[-1] if tried else None)


def _applied(levels: Sequence[Level], systems: Systems) -> Iterator[tuple[str, Systems]]:
    for text, change in levels:
        yield text, [(name, change(demand)) for name, demand in systems]


def _kinds(systems: Systems) -> list[list[Level]]:
    """Kinds of settings, each from mild to strong."""
    demands = [demand for _, demand in systems]
    tokens = max(demand.train.max_batch_tokens for demand in demands)
    rows = max(demand.rollout.batch_rows for demand in demands)
    longest = max(demand.longest for demand in demands)
    prompt = max(demand.rollout.max_prompt_tokens for demand in demands)

    teaching = demands[0].teaching
    taught = teaching.max_batch_tokens if teaching is not None else 0
    section = "format" if isinstance(teaching, FormatConf) else "base"

    return [
        [("`train: keep_activations: false`", _recomputing)],
        [(f"`train: max_batch_tokens: {n}`", partial(_with_tokens, n=n)) for n in _halves(tokens, longest)],
        [("`fit: keep_activations: false` in conf/reward_model", _recomputing_others)],
        [(f"`{section}: max_batch_tokens: {n}`", partial(_taught_with, n=n)) for n in _halves(taught, longest)],
        [(f"`rollout: batch_rows: {n}`", partial(_with_rows, n=n)) for n in _halves(rows, FEWEST_ROWS)],
        [("`train: dtype: bfloat16`", _in_bfloat16)],
        [(f"`gpu_memory_utilization: {s}` in conf/generator", partial(_with_share, share=s)) for s in VLLM_SHARES],
        [("`generator: plain` in params.yaml", lambda demand: replace(demand, vllm=None))],
        [
            (f"`rollout: max_total_tokens: {n}` in conf/model or conf/scale", partial(_no_longer_than, n=n))
            for n in _halves(longest, 2 * prompt)
        ],
        [(f"`lora: {{rank: {LORA_RANK}}}` in conf/model", _with_adapters)],
        [NOTHING_TAUGHT] if section == "format" else [],
    ]


def _halves(value: int, least: int) -> list[int]:
    """Half of a value, a quarter and so on, down to the least; the last is the least itself if it is smaller."""
    found = []
    while value > least:
        value = max(value // 2, least)
        found.append(value)
    return found


def _recomputing(demand: Demand) -> Demand:
    return replace(demand, train=replace(demand.train, keep_activations=False))


def _recomputing_others(demand: Demand) -> Demand:
    others = tuple(replace(taught, keeps_all=not taught.is_scored and taught.keeps_all) for taught in demand.others)
    return replace(demand, others=others)


def _with_tokens(demand: Demand, n: int) -> Demand:
    return replace(demand, train=replace(demand.train, max_batch_tokens=min(n, demand.train.max_batch_tokens)))


def _taught_with(demand: Demand, n: int) -> Demand:
    teaching = demand.teaching
    return demand if teaching is None else replace(demand, teaching=replace(teaching, max_batch_tokens=n))


def _taught_shorter(demand: Demand, n: int) -> Demand:
    return _no_longer_than(_taught_with(demand, n), n)


def _with_rows(demand: Demand, n: int) -> Demand:
    return replace(demand, rollout=replace(demand.rollout, batch_rows=min(n, demand.rollout.batch_rows)))


def _no_longer_than(demand: Demand, n: int) -> Demand:
    return replace(demand, rollout=replace(demand.rollout, max_total_tokens=min(n, demand.rollout.max_total_tokens)))


def _in_bfloat16(demand: Demand) -> Demand:
    return replace(demand, train=replace(demand.train, dtype="bfloat16"))


def _with_share(demand: Demand, share: float) -> Demand:
    vllm = demand.vllm
    if vllm is None or vllm.gpu_share <= share:
        return demand
    return replace(demand, vllm=replace(vllm, gpu_share=share))


def _with_adapters(demand: Demand) -> Demand:
    return demand if demand.lora.rank else replace(demand, lora=LoraConf(rank=LORA_RANK))
