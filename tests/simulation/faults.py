"""What goes wrong, at random: the network, the power, the processes, the engines, the clocks, the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from llmgw.cluster.model import Exit

from .control import ControlPlane
from .machine import Engine, Machine
from .process import Process

if TYPE_CHECKING:
    from .world import World


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        kinds: list[tuple[int, Callable[[], None]]] = [
            (10, self.reset_stream),
            (8, self.cut_node),
            (4, self.isolate_node),
            (2, self.cut_many),
            (4, self.cut_replica),
            (3, self.cut_gateway),
            (5, self.power_cut),
            (5, self.kill_agent),
            (3, self.stop_agent),
            (10, self.crash_engine),
            (3, self.hang_engine),
            (3, self.squat),
            (2, self.sicken),
            (5, self.kill_plane),
            (4, self.stop_plane),
            (3, self.shift_clock),
            (3, self.lose_store),
            (3, self.kill_gateway),
            (2, self.stop_gateway),
            (2, self.break_adapter),
            (1, self.break_gpu),
            (1, self.change_address),
            (4, self.slow_network),
            (1, self.second_machine),
        ]
        if world.builds.used:
            kinds.append((4, self.spoil_engine))
        self._weights = [weight for weight, _ in kinds]
        self._kinds = [kind for _, kind in kinds]

    def begin(self) -> None:
        self.world.timeline.after(self.rng.uniform(2.0, 8.0), self._next)

    def _next(self) -> None:
        if self.world.faulty:
            self.rng.choices(self._kinds, self._weights)[0]()
            self.world.timeline.after(self.rng.expovariate(1.0 / self.world.scenario.fault_every_s), self._next)

    def _tell(self, words: str, *arguments: object) -> None:
        self.world.story.tell("FAULT", words, *arguments)

    def _later(self, act: Callable[..., object], *arguments: object, most_s: float = 60.0) -> None:
        """The end of a fault: mostly soon, at times late."""
        rng = self.rng
        delay_s = rng.uniform(0.1, 5.0) if rng.random() < 0.4 else rng.uniform(5.0, most_s)
        self.world.timeline.after(delay_s, self._if_still_faulty, act, arguments)

    def _if_still_faulty(self, act: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if self.world.faulty:
            act(*arguments)

    def _machine(self) -> Machine:
        return self.rng.choice(self.world.machines)

    def _engine(self) -> Engine | None:
        engines = [engine for machine in self.world.machines for engine in machine.engines]
        return self.rng.choice(engines) if engines else None

    # -- the network

    def reset_stream(self) -> None:
        callers = [each for each in (*self.world.agents, *self.world.gateways) if each.stream is not None]
        if callers:
            caller = self.rng.choice(callers)
            assert caller.stream is not None
            self._tell("the stream of {} breaks", caller.name)
            caller.stream.reset("the connection broke")

    def _cut(self, pairs: list[frozenset[str]]) -> None:
        self.world.wires.cut(pairs)
        for group in self.world.groups():
            if group.formed:
                self.world.timeline.after(self.rng.uniform(2.0, 4.0), group.feel)
        self._later(self.world.wires.mend, pairs, most_s=90.0)

    def cut_node(self) -> None:
        """From the control planes alone: what it serves is reached as ever."""
        machine = self._machine()
        planes = self.world.planes
        some = planes if self.rng.random() < 0.7 else [self.rng.choice(planes)]
        self._tell("{} is cut off from {}", machine.id, " ".join(plane.name for plane in some))
        self._cut([frozenset((machine.host, plane.host)) for plane in some])

    def isolate_node(self) -> None:
        machine = self._machine()
        self._tell("{} is cut off from everything", machine.id)
        self._cut([frozenset((machine.host, host)) for host in self._hosts() if host != machine.host])

    def cut_many(self) -> None:
        """A switch fails: more than half of the nodes at once, or two of them."""
        count = max(2, self.rng.randint(2, len(self.world.machines)))
        machines = self.rng.sample(self.world.machines, count)
        self._tell("{} are cut off at once", " ".join(machine.id for machine in machines))
        self._cut([frozenset((machine.host, plane.host)) for machine in machines for plane in self.world.planes])

    def cut_replica(self) -> None:
        """All nodes of one replica from the control planes; they come back one after another."""
        groups = [group for group in self.world.groups() if group.formed and group.size > 1 and group.ranks[0].live]
        if not groups:
            return
        machines = [engine.machine for engine in self.rng.choice(groups).ranks.values()]
        self._tell("{} are cut off at once", " ".join(machine.id for machine in machines))
        for machine in machines:
            self._cut([frozenset((machine.host, plane.host)) for plane in self.world.planes])

    def cut_gateway(self) -> None:
        gateway = self.rng.choice(self.world.gateways)
        self._tell("{} is cut off from the control planes", gateway.name)
        self._cut([frozenset((gateway.host, plane.host)) for plane in self.world.planes])

    def slow_network(self) -> None:
        self.world.wires.latency_s = self.rng.choice((0.001, 0.002, 0.01, 0.1, 0.5, 1.0))
        self._tell("frames take {:g} s", self.world.wires.latency_s)

    def _hosts(self) -> list[str]:
        world = self.world
        machines = [machine.host for machine in world.machines]
        return [*machines, *(process.host for process in (*world.planes, *world.gateways))]

    # -- power and processes

    def power_cut(self) -> None:
        machine = self._machine()
        machine.power_off()
        self._later(machine.power_on, most_s=120.0)

    def _kill(self, process: Process) -> None:
        self._tell("{} is killed", process.name)
        process.kill()
        self._later(process.start, most_s=30.0)

    def _stop(self, process: Process) -> None:
        self._tell("{} is stopped", process.name)
        process.stop()
        self._later(self._go_on, process, most_s=60.0)

    def _go_on(self, process: Process) -> None:
        if process.stopped:
            self._tell("{} goes on", process.name)
            if isinstance(process, ControlPlane) and process.plane is not None:
                self.world.checks.went_on(process, self.world.timeline.now - process.stopped_at)
            process.go_on()

    def kill_agent(self) -> None:
        machine = self._machine()
        if self.world.chance("memory_lost") and machine.remembered:
            machine.remembered.pop(self.rng.choice(list(machine.remembered)))
        self._kill(machine.agent)

    def stop_agent(self) -> None:
        self._stop(self._machine().agent)

    def kill_plane(self) -> None:
        self._kill(self.rng.choice(self.world.planes))

    def stop_plane(self) -> None:
        self._stop(self.rng.choice(self.world.planes))

    def kill_gateway(self) -> None:
        self._kill(self.rng.choice(self.world.gateways))

    def stop_gateway(self) -> None:
        self._stop(self.rng.choice(self.world.gateways))

    def shift_clock(self) -> None:
        plane = self.rng.choice(self.world.planes)
        plane.wall_offset_s += self.rng.choice((-600.0, -30.0, 30.0, 600.0))
        self.world.checks.clock_set()
        self._tell("the wall clock of {} is {:+g} s off", plane.name, plane.wall_offset_s)

    def lose_store(self) -> None:
        plane = self.rng.choice(self.world.planes)
        self._tell("{} can't reach the store", plane.name)
        self.world.store_down.add(plane.name)
        self._later(self.world.store_down.discard, plane.name, most_s=20.0)

    def second_machine(self) -> None:
        """An image was copied: another machine comes with the name and certificate of one that is connected."""
        agent = self._machine().agent
        self._tell("from now on {} comes with another machine's fingerprint", agent.name)
        agent.fingerprint = f"machine-{self.rng.randrange(1000)}"

    # -- engines and hardware

    def crash_engine(self) -> None:
        engine = self._engine()
        if engine is not None:
            self._tell("engine {} on {} crashes", engine.name, engine.machine.id)
            engine.end(Exit(signal="SIGSEGV"))

    def hang_engine(self) -> None:
        engine = self._engine()
        if engine is not None:
            self._tell("engine {} on {} hangs", engine.name, engine.machine.id)
            engine.hang()

    def spoil_engine(self) -> None:
        """What is installed does not run any more. What was started from it goes on."""
        machine = self._machine()
        sound = sorted(machine.installed - machine.spoiled)
        if sound:
            version = self.rng.choice(sound)
            self._tell("{} of {} does not run any more", version, machine.id)
            machine.spoiled.add(version)
            self._look_again(machine)
            self._later(self._mend_engine, machine, version)

    def _mend_engine(self, machine: Machine, version: str) -> None:
        machine.spoiled.discard(version)
        self._look_again(machine)

    def sicken(self) -> None:
        machine = self._machine()
        self._tell("nothing starts on {} any more", machine.id)
        machine.sick = True
        self._later(self._recover, machine, most_s=300.0)

    def _recover(self, machine: Machine) -> None:
        machine.sick = False

    def squat(self) -> None:
        machine = self._machine()
        ports = machine.inventory.ports
        port = ports.first + 100 * self.rng.randrange(min(4, (ports.last - ports.first + 1) // 100))
        if machine.powered and all(engine.shard.placement.port != port for engine in machine.engines):
            self._tell("somebody listens on {} of {}", port, machine.id)
            machine.squatted.add(port)
            self._later(machine.squatted.discard, port)

    def break_adapter(self) -> None:
        machine = self._machine()
        if machine.inventory.hcas:
            name = self.rng.choice(machine.inventory.hcas).name
            self._tell("adapter {} of {} goes down", name, machine.id)
            self._set_adapter(machine, name, "DOWN")
            self._later(self._set_adapter, machine, name, "ACTIVE")

    def _set_adapter(self, machine: Machine, name: str, state: str) -> None:
        hcas = tuple(replace(hca, state=state) if hca.name == name else hca for hca in machine.inventory.hcas)
        machine.change(hcas=hcas)
        self._look_again(machine)

    def break_gpu(self) -> None:
        machine = self._machine()
        if machine.inventory.gpus:
            index = self.rng.choice(machine.inventory.gpus).index
            self._tell("GPU {} of {} falls off the bus", index, machine.id)
            self._set_gpu(machine, index, "GPU is lost")
            self._later(self._set_gpu, machine, index, None)

    def _set_gpu(self, machine: Machine, index: int, problem: str | None) -> None:
        gpus = tuple(replace(gpu, problem=problem) if gpu.index == index else gpu for gpu in machine.inventory.gpus)
        machine.change(gpus=gpus)
        self._look_again(machine)

    def change_address(self) -> None:
        """DHCP gives the node another one. What runs still listens at the old one, where nobody finds it."""
        machine = self._machine()
        number = self.rng.randrange(100, 250)
        if all(f"10.0.0.{number}" != other.inventory.mgmt_addr for other in self.world.machines):
            self._tell("{} has the address 10.0.0.{} now", machine.id, number)
            machine.change(mgmt_addr=f"10.0.0.{number}")
            self._look_again(machine)

    def _look_again(self, machine: Machine) -> None:
        agent = machine.agent
        if agent.alive:
            agent.after(self.rng.uniform(0.0, 5.0), agent.look_again)

    # -- the end of it

    def cease(self) -> None:
        """Everything works again."""
        world = self.world
        self._tell("everything works again from here on")
        world.faulty = False
        world.store_down.clear()
        world.wires.latency_s = 0.002
        for machine in world.machines:
            machine.sick = False
            machine.squatted.clear()
            machine.spoiled.clear()
            hcas = tuple(replace(hca, state="ACTIVE") for hca in machine.inventory.hcas)
            gpus = tuple(replace(gpu, problem=None) for gpu in machine.inventory.gpus)
            machine.change(hcas=hcas, gpus=gpus)
            self._look_again(machine)
            machine.power_on()
            for engine in machine.engines:
                if engine.hung:
                    engine.end(Exit(signal="SIGKILL"))
        world.wires.mend_all()
        for process in (*world.planes, *world.agents, *world.gateways):
            self._go_on(process)
            if not process.alive:
                world.timeline.after(self.rng.uniform(0.1, 2.0), process.start)
