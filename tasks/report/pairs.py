"""Each policy beside the reference, question by question: won and lost, and right where an answer was shown.

A difference of two means does not say whether a policy changed few answers or many. And a policy that is shown an
answer and misses it reads badly, while one that is shown none cannot be helped by reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.evaluate.statistics import Bounds, bootstrap_means
from tasks.report.table import Results, Section
from tasks.types import ALL

COMPLETE = "gold passages all in the corpus"
HEADER = (
    "questions", "number", "policy", "EM", "EM - reference", "won", "lost", "right where an answer was shown",
    "right where none was shown",
)  # fmt: skip
LEAD = (
    "Greedy play. Won: answered by the policy and not by the reference with the same seed; lost: the reverse. Shown: "
    "what the policy was given to read holds a gold answer; questions where that says nothing, such as those of "
    "yes and no, are in neither of the last two columns. Counts are sums over seeds."
)


def section(results: Results) -> Section:
    """A line for each policy over all questions, and over those whose gold passages are all known, if that is fewer."""
    scores = results.runs[0].scores["greedy"]
    parts = {ALL: [row.question_id for row in scores]}
    parts[COMPLETE] = [row.question_id for row in scores if row.recall is not None]
    if len(parts[COMPLETE]) in (0, len(parts[ALL])):
        del parts[COMPLETE]
    rows = [line for part, questions in parts.items() for line in _lines(results, part, questions)]
    return Section("pairs", "Question by question", LEAD, HEADER, rows)


def _lines(results: Results, part: str, questions: Sequence[str]) -> Iterator[list[str]]:
    played = {(run.policy, run.seed): {row.question_id: row for row in run.scores["greedy"]} for run in results.runs}
    for policy in results.policies:
        # [question][seed]: the policy's row and the reference's.
        pairs = [
            [(played[policy, seed][name], played[results.reference, seed][name]) for seed in results.seeds]
            for name in questions
        ]
        ems = [[own.em for own, _ in row] for row in pairs]
        line = [part, str(len(questions)), results.title(policy), _mean(ems, (0, 1), results.num_resamples)]
        if policy == results.reference:
            line += ["", "", ""]
        else:
            gains = [[own.em - other.em for own, other in row] for row in pairs]
            line.append(_mean(gains, (-1, 1), results.num_resamples, is_difference=True))
            line += [str(sum(row.count(sign) for row in gains)) for sign in (1, -1)]
        for is_shown in (1, 0):
            told = [own.em for row in pairs for own, _ in row if own.answer_shown == is_shown]
            line.append(f"{sum(told):.0f} of {len(told)}" if told else "")
        yield line


def _mean(table: Sequence[Sequence[float]], bounds: Bounds, num_resamples: int, is_difference: bool = False) -> str:
    """Mean of [question][seed] with its interval, as the other tables have it."""
    (found,) = bootstrap_means(table, num_resamples, over=[range(len(table[0]))], bounds=[bounds])
    return found.text(signed=is_difference)
