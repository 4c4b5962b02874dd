"""Benchmark runs and the statistics of their scores."""
