"""One run: everything that a seed stands for, put together, stepped through its faults, and healed at the end."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TextIO

from llmgw.cluster.catalog import Catalog
from llmgw.store.memory import MemoryStore

from .agent import Agent
from .builds import Builds
from .checks import Checks
from .control import ControlPlane
from .faults import Faults
from .gateway import Gateway, Request
from .healing import Healing
from .machine import Group, Machine
from .operator import Operator
from .scenario import draw
from .story import Story
from .timeline import WALL_S, Timeline
from .wires import Wires

SECRET = "simulated"


class World:
    def __init__(self, seed: int, *, aloud: TextIO | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.timeline = Timeline()
        self.story = Story(self.timeline, aloud)
        self.scenario = scenario = draw(self.rng)
        self.wires = Wires(self.timeline, self.rng)
        self.checks = Checks(self)
        self.store = MemoryStore(secret=SECRET, clock=self.database_clock, events_kept=50, prune_every=200)
        self.builds = Builds(seed, [inventory.hostname for inventory in scenario.inventories])
        self.catalog: Catalog = self.builds.begin(scenario.catalog)
        self.first_catalog = self.catalog
        self.heartbeat_s = scenario.heartbeat_s
        self.suspect_after_s = scenario.suspect_after_s
        self.lost_after_s = scenario.lost_after_s
        self.in_flight_s = scenario.in_flight_s
        self.lease_s = scenario.lease_s
        self.faulty = True
        """False once the faults have stopped."""
        self.clients = True
        self.open_requests: dict[int, Request] = {}
        self.ended_requests: Counter[str] = Counter()
        self.store_down: set[str] = set()
        """Control planes that can't reach the store."""
        self._groups: dict[tuple[str, int], Group] = {}
        self._pids = 1000
        self._requests = 0
        self.planes = [ControlPlane(self, f"cp{number}") for number in range(1, scenario.planes + 1)]
        self.machines = [Machine(self, inventory) for inventory in scenario.inventories]
        self.agents = [Agent(self, machine) for machine in self.machines]
        self.gateways = [Gateway(self, f"gw{number}") for number in range(1, scenario.gateways + 1)]
        self.faults = Faults(self)
        self.operator = Operator(self)
        for process in (*self.planes, *self.agents, *self.gateways):
            self.timeline.after(self.rng.uniform(0.0, 1.0), process.start)
        self.faults.begin()
        self.operator.begin()

    def database_clock(self) -> float:
        return WALL_S + self.timeline.now

    def run(self, steps: int) -> None:
        """So many steps with faults, then without until everything is as it should be. Raises Violation."""
        step = self.timeline.step
        for _ in range(steps):
            step()
        Healing(self).run()

    # -- chance

    def chance(self, name: str) -> bool:
        return self.faulty and self.rng.random() < self.scenario.chances[name]

    def store_fault(self, process: ControlPlane) -> str | None:
        """What happens to one of its calls: "slow" or "late" (before or after it is done), or it fails likewise."""
        if process.name in self.store_down:
            return "before"
        if not self.faulty:
            return None
        if self.chance("store_slow"):
            return self.rng.choice(("slow", "late"))
        return self.rng.choice(("before", "after", "after")) if self.chance("store_fails") else None

    def prepare_s(self) -> float:
        """How long it takes until the weights are there."""
        return self.rng.uniform(5.0, 40.0) if self.chance("long_weights") else self.rng.uniform(0.01, 0.5)

    def request_gap_s(self) -> float:
        return self.rng.expovariate(1.0 / self.scenario.request_every_s)

    def stream_s(self) -> float:
        return self.rng.uniform(0.1, self.scenario.stream_s)

    # -- who is where

    def plane_at(self, url: str) -> ControlPlane:
        return next(plane for plane in self.planes if plane.url == url)

    def machine_at(self, address: str) -> Machine | None:
        return next((machine for machine in self.machines if machine.inventory.mgmt_addr == address), None)

    def leader(self) -> ControlPlane | None:
        """The control plane that leads by the store's word, if it runs."""
        for plane in self.planes:
            if plane.plane is not None and plane.alive and plane.plane.epoch == self.checks.epoch:
                return plane
        return None

    def group(self, replica: str, generation: int, size: int) -> Group:
        key = (replica, generation)
        if key not in self._groups:
            self._groups[key] = Group(self, size)
        return self._groups[key]

    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def next_request(self) -> int:
        self._requests += 1
        return self._requests

    def request_over(self, request: Request, how: str) -> None:
        del self.open_requests[request.number]
        self.ended_requests[how] += 1
