"""The server's metrics for Prometheus, one registry per server, so that several servers can run in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

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
        self.drops = Gauge("search_cache_drops", "How often a damaged cache was begun anew.", registry=self.registry)
        self.queue = Gauge("search_queue_queries", "Queries that wait for a search.", registry=self.registry)
        self.in_work = Gauge("search_requests_in_work", "Retrieve requests in work.", registry=self.registry)
        ProcessCollector(registry=self.registry)

    def answered(self, path: str, status: int) -> None:
        """Count a request; all unknown paths are counted together."""
        self.requests.labels(path if path in PATHS else "other", str(status)).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)
