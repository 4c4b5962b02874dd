"""What a night found, the alarms of a night, and the trend over nights. Nothing here plays a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tasks import store
from tasks.evaluate.statistics import shown
from tasks.records import schema
from tasks.records.schema import Count, Number, row

FOLDER = Path(".scratch/nightly")
SET = FOLDER / "set"
"""Questions, passages and index of the nights."""
HISTORY, NIGHT, TREND, PLOT = "nights.jsonl", "night.json", "trend.md", "trend.svg"
METRICS = ("em", "f1", "searches")
NUM_SHOWN = 30


@row
class Played:
    """One metric of a policy, with its 95% interval over questions; ends are None where that would exclude nothing."""

    mean: Number
    low: Number | None
    high: Number | None

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval, None where there is none."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def is_outside(self, value: float) -> bool:
        """Whether a value lies outside the interval; no value does where there is none."""
        return self.ends is not None and not self.ends[0] <= value <= self.ends[1]

    @property
    def shown(self) -> str:
        """Such as `0.687 [0.648, 0.722]`."""
        return shown(self.mean, self.ends)


@row
class Cell:
    """One policy on the questions of the night.

    Attributes:
        policy: its name and version, such as `slate-0 v3`.
        is_champion: whether it was the champion that night.
        inputs: hash of the version (its weights and settings never change), questions, passages, and settings of the
            index. Code and libraries are not among them: neither may change a score unnoticed.
        outputs: hash of score and answer of each question.
        num_questions: how many were played.
        metrics: of `METRICS`.
    """

    policy: str
    is_champion: bool
    inputs: str
    outputs: str
    num_questions: Count
    metrics: dict[str, Played]


@row
class Night:
    """What one night found.

    Attributes:
        at: when it began, ISO 8601, UTC.
        commit: the code that played.
        cells: one for each policy.
        alarms: see `alarms`.
        accepted: why its user takes it for good in spite of its alarms; empty if nobody did.
    """

    at: str
    commit: str
    cells: list[Cell]
    alarms: list[str]
    accepted: str = ""

    @property
    def is_good(self) -> bool:
        """Whether later nights are compared with it."""
        return not self.alarms or bool(self.accepted)


def cell(policy: store.Row, found: store.Row) -> Cell:
    """The cell of an entry of `night.json` and of what `tasks.registry evaluate` measured."""
    return Cell(
        policy=policy["name"],
        is_champion=policy["is_champion"],
        inputs=policy["inputs"],
        outputs=found["scores_sha256"],
        num_questions=found["num_questions"],
        metrics={name: Played(mean=mean, low=low, high=high) for name in METRICS for mean, low, high in [found[name]]},
    )


def read(root: Path) -> list[Night]:
    """All nights of a clone, the oldest first.

    Raises:
        DataError: a row is damaged.
    """
    path = root / FOLDER / HISTORY
    return [night for _, night in schema.read(Night, path)] if path.is_file() else []


def add(root: Path, at: str, commit: str, cells: Sequence[Cell]) -> list[Night]:
    """Compare a night with the last good one and write it; returns all nights."""
    before = read(root)
    good = next((night for night in reversed(before) if night.is_good), None)
    found = [] if good is None else alarms(good, cells)
    return _write(root, [*before, Night(at=at, commit=commit, cells=list(cells), alarms=found)])


def accept(root: Path, reason: str) -> Night:
    """Take the last night for good: the next one is compared with it.

    Raises:
        ValueError: there is none, or it has no alarm; or the reason is not one line of printable text.
    """
    nights = read(root)
    if not reason.strip() or not reason.isprintable():
        raise ValueError(f"found {reason!r} as the reason, expected one line of printable text")
    if not nights or nights[-1].is_good:
        raise ValueError("the last night has no alarm that could be accepted" if nights else "there was no night yet")
    return _write(root, [*nights[:-1], replace(nights[-1], accepted=reason)])[-1]


def _write(root: Path, nights: list[Night]) -> list[Night]:
    """Replace history, table and plot, each in one step."""
    schema.write(root / FOLDER / HISTORY, nights)
    with store.replacing(root / FOLDER / TREND) as file:
        file.write(f"{trend(nights)}\n".encode())
    with store.replacing(root / FOLDER / PLOT) as file:
        file.write(plot(nights))
    return nights


def alarms(good: Night, cells: Sequence[Cell]) -> list[str]:
    """What has changed that must not have, one line for each cell.

    A cell with the inputs of the last good night must give the same scores and answers to the bit, and with others each
    metric must lie in the interval of that night. The champion and the newest versions move on, so a policy that plays
    no more, or for the first time, is no alarm.
    """
    known = {cell.policy: cell for cell in good.cells}
    return [text for cell in cells if cell.policy in known for text in _alarms(known[cell.policy], cell)]


def _alarms(old: Cell, new: Cell) -> Iterator[str]:
    moved = [
        f"{name} {was.shown} -> {new.metrics[name].mean:.3f}"
        for name, was in old.metrics.items()
        if was.is_outside(new.metrics[name].mean)
    ]
    if moved:
        yield f"{new.policy}: outside the interval of the last good night: {', '.join(moved)}"
    elif new.inputs == old.inputs and new.outputs != old.outputs:
        em = f"em {old.metrics['em'].mean:.3f} -> {new.metrics['em'].mean:.3f}"
        yield f"{new.policy}: the same policy, questions and index gave other answers or scores ({em})"


def verdict(night: Night) -> str:
    """The alarms of a night, a line each; or one line where there is none."""
    if night.alarms:
        return "\n".join(night.alarms)
    names = ", ".join(cell.policy for cell in night.cells)
    return f"no alarm: {names}; {night.cells[0].num_questions} questions"


def trend(nights: Sequence[Night]) -> str:
    """The last nights as a Markdown table of exact match, the newest first; below it the last night's alarms."""
    shown = list(reversed(nights[-NUM_SHOWN:]))
    names = sorted({cell.policy for night in shown for cell in night.cells})
    champions = {cell.policy for cell in nights[-1].cells if cell.is_champion}
    titles = [f"{name} (champion)" if name in champions else name for name in names]
    lines = [f"| night (UTC) | {' | '.join(titles)} | |", "| --- " * (len(names) + 2) + "|"]
    for night in shown:
        cells = {cell.policy: cell.metrics["em"].shown for cell in night.cells}
        reason = night.accepted.replace("|", "\\|")
        said = (f"alarm, accepted: {reason}" if reason else "**alarm**") if night.alarms else "no alarm"
        lines.append(f"| {night.at[:16].replace('T', ' ')} | {' | '.join(cells.get(n, '') for n in names)} | {said} |")
    return "\n".join([*lines, "", *(f"- {text}" for text in nights[-1].alarms)]).strip()


def plot(nights: Sequence[Night]) -> bytes:
    """Exact match of each policy with its interval, night by night, as SVG."""
    import io

    from matplotlib.figure import Figure

    shown = nights[-NUM_SHOWN:]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    for name in sorted({cell.policy for night in shown for cell in night.cells}):
        found = [
            (i, cell.metrics["em"]) for i, night in enumerate(shown) for cell in night.cells if cell.policy == name
        ]
        means = [em.mean for _, em in found]
        between = [em.ends or (em.mean, em.mean) for _, em in found]
        ends = [[em.mean - low for (_, em), (low, _) in zip(found, between, strict=True)]]
        ends.append([high - em.mean for (_, em), (_, high) in zip(found, between, strict=True)])
        axes.errorbar([i for i, _ in found], means, ends, marker="o", capsize=3, label=name)

    for i, night in enumerate(shown):
        if night.alarms:
            axes.axvspan(i - 0.3, i + 0.3, color="tab:red", alpha=0.15)
    axes.set_xticks(range(len(shown)), [night.at[5:10] for night in shown], rotation=60 if len(shown) > 12 else 0)
    axes.set_ylabel("exact match")
    axes.set_title("Exact match by night with 95% intervals; red: alarm", fontsize=9)
    axes.legend(fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
