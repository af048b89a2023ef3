"""Machines and the engines on them, as they are, whatever anyone believes: GPUs held, ports bound, ranks that meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from llmgw.cluster.model import DesiredShard, Exit, Inventory

from .builds import ENGINE

if TYPE_CHECKING:
    from .agent import Agent
    from .gateway import Request
    from .world import World

START_LIMIT_S = 60.0
"""How long ranks wait for each other before they give up."""
ENDED_KEPT = 20
BROKEN = "--exit-at-start"
"""In a profile's arguments: the engine does not run with them."""


class Phase(Enum):
    LOADING = "loading"
    UP = "up"
    ENDED = "ended"


class Engine:
    """An engine's process group. Holds its GPUs and its block of ports until it has ended."""

    __slots__ = (
        "address",
        "exit",
        "group",
        "hung",
        "machine",
        "phase",
        "pid",
        "replica",
        "requests",
        "shard",
        "stopping",
        "world",
    )

    def __init__(self, world: World, machine: Machine, shard: DesiredShard) -> None:
        self.world = world
        self.machine = machine
        self.shard = shard
        self.replica = shard.id.rpartition("/")[0]
        self.address = machine.inventory.mgmt_addr
        """Where it listens: that of its machine when it was started."""
        self.pid = world.next_pid()
        self.phase = Phase.LOADING
        self.hung = False
        self.stopping = False
        """It was told to end."""
        self.exit: Exit | None = None
        self.requests: dict[Request, None] = {}
        self.group = world.group(self.replica, shard.generation, shard.profile.nodes)

    @property
    def live(self) -> bool:
        return self.phase is not Phase.ENDED

    @property
    def name(self) -> str:
        return f"{self.shard.id}#{self.shard.generation}"

    def begin(self) -> None:
        """The process has been started."""
        world = self.world
        broken = BROKEN in self.shard.profile.args or self.machine.sick or not self._serves()
        if broken or world.chance("exit_at_start"):
            world.timeline.after(world.rng.uniform(0.05, 1.0), self.end, Exit(status=1, last_lines=("bad flag",)))
            return
        self.group.join(self)
        world.timeline.after(START_LIMIT_S, self._give_up)

    def _serves(self) -> bool:
        profile = self.shard.profile
        if profile.engine != ENGINE or self.machine.id in self.world.builds.named:
            return True
        return self.world.builds.serves(profile.engine_version)

    def load(self) -> None:
        """All ranks have met: rank 0 loads and serves."""
        world = self.world
        slow = world.chance("slow_load")
        world.timeline.after(world.rng.uniform(20.0, 50.0) if slow else world.rng.uniform(0.1, 3.0), self._loaded)

    def _loaded(self) -> None:
        if self.phase is Phase.LOADING:
            self.phase = Phase.UP
            self.world.checks.up(self)
            self.machine.engine_changed(self)

    def _give_up(self) -> None:
        if self.phase is Phase.LOADING and not self.group.formed:
            self.end(Exit(status=1, last_lines=("the other ranks did not come",)))

    def hang(self) -> None:
        self.hung = True
        self.machine.engine_changed(self)

    def terminate(self) -> None:
        """SIGTERM, then SIGKILL: it ends after a while."""
        if self.live and not self.stopping:
            self.stopping = True
            world = self.world
            stuck = world.chance("stop_stuck")
            delay_s = world.rng.uniform(4.0, 20.0) if stuck else world.rng.uniform(0.02, 0.6)
            world.timeline.after(delay_s, self.end, Exit(signal="SIGTERM"))

    def end(self, exit: Exit) -> None:
        """The process group is gone, and with it what it held."""
        if not self.live:
            return
        self.phase, self.exit = Phase.ENDED, exit
        self.world.story.tell(self.machine.id, "engine {} ends: {}", self.name, exit)
        self.machine.gone(self)
        self.group.leave(self)
        requests, self.requests = self.requests, {}
        for request in requests:
            request.cut_off(reset=self.machine.powered)

    @property
    def healthy(self) -> bool:
        """Whether it would answer, once it is up."""
        return not self.hung and self.address == self.machine.inventory.mgmt_addr

    def answers(self) -> bool:
        """Whether a request that comes now is answered."""
        return self.phase is Phase.UP and self.healthy


