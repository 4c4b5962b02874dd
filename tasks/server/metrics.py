"""The server's metrics for Prometheus, one registry per server, so that several servers can run in one process.

Processes that share a port share a folder, named by `PROMETHEUS_MULTIPROC_DIR`: whichever is asked answers for all.
Requests, searches and queues are sums, also of processes that have ended; what the operating system says of a process
has its number as label `process`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Read by `prometheus_client` when it is imported."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PATHS = ("/retrieve", "/health", "/metrics", "/docs", "/openapi.json", "/")


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "search_requests", "Requests answered, by path and status.", ("path", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "search_request_seconds", "From a retrieve request's first byte to its answer.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.batch = Histogram(
            "search_batch_queries", "Queries of one search.", buckets=_QUERIES, registry=self.registry
        )
        self.hits = Counter("search_cache_hits", "Queries answered from the cache.", registry=self.registry)
        self.misses = Counter("search_cache_misses", "Queries not in the cache.", registry=self.registry)
        self.drops = self._gauge("search_cache_drops", "How often a damaged cache was begun anew.")
        self.queue = self._gauge("search_queue_queries", "Queries that wait for a search.")
        self.in_work = self._gauge("search_requests_in_work", "Retrieve requests in work.")
        if folder := os.environ.get(FOLDER):
            self.registry = CollectorRegistry()
            MultiProcessCollector(self.registry, folder)  # type: ignore[no-untyped-call]
            self.registry.register(_Processes(Path(folder)))
        else:
            ProcessCollector(registry=self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        """Several processes add up; one that has ended does not count."""
        return Gauge(name, about, registry=self.registry, multiprocess_mode="livesum")

    def answered(self, path: str, status: int) -> None:
        """Count a request; all unknown paths are counted together."""
        self.requests.labels(path if path in PATHS else "other", str(status)).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Processes(Collector):
    """Memory, processor time and files of each living process that has metrics in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        merged: dict[str, Metric] = {}
        for path in sorted(self._folder.glob("gauge_livesum_*.db")):
            pid = path.stem.rpartition("_")[2]
            for found in ProcessCollector(registry=None, pid=lambda pid=pid: pid).collect():  # type: ignore[misc]
                metric = merged.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    metric.add_sample(sample.name, {"process": pid}, sample.value)
        yield from merged.values()
