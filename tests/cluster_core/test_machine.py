"""Anything may happen to a cluster, in any order: what must hold, holds after every step, and it always recovers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llmgw.cluster import drain
from llmgw.cluster.catalog import Catalog, ModelSpec
from llmgw.cluster.model import EngineState, Exit, ReplicaState, ShardState
from tests.exploring import examples

from .building import engine, gpu, inventory, model, profile
from .world import Machine, Process, World

NAMES = ("n1", "n2", "n3", "n4")
DOORS = ("g1", "g2")
CHOICES: dict[str, tuple[ModelSpec, ...]] = {
    "cpu": (
        model("cpu", profile("small", memory_bytes=4 << 30), replicas=2),
        model("cpu", profile("large", memory_bytes=12 << 30), replicas=1),
        model("cpu", profile("far", node_selector={"rack": "r9"}), replicas=1),
    ),
    "gpu": (
        model("gpu", profile("two", gpus_per_node=2), profile("one", gpus_per_node=1), replicas=2),
        model("gpu", profile("one", gpus_per_node=1), replicas=3, aliases=("g",)),
    ),
    "real": (
        model(
            "real", profile("r12", "llamacpp", memory_bytes=2 << 30, node_selector={"rack": "r12"}), source="/m.gguf"
        ),
        model("real", profile("wide", "llamacpp", nodes=2), profile("any", "llamacpp"), source="/n.gguf"),
    ),
    "two": (
        model("two", profile("pair", nodes=2, gpus_per_node=1)),
        model("two", profile("pair", nodes=2, gpus_per_node=2), profile("alone", gpus_per_node=1), replicas=2),
    ),
}
START = tuple(versions[0] for versions in CHOICES.values())
EXITS = (Exit(status=1, last_lines=("no such file",)), Exit(signal="SIGKILL"), Exit(signal="SIGKILL", oom=True), Exit())
NEXT = {
    ShardState.WANTED: (ShardState.PREPARING,),
    ShardState.STARTING: (ShardState.LOADING, ShardState.READY),
    ShardState.LOADING: (ShardState.READY, ShardState.STARTING),
    ShardState.READY: (ShardState.LOADING,),
}


def fresh_machines() -> list[Machine]:
    racks = {"n1": "r11", "n2": "r12", "n3": "r12", "n4": "r11"}
    gpus = {"n1": 2, "n2": 4, "n3": 2, "n4": 3}
    fabrics = {"n1": ("ib-a",), "n2": ("ib-a", "ib-b"), "n3": ("ib-b",), "n4": ("ib-b",)}
    return [
        Machine(
            name,
            inventory(
                gpus=gpus[name],
                memory_gib=12.5,
                labels={"rack": racks[name]},
                ports="20000-20399",
                fabrics=fabrics[name],
                address=f"10.0.0.{name[1:]}",
            ),
            (engine("llamacpp"), engine("sim")),
        )
        for name in NAMES
    ]


class Anything(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(Catalog(models=START), fresh_machines(), DOORS)

    def _machine(self, name: str) -> Machine:
        return self.world.machines[name]

    def _processes(self, *states: ShardState) -> list[tuple[Machine, Process]]:
        return [
            (machine, process)
            for machine in self.world.machines.values()
            for _, process in sorted(machine.processes.items())
            if process.state in states and machine.powered
        ]

    def _one(self, pick: int, *states: ShardState) -> tuple[Machine, Process] | None:
        found = self._processes(*states)
        return found[pick % len(found)] if found else None

    @initialize(rounds=st.integers(0, 8))
    def begins(self, rounds: int) -> None:
        """Mostly from a cluster at work, so that random walks get far."""
        for machine in self.world.machines.values():
            if rounds:
                self.world.connect(machine)
                self.world.settle()
        for door in self.world.doors.values():
            self.world.open_door(door)
        self.things_go_well(rounds)

    # -- the ordinary course of things

    @rule(name=st.sampled_from(NAMES))
    def connects(self, name: str) -> None:
        machine = self._machine(name)
        if machine.powered:
            self.world.connect(machine)
            self.world.settle()

    @rule(name=st.sampled_from(NAMES))
    def takes_up(self, name: str) -> None:
        machine = self._machine(name)
        if machine.powered:
            machine.take_one(self.world.started)

    @rule(name=st.sampled_from(NAMES))
    def says(self, name: str) -> None:
        self._machine(name).send()

    @rule(name=st.sampled_from(NAMES))
    def is_heard(self, name: str) -> None:
        self.world.receive(self._machine(name))
        self.world.settle()

    @rule(rounds=st.integers(1, 8))
    def things_go_well(self, rounds: int) -> None:
        """Whoever is connected works on for a while."""
        for _ in range(rounds):
            for machine in self.world.machines.values():
                node = self.world.cluster.nodes.get(machine.id)
                if machine.powered and machine.session is not None and node is not None:
                    while machine.inbox:
                        machine.take_one(self.world.started)
                    for name, process in list(machine.processes.items()):
                        self.world._advance(machine, name, process)
                    machine.converge()
                    machine.send()
                    while machine.outbox:
                        self.world.receive(machine)
            for door in self.world.doors.values():
                while door.connected and door.tables:
                    self.world.take_table(door)
                self.world.finish(door, 0)
            self.world.tick(1.0)
            self.world.settle()

    @rule(pick=st.integers(0, 9), turn=st.integers(0, 1))
    def a_shard_gets_on(self, pick: int, turn: int) -> None:
        found = self._one(pick, *NEXT)
        if found is not None:
            _, process = found
            process.become(NEXT[process.state][turn % len(NEXT[process.state])])

    @rule(pick=st.integers(0, 9))
    def an_engine_starts(self, pick: int) -> None:
        found = self._one(pick, ShardState.PREPARING)
        if found is not None:
            self.world._get_ready(*found)

    @rule(pick=st.integers(0, 9))
    def an_engine_has_stopped(self, pick: int) -> None:
        found = self._one(pick, ShardState.STOPPING)
        if found is not None:
            machine, process = found
            del machine.processes[process.asked.id]
            machine.converge()

    @rule(seconds=st.sampled_from((0.5, 2.0, 10.0, 16.0, 40.0, 700.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)
        self.world.settle()

    # -- gateways

    @rule(name=st.sampled_from(DOORS), pick=st.integers(0, 9))
    def a_request_comes(self, name: str, pick: int) -> None:
        self.world.request(self.world.doors[name], pick)

    @rule(name=st.sampled_from(DOORS), pick=st.integers(0, 9))
    def a_request_is_done(self, name: str, pick: int) -> None:
        self.world.finish(self.world.doors[name], pick)
        self.world.settle()

    @rule(name=st.sampled_from(DOORS))
    def a_table_is_taken_up(self, name: str) -> None:
        self.world.take_table(self.world.doors[name])
        self.world.settle()

    @rule(name=st.sampled_from(DOORS))
    def a_gateway_is_cut_off(self, name: str) -> None:
        self.world.shut_door(self.world.doors[name])
        self.world.settle()

    @rule(name=st.sampled_from(DOORS))
    def a_gateway_connects(self, name: str) -> None:
        self.world.open_door(self.world.doors[name])
        self.world.settle()

    # -- what people do

    @rule(name=st.sampled_from(NAMES), options=st.sampled_from(({}, {"wait": True}, {"in_flight_s": 5.0})))
    def a_node_is_drained(self, name: str, options: dict[str, Any]) -> None:
        cluster = self.world.cluster
        if name in cluster.nodes:
            planned = drain.plan(cluster, name, now=self.world.now, **options)
            if drain.refusal(planned) is None:
                self.world.cluster = replace(cluster, drains={**cluster.drains, name: planned})
                self.world.settle()

    @rule(name=st.sampled_from(NAMES))
    def a_drain_is_taken_back(self, name: str) -> None:
        drains = {key: drain for key, drain in self.world.cluster.drains.items() if key != name}
        self.world.cluster = replace(self.world.cluster, drains=drains)
        self.world.settle()

    @rule()
    def the_brake_is_released(self) -> None:
        if self.world.cluster.brake is not None:
            self.world.cluster = replace(self.world.cluster, brake=replace(self.world.cluster.brake, released=True))
            self.world.settle()

    @rule(name=st.sampled_from(tuple(CHOICES)), replicas=st.sampled_from((0, 1, 2, 2, 3, 4)))
    def is_scaled(self, name: str, replicas: int) -> None:
        self.world.cluster = replace(self.world.cluster, scale={**self.world.cluster.scale, name: replicas})
        self.world.settle()

    @rule(names=st.sets(st.sampled_from(tuple(CHOICES))), version=st.integers(0, 2))
    def the_catalog_is_edited(self, names: set[str], version: int) -> None:
        models = tuple(CHOICES[name][version % len(CHOICES[name])] for name in sorted(names))
        self.world.cluster = replace(self.world.cluster, catalog=Catalog(models=models))
        self.world.settle()

    @rule(halting=st.booleans())
    def is_halted(self, halting: bool) -> None:
        self.world.cluster = replace(self.world.cluster, halting=halting)
        self.world.settle()

    # -- what goes wrong

    @rule(pick=st.integers(0, 9), exit=st.sampled_from(EXITS))
    def a_ready_shard_fails(self, pick: int, exit: Exit) -> None:
        found = self._one(pick, ShardState.READY)
        if found is not None:
            self.world.crash(found[1], exit)
            found[0].send()
            self.things_go_well(1)

    @rule(pick=st.integers(0, 9), exit=st.sampled_from(EXITS), port_taken=st.booleans())
    def a_shard_fails(self, pick: int, exit: Exit, port_taken: bool) -> None:
        found = self._one(pick, ShardState.PREPARING, ShardState.STARTING, ShardState.LOADING, ShardState.READY)
        if found is not None:
            self.world.crash(found[1], exit, port_taken=port_taken)

    @rule(name=st.sampled_from(NAMES), noticed=st.booleans())
    def a_stream_breaks(self, name: str, noticed: bool) -> None:
        self.world.disconnect(self._machine(name), noticed=noticed)
        self.world.settle()

    @rule(name=st.sampled_from(NAMES))
    def an_agent_is_killed(self, name: str) -> None:
        """Its engines live on; what it had not started yet is forgotten; it does not know its engines yet."""
        machine = self._machine(name)
        machine.processes = {key: process for key, process in machine.processes.items() if process.started}
        machine.probed = False
        self.world.disconnect(machine, noticed=True)
        self.world.settle()

    @rule(name=st.sampled_from(NAMES), away_s=st.sampled_from((3.0, 20.0, 35.0)), rounds=st.integers(0, 3))
    def a_node_is_cut_off_and_returns(self, name: str, away_s: float, rounds: int) -> None:
        """The others go on meanwhile, and may take over what it was running."""
        machine = self._machine(name)
        self.world.disconnect(machine, noticed=True)
        self.world.settle()
        self.world.tick(away_s)
        self.things_go_well(rounds)
        if machine.powered:
            self.world.connect(machine)
            self.world.settle()

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=2, max_size=3), away_s=st.sampled_from((20.0, 35.0, 80.0)))
    def nodes_are_cut_off_and_return_one_by_one(self, names: set[str], away_s: float) -> None:
        for name in sorted(names):
            self.world.disconnect(self._machine(name), noticed=True)
        self.world.settle()
        self.world.tick(away_s)
        self.things_go_well(2)
        for name in sorted(names, reverse=True):
            if self._machine(name).powered:
                self.world.connect(self._machine(name))
                self.world.settle()
                self.things_go_well(1)

    @rule(name=st.sampled_from(NAMES))
    def an_address_changes(self, name: str) -> None:
        machine = self._machine(name)
        machine.inventory = replace(machine.inventory, mgmt_addr=machine.inventory.mgmt_addr + "1")

    @rule(name=st.sampled_from(NAMES))
    def an_agent_has_probed(self, name: str) -> None:
        self._machine(name).probed = True

    @rule(name=st.sampled_from(NAMES), noticed=st.booleans())
    def a_node_loses_power(self, name: str, noticed: bool) -> None:
        self.world.power_off(self._machine(name), noticed=noticed)
        self._machine(name).probed = False
        self.world.settle()

    @rule(name=st.sampled_from(NAMES))
    def a_node_is_switched_on(self, name: str) -> None:
        self._machine(name).powered = True

    @rule(name=st.sampled_from(NAMES), broken=st.sets(st.integers(0, 3), max_size=2))
    def gpus_change(self, name: str, broken: set[int]) -> None:
        machine = self._machine(name)
        gpus = tuple(gpu(g.index, problem="GPU is lost" if g.index in broken else None) for g in machine.inventory.gpus)
        machine.inventory = replace(machine.inventory, gpus=gpus)

    @rule(
        name=st.sampled_from(NAMES),
        state=st.sampled_from((EngineState.FAILED, EngineState.DOWNLOADING, EngineState.INSTALLED)),
    )
    def engines_change(self, name: str, state: EngineState) -> None:
        self._machine(name).engines = (engine("llamacpp", state, "42 %"), engine("sim"))

    @rule(seconds=st.sampled_from((-600.0, 600.0)))
    def the_wall_clock_jumps(self, seconds: float) -> None:
        self.world.wall_s += seconds
        self.world.settle()

    @precondition(lambda self: self.world.cluster.nodes)
    @rule()
    def the_control_plane_is_killed(self) -> None:
        before = {name: replica.restarts for name, replica in self.world.cluster.replicas.items()}
        ready = {r.id for r in self.world.cluster.replicas.values() if r.state is ReplicaState.READY}
        self.world.restart_control()
        self.world.settle()
        replicas = self.world.cluster.replicas
        assert {name: replica.restarts for name, replica in replicas.items()} == before
        assert {r.id for r in replicas.values() if r.state is ReplicaState.READY} == ready

    def teardown(self) -> None:
        if not self.world.whole:
            return
        self.world.cluster = replace(self.world.cluster, halting=False, drains={})
        for machine in self.world.machines.values():
            machine.engines = (engine("llamacpp"), engine("sim"))
        self.world.heal(at_most=400)


TestAnything = Anything.TestCase
TestAnything.settings = settings(
    max_examples=examples(40),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