class Group:
    """The ranks of one generation: they meet, then live and die together."""

    __slots__ = ("formed", "ranks", "size", "world")

    def __init__(self, world: World, size: int) -> None:
        self.world = world
        self.size = size
        self.ranks: dict[int, Engine] = {}
        self.formed = False

    def join(self, engine: Engine) -> None:
        self.ranks[engine.shard.rank] = engine
        self.meet()

    def meet(self) -> None:
        """Rank 0 loads once all ranks are there and reach each other."""
        if self.formed or len(self.ranks) < self.size:
            return
        leader = self.ranks[0]
        hosts = [engine.machine.host for engine in self.ranks.values()]
        if not all(self.world.wires.reach(leader.machine.host, host) for host in hosts):
            self.world.timeline.after(1.0, self.meet)
            return
        if all(engine.live for engine in self.ranks.values()):
            self.formed = True
            leader.load()

    def leave(self, engine: Engine) -> None:
        if not self.formed:
            if self.ranks.get(engine.shard.rank) is engine:
                del self.ranks[engine.shard.rank]
            return
        rng, wires = self.world.rng, self.world.wires
        for other in self.ranks.values():
            if other.live:
                closed = wires.reach(engine.machine.host, other.machine.host)
                delay_s = rng.uniform(0.02, 0.9) if closed else rng.uniform(2.0, 4.0)
                words = f"rank {engine.shard.rank} is gone"
                self.world.timeline.after(delay_s, other.end, Exit(status=1, last_lines=(words,)))

    def feel(self) -> None:
        """Ranks that no longer reach each other find out by their keep-alives."""
        if not self.formed:
            return
        leader = self.ranks[0]
        for rank, other in self.ranks.items():
            if rank and other.live and not self.world.wires.reach(leader.machine.host, other.machine.host):
                leader.end(Exit(status=1, last_lines=(f"rank {rank} is gone",)))
                return


@dataclass(slots=True)
class Remembered:
    """The agent's file about a shard."""

    shard: DesiredShard
    endpoint: str | None
    proved: bool = False


class Machine:
    """A node's hardware and its disk."""

    def __init__(self, world: World, inventory: Inventory) -> None:
        self.world = world
        self.id = inventory.hostname
        self.host = inventory.hostname
        self.inventory = inventory
        self.powered = True
        self.engines: list[Engine] = []
        self.remembered: dict[str, Remembered] = {}
        self.ended: dict[str, tuple[int, Exit]] = {}
        """By shard id: what the supervisor keeps of the last generation that ended, output and all."""
        self.installed: set[str] = set()
        """Versions of the engine that has versions."""
        self.spoiled: set[str] = set()
        """Of those the ones that do not run any more: a library was removed, say."""
        self.sick = False
        """Whatever is started here ends at its start, though nothing looks wrong."""
        self.squatted: set[int] = set()
        """Blocks of ports in which somebody else's process listens."""
        self.agent: Agent

    def spawn(self, shard: DesiredShard) -> Engine:
        engine = Engine(self.world, self, shard)
        self.world.checks.spawned(engine, self)
        self.ended.pop(shard.id, None)
        self.engines.append(engine)
        self.world.story.tell(self.id, "engine {} starts on GPUs {}", engine.name, shard.placement.gpus)
        engine.begin()
        return engine

    def engine(self, shard_id: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.shard.id == shard_id), None)

    def listener(self, port: int) -> Engine | None:
        """Who answers on a port: only rank 0 of what is up does."""
        for engine in self.engines:
            if engine.shard.placement.port == port and engine.shard.rank == 0 and engine.phase is Phase.UP:
                return engine
        return None

    def gone(self, engine: Engine) -> None:
        self.engines.remove(engine)
        assert engine.exit is not None
        self.ended[engine.shard.id] = (engine.shard.generation, engine.exit)
        while len(self.ended) > ENDED_KEPT:
            del self.ended[next(iter(self.ended))]
        self.engine_changed(engine)

    def engine_changed(self, engine: Engine) -> None:
        agent = self.agent
        if agent.alive:
            agent.after(self.world.rng.uniform(0.005, 0.25), agent.engine_changed, engine)

    def change(self, **changes: object) -> None:
        self.inventory = replace(self.inventory, **changes)  # type: ignore[arg-type]

    # -- power

    def power_off(self) -> None:
        if not self.powered:
            return
        self.powered = False
        self.world.story.tell(self.id, "power off")
        self.world.wires.dead.add(self.host)
        self.agent.kill(power=True)
        for engine in list(self.engines):
            engine.end(Exit())

    def power_on(self) -> None:
        if self.powered:
            return
        self.powered = True
        self.squatted.clear()
        self.world.story.tell(self.id, "power on")
        self.world.wires.dead.discard(self.host)
        self.world.wires.resume()
        self.world.timeline.after(self.world.rng.uniform(0.5, 5.0), self.agent.start)
