"""Trained policies in MLflow's model registry, one model `search-agent` with a version for each registered policy.

Which policy is registered: of the trained systems in `reports/results.csv`, the one with the highest exact match (mean
over seeds, all datasets and hops, greedy play), and of its seeds the policy with the highest; of equal ones the first.
A policy whose weights and settings are registered is not registered again.

Which version has the alias `champion`: the first one; then a newly registered one that is better than the champion on
the same questions of the same data, where the lower end of the paired 95% interval of the difference in exact match is
above 0. The interval resamples questions. Where data, questions or passages per search differ, the alias stays.
"""
