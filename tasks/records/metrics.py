"""A row of `metrics.jsonl`: what was measured in one step of training."""

from __future__ import annotations

from tasks.records.schema import Count, Number, row


@row
class MetricRow:
    """Metrics of one step by name, null where a step has none; step 0 is the validation before training."""

    step: Count
    metrics: dict[str, Number | None]
