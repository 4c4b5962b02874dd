"""The result table and the report page: reads finished artifacts, computes no score."""
