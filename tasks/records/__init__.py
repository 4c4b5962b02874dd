"""The rows that a run writes: scores, trajectories and metrics, with one schema each.

The stage that writes a file, the report and viewer that read it and the expectations that check it all use the same
dataclass. Nothing here plays, scores or averages.
"""
