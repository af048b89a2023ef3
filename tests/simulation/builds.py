"""Versions of an engine: where each can be installed, and whether it serves.

They have chance of their own: seeds without them are the same stories as without this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from llmgw.cluster.catalog import Catalog, EngineName, EngineSpec, ModelSpec

ENGINE: EngineName = "vllm"
OWN = "own"
"""Version of the program that a machine's own file names."""


@dataclass(frozen=True, slots=True)
class Build:
    serves: bool
    """False: its engine ends at its start, though it is installed like any other."""
    on: frozenset[str]
    """Machines on which it can be installed."""


class Builds:
    def __init__(self, seed: int, machines: Sequence[str]) -> None:
        self.rng = Random(f"{seed} builds")
        self.used = self.rng.random() < 0.5
        self.all = frozenset(machines)
        self.known = {"v1": Build(serves=True, on=self.all)}
        self.named = frozenset(machine for machine in machines if self.used and self.rng.random() < 0.08)
        """Machines with a program of their own, on which nothing is installed."""

    def begin(self, catalog: Catalog) -> Catalog:
        """The catalog with some of its models on the engine that has versions."""
        if not self.used:
            return catalog
        models = tuple(self._moved(spec) if self.rng.random() < 0.8 else spec for spec in catalog.models)
        return replace(catalog, models=models, engines=(spec("v1"),))

    def _moved(self, model: ModelSpec) -> ModelSpec:
        return replace(model, profiles=tuple(replace(each, engine=ENGINE) for each in model.profiles))

    def new(self) -> EngineSpec:
        """A version that nobody has seen yet: it may serve or not, and be there for all machines, some or none."""
        version = f"v{len(self.known) + 1}"
        where = self.rng.random()
        some = frozenset(machine for machine in sorted(self.all) if self.rng.random() < 0.6)
        on = frozenset() if where < 0.2 else some if where < 0.4 else self.all
        self.known[version] = Build(serves=self.rng.random() < 0.65, on=on)
        return spec(version)

    def another(self) -> EngineSpec:
        return spec(self.rng.choice(sorted(self.known)))

    def sound(self) -> EngineSpec:
        """A new version that works everywhere."""
        version = f"v{len(self.known) + 1}"
        self.known[version] = Build(serves=True, on=self.all)
        return spec(version)

    def is_sound(self, version: str) -> bool:
        build = self.known[version]
        return build.serves and build.on == self.all

    def serves(self, version: str) -> bool:
        return version == OWN or self.known[version].serves

    def install_s(self) -> float:
        return self.rng.uniform(10.0, 60.0) if self.rng.random() < 0.2 else self.rng.uniform(0.2, 4.0)


def spec(version: str) -> EngineSpec:
    return EngineSpec(name=ENGINE, version=version, source="index")
