"""How fast each system was trained: tokens a second, the share of what the devices could do, and memory.

All of it was measured where the training ran and stands in its ledger, as seconds do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.records.work import Work
from tasks.report.table import Results
from tasks.store import Row

RATES = ("written", "prefilled", "trained", "read_in_learning")


def rows(results: Results, ledger: Mapping[str, Row]) -> dict[str, Row]:
    """System -> its speed, for those of which the ledger has the training of every seed.

    Rates are those of all seeds together: tokens / seconds. Memory is that of the seed that held most.
    """
    found = {}
    for policy in results.policies:
        entries = [ledger.get(run.made_by, {}) for run in results.runs if run.policy == policy]
        if entries and all("work" in entry for entry in entries):
            found[policy] = _row(entries)
    return found


def _row(entries: Sequence[Row]) -> Row:
    total = Work()
    for entry in entries:
        total.add(Work(**entry["work"]))
    rates = total.rates()
    return {
        **{name: rates.get(f"tokens_per_s/{name}") for name in RATES},
        "flop_per_s": rates.get("flop_per_s/learning"),
        **_share(entries),
        "memory": _largest([entry.get("memory", {}) for entry in entries]),
    }


def _share(entries: Sequence[Row]) -> Row:
    """The seconds that learning needs at the limit, over those it took; None where a device's limit is not known."""
    limits = [entry.get("limit") or {} for entry in entries]
    known = [float(limit.get("flop_per_s") or 0) for limit in limits]
    devices = list(dict.fromkeys(limit["device"] for limit in limits if limit))
    sources = list(dict.fromkeys(limit["source"] for limit in limits if limit))
    seconds = sum(entry["work"]["learn_s"] for entry in entries)
    told: Row = {"share": None, "limit": None, "devices": devices, "sources": sources}
    if all(known):
        needed = sum(entry["work"]["flop"] / peak for entry, peak in zip(entries, known, strict=True))
        told |= {"share": needed / seconds if needed and seconds else None, "limit": sum(known) / len(known)}
    return told


def _largest(memories: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for memory in memories for name in memory)
    return {name: max(memory[name] for memory in memories if name in memory) for name in names}
