"""What a run leaves behind, row by row: scores, trajectories and metrics, with one schema each.

The stage that writes a file, the report that reads it, the viewer that shows it and the expectations about it all use
the same dataclass. Nothing here plays, scores or averages.
"""
