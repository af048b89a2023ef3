"""A world in miniature: nodes with agents and engines, a stream that delays and loses, and a control plane's shell.

The shell does what the real one does with the core (persist, apply, send what changed), and checks every step.
Engines are physical here: the world knows which process holds which GPU and port, whatever anyone believes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from llmgw.cluster.actions import PutNode
from llmgw.cluster.catalog import Catalog
from llmgw.cluster.lifecycle import AWAY, EMPTIED, SHARD_CHANGES
from llmgw.cluster.model import (
    PORT_BLOCK,
    Cluster,
    DesiredShard,
    EngineOnNode,
    Exit,
    Gateway,
    Instant,
    Inventory,
    Node,
    NodeState,
    ObservedShard,
    ReplicaState,
    ShardState,
    Traffic,
)
from llmgw.cluster.reconcile import apply, desired, next_wake_s, reconcile, routes

from .invariants import broken, violations

GRACE_S = 30.0
HOLDING = {ShardState.STARTING, ShardState.LOADING, ShardState.READY, ShardState.STOPPING}


@dataclass
class Process:
    """A shard as its agent has it."""

    asked: DesiredShard
    state: ShardState = ShardState.WANTED
    exit: Exit | None = None
    port_taken: bool = False
    started: bool = False
    prepared: bool = False

    def become(self, state: ShardState) -> None:
        assert state in SHARD_CHANGES[self.state], f"{self.state} -> {state}"
        self.state = state

    def report(self) -> ObservedShard:
        return ObservedShard(
            id=self.asked.id,
            generation=self.asked.generation,
            state=self.state,
            since=0.0,
            why=f"{self.state.value} here",
            endpoint=self._endpoint(),
            prepared=self.prepared and self.state is ShardState.PREPARING,
            exit=self.exit,
            port_taken=self.port_taken,
        )

    def _endpoint(self) -> str | None:
        serves = self.state is ShardState.READY and self.asked.rank == 0
        return f"127.0.0.1:{self.asked.placement.port}" if serves else None


@dataclass
class Door:
    """A gateway: tables that are on their way to it, the one that it goes by, and its requests in flight."""

    id: str
    connected: bool = False
    tables: deque[frozenset[str]] = field(default_factory=deque)
    may_send: frozenset[str] = frozenset()
    in_flight: Counter[str] = field(default_factory=Counter)

    def traffic(self) -> dict[str, Traffic]:
        return {name: Traffic(in_flight=number) for name, number in self.in_flight.items() if number}


@dataclass
class Machine:
    """A node and its agent. Survives what a real one survives: its disk remembers which shards it was running."""

    id: str
    inventory: Inventory
    engines: tuple[EngineOnNode, ...]
    powered: bool = True
    session: int | None = None
    probed: bool = True
    revision: int = 0
    processes: dict[str, Process] = field(default_factory=dict)
    wanted: dict[str, DesiredShard] = field(default_factory=dict)
    told: bool = False
    """A desired state has come in this session; nothing starts or stops before."""
    inbox: deque[tuple[int, int, tuple[DesiredShard, ...]]] = field(default_factory=deque)
    outbox: deque[tuple[int, int, tuple[ObservedShard, ...], bool]] = field(default_factory=deque)

    def take_one(self, started: Counter[tuple[str, int]]) -> None:
        """Take up the oldest desired state that has arrived."""
        if not self.inbox:
            return
        session, revision, shards = self.inbox.popleft()
        if session != self.session:
            return
        self.wanted, self.revision, self.told = {shard.id: shard for shard in shards}, revision, True
        self.converge()

    def converge(self) -> None:
        if not self.told:
            return
        for name, process in list(self.processes.items()):
            asked = self.wanted.get(name)
            if asked is None or asked.generation != process.asked.generation:
                if process.state is ShardState.FAILED or not process.started:
                    del self.processes[name]
                elif process.state is not ShardState.STOPPING:
                    process.become(ShardState.STOPPING)
        for name, asked in self.wanted.items():
            process = self.processes.setdefault(name, Process(asked))
            if process.asked.generation == asked.generation:
                process.asked = asked

    def send(self) -> None:
        if self.session is not None and self.powered:
            self.outbox.append((self.session, self.revision, self.reports(), self.probed))

    def reports(self) -> tuple[ObservedShard, ...]:
        return tuple(process.report() for _, process in sorted(self.processes.items()))

    def holders(self) -> list[Process]:
        return [process for process in self.processes.values() if process.state in HOLDING]


class World:
    def __init__(self, catalog: Catalog, machines: list[Machine], doors: Iterable[str] = ()) -> None:
        self.wall_s, self.monotonic_s = 1_700_000_000.0, 1000.0
        self.machines = {machine.id: machine for machine in machines}
        self.doors = {name: Door(name) for name in doors}
        self.started: Counter[tuple[str, int]] = Counter()
        self.table: frozenset[str] = frozenset()
        self.sent: dict[str, tuple[int, tuple[DesiredShard, ...]]] = {}
        self.sessions = 0
        self.whole = True
        """False once a check has failed: what comes after proves nothing."""
        self.cluster = Cluster(name="lab", secret="secret", catalog=catalog, grace_until_s=self.monotonic_s + GRACE_S)
        self.settle()

    @property
    def now(self) -> Instant:
        return Instant(self.wall_s, self.monotonic_s)

    # -- the control plane's shell

    def settle(self) -> int:
        """Decide, check, apply and send. Returns how many actions were taken."""
        now, before = self.now, self.cluster
        self.whole = False
        actions = reconcile(before, now)
        assert repr(actions) == repr(reconcile(_shuffled(before), now)), "10: the order of a mapping decided something"
        self.cluster = apply(before, actions)
        again = reconcile(self.cluster, now)
        assert again == (), f"11: a step left something to do: {again}, after {actions}"
        self._check(before)
        self._send()
        self.whole = True
        return len(actions)

    def _check(self, before: Cluster) -> None:
        assert (found := violations(self.cluster)) == [], found
        assert (found := broken(before, self.cluster, self.now)) == [], found
        wake = next_wake_s(self.cluster, self.now)
        assert wake is None or wake > self.monotonic_s

    def _send(self) -> None:
        self._send_tables()
        for name, machine in self.machines.items():
            node = self.cluster.nodes.get(name)
            if node is None or node.session is None:
                continue
            shards = desired(self.cluster, name)
            revision, sent = self.sent.get(name, (0, ()))
            if revision and shards == sent:
                continue
            self._check_may_start(node, shards, sent)
            self.sent[name] = (revision + 1, shards)
            self._put(replace(node, caught_up=False))
            if machine.session == node.session:
                machine.inbox.append((node.session, revision + 1, shards))

    def _send_tables(self) -> None:
        self.table = frozenset(endpoint.replica for route in routes(self.cluster) for endpoint in route.endpoints)
        for door in self.doors.values():
            known = self.cluster.gateways.get(door.id)
            if door.connected and known is not None and (not door.tables or door.tables[-1] != self.table):
                door.tables.append(self.table)
                if known.may_send is not None:
                    self._put_door(replace(known, may_send=known.may_send | self.table))

    def _put_door(self, known: Gateway) -> None:
        self.cluster = replace(self.cluster, gateways={**self.cluster.gateways, known.id: known})

    def _check_may_start(self, node: Node, shards: tuple[DesiredShard, ...], sent: tuple[DesiredShard, ...]) -> None:
        for shard in shards:
            seen = node.shard(shard.id)
            new = shard not in sent and (seen is None or seen.generation != shard.generation)
            if new:
                assert node.probed, f"7: {shard.id} starts on {node.id}, which is not probed"
                assert node.state not in (*AWAY, *EMPTIED, NodeState.JOINING), (
                    f"7: {shard.id} starts on {node.id}: {node.state}"
                )

    def _put(self, node: Node) -> None:
        self.cluster = apply(self.cluster, [PutNode(node)])

    def receive(self, machine: Machine) -> None:
        """Fold the oldest report that has arrived."""
        if not machine.outbox:
            return
        session, revision, shards, probed = machine.outbox.popleft()
        node = self.cluster.nodes.get(machine.id)
        if node is None or node.session != session:
            return
        caught_up = revision >= self.sent[machine.id][0]
        self._put(
            replace(
                node,
                heard_at_s=self.monotonic_s,
                shards=shards,
                probed=probed,
                inventory=machine.inventory,
                engines=machine.engines if probed else node.engines,
                caught_up=caught_up,
            )
        )

    def connect(self, machine: Machine) -> None:
        self.sessions += 1
        machine.session, machine.revision, machine.told = self.sessions, 0, False
        machine.inbox.clear()
        machine.outbox.clear()
        self.sent.pop(machine.id, None)
        old = self.cluster.nodes.get(machine.id) or Node(id=machine.id, state=NodeState.JOINING, since=self.wall_s)
        self._put(
            replace(
                old,
                session=machine.session,
                heard_at_s=self.monotonic_s,
                shards=machine.reports(),
                probed=machine.probed,
                inventory=machine.inventory,
                engines=machine.engines if machine.probed else old.engines,
                caught_up=True,
            )
        )

    def disconnect(self, machine: Machine, *, noticed: bool) -> None:
        """The stream breaks; unnoticed, the control plane finds out by silence alone."""
        machine.session = None
        machine.inbox.clear()
        machine.outbox.clear()
        node = self.cluster.nodes.get(machine.id)
        if noticed and node is not None:
            self._put(replace(node, session=None))

    # -- gateways

    def open_door(self, door: Door) -> None:
        """A gateway connects; it goes by the table that it has until it has taken up one of this session."""
        door.connected = True
        door.tables.clear()
        self._put_door(Gateway(id=door.id, connected=True, heard_at_s=self.monotonic_s))

    def take_table(self, door: Door) -> None:
        """It takes up the oldest table on its way, and says so, with what it has in flight."""
        known = self.cluster.gateways.get(door.id)
        if not door.connected or known is None or not door.tables:
            return
        door.may_send = door.tables.popleft()
        may_send = door.may_send.union(*door.tables)
        self._put_door(replace(known, may_send=may_send, heard_at_s=self.monotonic_s, traffic=door.traffic()))

    def request(self, door: Door, pick: int) -> None:
        """A request is sent on, by the table that the gateway goes by."""
        if door.may_send:
            door.in_flight[sorted(door.may_send)[pick % len(door.may_send)]] += 1
            self._tell_traffic(door)

    def finish(self, door: Door, pick: int) -> None:
        under_way = sorted(door.in_flight.elements())
        if under_way:
            door.in_flight[under_way[pick % len(under_way)]] -= 1
            self._tell_traffic(door)

    def _tell_traffic(self, door: Door) -> None:
        known = self.cluster.gateways.get(door.id)
        if door.connected and known is not None and known.may_send is not None:
            self._put_door(replace(known, traffic=door.traffic(), heard_at_s=self.monotonic_s))

    def shut_door(self, door: Door) -> None:
        """Its stream breaks: it goes on by its last table for no longer than its lease."""
        door.connected = False
        door.tables.clear()
        known = self.cluster.gateways.get(door.id)
        if known is not None:
            self._put_door(replace(known, connected=False, heard_at_s=self.monotonic_s))

    def restart_control(self) -> None:
        """Kill it and start it from what it had stored."""
        nodes = {
            name: replace(node, session=None, vitals=None, heard_at_s=0.0, shards=(), caught_up=True)
            for name, node in self.cluster.nodes.items()
        }
        replicas = {
            name: replace(replica, drained_from_s=0.0, drained_by_s=0.0, whole_by_s=0.0)
            for name, replica in self.cluster.replicas.items()
        }
        self.cluster = replace(
            self.cluster,
            nodes=nodes,
            replicas=replicas,
            gateways={},
            brake=None,
            grace_until_s=self.monotonic_s + GRACE_S,
            tables_settled_at_s=self.monotonic_s + self.cluster.lease_s,
        )
        self.sent.clear()
        for door in self.doors.values():
            self.shut_door(door)
        for machine in self.machines.values():
            self.disconnect(machine, noticed=True)

    # -- the machines

    def begin(self, machine: Machine, process: Process) -> None:
        """The engine's process starts; it must find its GPUs and ports free."""
        key = (process.asked.id, process.asked.generation)
        self.started[key] += 1
        assert self.started[key] == 1, f"5: {key} is started again"
        for other in machine.holders():
            shared = set(process.asked.placement.gpu_uuids) & set(other.asked.placement.gpu_uuids)
            assert not shared, f"1: {key} finds {shared} held by {other.asked.id} {other.asked.generation}"
            apart = abs(process.asked.placement.port - other.asked.placement.port)
            assert apart >= PORT_BLOCK, f"1: {key} finds its ports held by {other.asked.id}"
        assert process.asked.go, f"5: {key} starts before it was told to"
        process.started = True
        process.become(ShardState.STARTING)

    def crash(self, process: Process, exit: Exit, *, port_taken: bool = False) -> None:
        process.become(ShardState.FAILED)
        process.exit, process.port_taken = exit, port_taken

    def power_off(self, machine: Machine, *, noticed: bool) -> None:
        machine.powered = False
        self.disconnect(machine, noticed=noticed)
        for name, process in list(machine.processes.items()):
            if not process.started or process.state is ShardState.STOPPING:
                del machine.processes[name]
            elif process.state is not ShardState.FAILED:
                self.crash(process, Exit())

    def tick(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds

    # -- with the faults stopped

    def heal(self, *, at_most: int) -> None:
        """Everything works from here on; the wished state must be reached within so many rounds, and then stay."""
        quiet = 0
        for _ in range(at_most):
            for machine in self.machines.values():
                self._heal_machine(machine)
            for door in self.doors.values():
                self._heal_door(door)
            # In longer and longer strides while nothing happens, past every backoff.
            self.tick(min(1.0 + quiet * quiet, 14.0))
            quiet = quiet + 1 if self.settle() == 0 else 0
            if quiet >= 12:
                self._check_wished()
                return
        raise AssertionError(f"11: not settled after {at_most} rounds: {self.cluster.replicas}")

    def _heal_machine(self, machine: Machine) -> None:
        machine.powered = machine.probed = True
        node = self.cluster.nodes.get(machine.id)
        if machine.session is None or node is None or node.session != machine.session:
            self.connect(machine)
            self.settle()
        while machine.inbox:
            machine.take_one(self.started)
        machine.converge()
        for name, process in list(machine.processes.items()):
            self._advance(machine, name, process)
        machine.converge()
        machine.send()
        while machine.outbox:
            self.receive(machine)

    def _heal_door(self, door: Door) -> None:
        if not door.connected:
            self.open_door(door)
            self.settle()
        while door.tables:
            self.take_table(door)
        door.in_flight.clear()
        self._tell_traffic(door)

    def _advance(self, machine: Machine, name: str, process: Process) -> None:
        steps: dict[ShardState, Callable[[], None]] = {
            ShardState.WANTED: lambda: process.become(ShardState.PREPARING),
            ShardState.PREPARING: lambda: self._get_ready(machine, process),
            ShardState.STARTING: lambda: process.become(ShardState.LOADING),
            ShardState.LOADING: lambda: process.become(ShardState.READY),
            ShardState.STOPPING: lambda: machine.processes.__delitem__(name),
        }
        if process.state in steps:
            steps[process.state]()

    def _get_ready(self, machine: Machine, process: Process) -> None:
        if process.asked.go:
            self.begin(machine, process)
        else:
            process.prepared = True

    def _check_wished(self) -> None:
        running = {process.asked.id for machine in self.machines.values() for process in machine.processes.values()}
        for replica in self.cluster.replicas.values():
            assert replica.state in (ReplicaState.READY, ReplicaState.UNPLACED), (
                f"11: {replica.id} is {replica.state}: {replica.why}"
            )
            ranks = range(len(replica.placements)) if replica.state is ReplicaState.READY else ()
            for rank in ranks:
                assert replica.shard_id(rank) in running, f"11: {replica.id} is ready, and rank {rank} runs nowhere"
                running.remove(replica.shard_id(rank))
        assert not running, f"11: {running} still run and should not"


def _shuffled(cluster: Cluster) -> Cluster:
    """The same cluster, with its mappings in another order."""
    return replace(
        cluster,
        nodes=_backwards(cluster.nodes),
        replicas=_backwards(cluster.replicas),
        scale=_backwards(cluster.scale),
        replicas_made=_backwards(cluster.replicas_made),
        gateways=_backwards(cluster.gateways),
        drains=_backwards(cluster.drains),
    )


T = TypeVar("T")


def _backwards(mapping: Mapping[str, T]) -> dict[str, T]:
    return dict(reversed(list(mapping.items())))
