"""What is counted, cheaply: plain integers on the way of a request, turned into Prometheus' families when scraped.

Label values are bounded: models that the table names (or has named), everything else is ``other``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

OTHER = "other"
CLIENT_GONE = 499
"""Counted where the client left before its answer; never sent."""

FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
DURATION_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        running = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            out.append(("+Inf" if bound == float("inf") else str(bound), running))
        return out


class ModelStats:
    __slots__ = ("duration", "first_byte", "statuses", "truncated")

    def __init__(self) -> None:
        self.statuses = [0, 0, 0, 0, 0, 0]
        """By the status' first digit; 0: the client left."""
        self.first_byte = Histogram(FIRST_BYTE_BUCKETS)
        self.duration = Histogram(DURATION_BUCKETS)
        self.truncated = 0


class Meter:
    """The counters of one gateway."""

    def __init__(self) -> None:
        self.models: dict[str, ModelStats] = {OTHER: ModelStats()}
        self.retries: Counter[str] = Counter()
        """By model."""
        self.engine_errors: Counter[tuple[str, str]] = Counter()
        """By model and kind: unreachable, broken, status, key_refused, timeout, truncated, gone."""
        self.bad_requests = 0
        """What could not be parsed as HTTP."""

    def know(self, models: Iterable[str]) -> None:
        """These models get a label of their own from now on."""
        for model in models:
            if model not in self.models:
                self.models[model] = ModelStats()

    def count(self, model: str, status: int) -> ModelStats:
        """A request ended with this status (499: the client left)."""
        stats = self.models.get(model) or self.models[OTHER]
        stats.statuses[0 if status == CLIENT_GONE else status // 100] += 1
        return stats


class Gauges(Protocol):
    """Values of the moment, asked for when scraped."""

    def models(self) -> Iterable[tuple[str, int, int, int]]:
        """Of each model: its name, requests in flight, requests waiting, replicas in the table."""

    def scalars(self) -> Iterable[tuple[str, str, float]]:
        """Name, help, value."""


class GatewayCollector(Collector):
    """A prometheus_client collector over a Meter and Gauges."""

    def __init__(self, meter: Meter, gauges: Gauges) -> None:
        self._meter = meter
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._errors()
        in_flight = GaugeMetricFamily("llmgw_gateway_in_flight", "Requests at a replica now.", labels=["model"])
        waiting = GaugeMetricFamily(
            "llmgw_gateway_queue_depth", "Requests waiting for a replica now.", labels=["model"]
        )
        ready = GaugeMetricFamily("llmgw_gateway_ready_replicas", "Replicas in the routing table.", labels=["model"])
        for model, running, queued, replicas in self._gauges.models():
            in_flight.add_metric([model], running)
            waiting.add_metric([model], queued)
            ready.add_metric([model], replicas)
        yield in_flight
        yield waiting
        yield ready
        for name, help, value in self._gauges.scalars():
            yield GaugeMetricFamily(name, help, value=value)

    def _requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "llmgw_gateway_requests", "Requests by model and status class.", labels=["model", "status"]
        )
        first_byte = HistogramMetricFamily(
            "llmgw_gateway_first_byte_seconds", "From request to the first byte of a streamed answer.", labels=["model"]
        )
        duration = HistogramMetricFamily(
            "llmgw_gateway_request_duration_seconds", "From request to the answer's last byte.", labels=["model"]
        )
        truncated = CounterMetricFamily(
            "llmgw_gateway_truncated", "Answers that ended before they were complete.", labels=["model"]
        )
        for model, stats in list(self._meter.models.items()):
            for digit, count in enumerate(stats.statuses):
                if count:
                    requests.add_metric([model, f"{digit}xx" if digit else "client_gone"], count)
            first_byte.add_metric([model], stats.first_byte.buckets(), stats.first_byte.total)
            duration.add_metric([model], stats.duration.buckets(), stats.duration.total)
            truncated.add_metric([model], stats.truncated)
        yield requests
        yield first_byte
        yield duration
        yield truncated

    def _errors(self) -> Iterator[Metric]:
        retries = CounterMetricFamily("llmgw_gateway_retries", "Requests sent to a replica again.", labels=["model"])
        for model, count in self._meter.retries.items():
            retries.add_metric([model], count)
        yield retries
        errors = CounterMetricFamily(
            "llmgw_gateway_engine_errors", "What went wrong with engines.", labels=["model", "kind"]
        )
        for (model, kind), count in self._meter.engine_errors.items():
            errors.add_metric([model, kind], count)
        yield errors
        yield CounterMetricFamily(
            "llmgw_gateway_bad_requests", "Connections that sent what is not HTTP.", value=self._meter.bad_requests
        )
