"""How busy an engine is, read from its own metrics. Each engine has other names for it, and renames them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from llmgw.cluster.model import Load

Samples = Mapping[str, Sequence[float]]
"""Values by the name of the metric; several where it has several sets of labels."""

_Join = Callable[[Iterable[float]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMetrics:
    """Names of metrics: of each the first that is there counts. Empty: this engine has no such metric."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_used_ratio: tuple[str, ...] = ()
    prompt_tokens_total: tuple[str, ...] = ()
    generation_tokens_total: tuple[str, ...] = ()
    join_requests: _Join = sum
    """How requests of several sets of labels are joined. Tokens are added up; a ratio is that of the fullest."""

    @property
    def names(self) -> frozenset[str]:
        """All that may be looked for: the rest of what an engine tells need not be read."""
        rows = (self.running, self.waiting, self.kv_used_ratio, self.prompt_tokens_total, self.generation_tokens_total)
        return frozenset(name for names in rows for name in names)


@dataclass(frozen=True, slots=True)
class Reading:
    load: Load
    missing: tuple[str, ...]
    """Names that stand for a metric which the engine should have, and has not under any of its names."""


def read_load(metrics: LoadMetrics, samples: Samples) -> Reading:
    """The load in what an engine told. A metric that is missing is None, never 0."""
    missing: list[str] = []

    def value(names: tuple[str, ...], join: _Join) -> float | None:
        for name in names:
            told = [each for each in samples.get(name, ()) if isfinite(each) and each >= 0]
            if told:
                return join(told)
        missing.extend(names[:1])
        return None

    load = Load(
        running=value(metrics.running, metrics.join_requests),
        waiting=value(metrics.waiting, metrics.join_requests),
        kv_used_ratio=value(metrics.kv_used_ratio, max),
        prompt_tokens_total=value(metrics.prompt_tokens_total, sum),
        generation_tokens_total=value(metrics.generation_tokens_total, sum),
    )
    return Reading(load, tuple(missing))
