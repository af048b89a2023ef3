"""Reads how busy an engine is. What can't be read is not told: a load never makes a shard unhealthy."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import structlog
from prometheus_client.parser import text_string_to_metric_families

from llmgw.agent.probe import HEALTH_TIMEOUT_S, EngineClient, NoAnswer
from llmgw.cluster.model import DesiredShard, Load
from llmgw.engines.base import Engine
from llmgw.engines.load import read_load

log = structlog.get_logger()


class LoadReader:
    """Of one shard. What is wrong with an engine's metrics is logged once, and not at every look."""

    def __init__(self, adapter: Engine, shard: DesiredShard, client: EngineClient) -> None:
        self._metrics = adapter.load_metrics
        self._probe = adapter.metrics()
        self._shard = shard
        self._client = client
        self._names = self._metrics.names if self._metrics is not None else frozenset()
        self._said: set[str] = set()

    async def look(self, endpoint: str) -> Load | None:
        """None where the engine tells nothing, or nothing that can be read."""
        if self._metrics is None or self._probe is None:
            return None
        try:
            status, body = await self._client.ask(endpoint, self._probe, self._shard.api_key, HEALTH_TIMEOUT_S)
        except NoAnswer as error:
            self._complain(f"no metrics: {error}")
            return None
        if status != 200:
            self._complain(f"{self._probe.path} answered {status}")
            return None
        try:
            reading = read_load(self._metrics, _samples(body.decode("utf-8", "replace"), self._names))
        except ValueError as error:
            self._complain(f"{self._probe.path} answered what is no Prometheus text: {error}")
            return None
        for name in reading.missing:
            self._complain(f"{self._probe.path} has no {name}, under no name that is known")
        return reading.load

    def _complain(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            log.warning("an engine's load can't be told whole", shard=self._shard.id, reason=words)


def _samples(text: str, names: Collection[str]) -> dict[str, list[float]]:
    """Of these metrics alone: an engine tells thousands of lines, and is asked every few seconds."""
    found: dict[str, list[float]] = {}
    wanted = "".join(f"{line}\n" for line in _wanted(text, names))
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    return found


def _wanted(text: str, names: Collection[str]) -> Iterator[str]:
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            yield line
