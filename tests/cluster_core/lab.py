"""A small cluster in which things go as they are told to: agents start and stop what they are asked to, gateways take
up tables and have requests in flight. Every step is checked: what must always hold, holds, and nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from llmgw.cluster import drain as drains
from llmgw.cluster.actions import Action, Note, PutDrain, RemoveDrain
from llmgw.cluster.beside import nodes_of
from llmgw.cluster.catalog import Catalog, EngineSpec, ModelSpec
from llmgw.cluster.engines import with_file
from llmgw.cluster.lifecycle import stands
from llmgw.cluster.model import (
    Cluster,
    DesiredShard,
    Drain,
    DrainState,
    EngineOnNode,
    Exit,
    Fabric,
    Gateway,
    Hca,
    Inventory,
    Move,
    Node,
    NodeState,
    ObservedShard,
    Replica,
    ReplicaState,
    ShardState,
    Traffic,
)
from llmgw.cluster.reconcile import apply, desired, next_wake_s, reconcile, routes
from llmgw.cluster.scaling import standing, wanted
from llmgw.store import codec

from .building import NOW, cluster, later, node


@dataclass
class Engine:
    """A shard as its agent has it."""

    asked: DesiredShard
    state: ShardState = ShardState.PREPARING
    port_taken: bool = False


@dataclass
class Door:
    """A gateway: which replicas it may send to, and what it has in flight at them."""

    connected: bool = True
    known: bool = True
    """False: the control plane that runs now has not heard of it yet."""
    heard_at_s: float = NOW.monotonic_s
    acknowledges: bool = True
    may_send: frozenset[str] = frozenset()
    in_flight: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)

    def seen(self, name: str) -> Gateway:
        replicas = self.in_flight.keys() | self.finished.keys()
        traffic = {
            key: Traffic(in_flight=self.in_flight.get(key, 0), finished=self.finished.get(key, 0)) for key in replicas
        }
        return Gateway(
            id=name,
            connected=self.connected,
            heard_at_s=self.heard_at_s,
            may_send=self.may_send if self.connected else None,
            traffic=traffic,
        )

    def finish(self, replica: str, number: int = 1) -> None:
        self.in_flight[replica] -= number
        self.finished[replica] = self.finished.get(replica, 0) + number


def on_fabric(name: str, *fabrics: str, gpus: int) -> Node:
    """A node with an adapter on each of the fabrics."""
    one = node(name, gpus=gpus)
    assert one.inventory is not None
    hcas = tuple(Hca(name=f"mlx5_{index}", port=1, state="ACTIVE") for index in range(len(fabrics)))
    stated = tuple(Fabric(name=fabric, hcas=(hca.name,)) for fabric, hca in zip(fabrics, hcas, strict=True))
    address = f"10.0.0.{name.removeprefix('n')}"
    return replace(one, inventory=replace(one.inventory, hcas=hcas, fabrics=stated, mgmt_addr=address))


class Lab:
    """Nodes, gateways and a control plane, driven by hand."""

    def __init__(
        self,
        nodes: Iterable[Node],
        models: Iterable[ModelSpec],
        doors: Iterable[str] = ("gw",),
        *,
        engines: Iterable[EngineSpec] = (),
    ) -> None:
        file = Catalog(models=tuple(models), engines=tuple(engines))
        self.state: Cluster = with_file(cluster(nodes), file, NOW)[0]
        self.now = NOW
        self.engines: dict[str, dict[str, Engine]] = {name: {} for name in self.state.nodes}
        self.doors = {name: Door() for name in doors}
        self.muted: set[str] = set()
        self.broken: Callable[[DesiredShard], bool] = lambda shard: False
        """Shards whose engine ends while it starts."""
        self.taken: Callable[[DesiredShard], bool] = lambda shard: False
        """Shards whose port is something else's."""
        self.slow: Callable[[DesiredShard], bool] = lambda shard: False
        """Shards whose engine goes on loading."""
        self.fetching: Callable[[DesiredShard], bool] = lambda shard: False
        """Shards whose weights are not there yet."""
        self.notes: list[Note] = []
        self.settle()

    # -- the control plane

    def settle(self) -> bool:
        """Reconcile once, check and apply. True where it changed something."""
        before = replace(self.state, gateways=self._gateways())
        actions = reconcile(before, self.now)
        self.state = apply(before, actions)
        again = reconcile(self.state, self.now)
        assert again == (), f"a step left something to do: {again}"
        self.notes += [action for action in actions if isinstance(action, Note)]
        self._check(before)
        return any(not isinstance(action, Note) for action in actions)

    def _gateways(self) -> dict[str, Gateway]:
        return {name: door.seen(name) for name, door in self.doors.items() if door.known}

    def _check(self, before: Cluster) -> None:
        self._no_gpu_twice()
        for model in {replica.model for replica in self.state.replicas.values()}:
            if self.state.catalog.model(model) is not None:
                assert len(standing(self.state, model)) == wanted(self.state, model), f"6: {model}"
            self._last_ready_stays(before, model)
        for replica in self.state.replicas.values():
            assert replica.why, f"12: {replica.id}"

    def _no_gpu_twice(self) -> None:
        held: set[tuple[str, str]] = set()
        for replica in self.state.replicas.values():
            for placement in replica.placements:
                if self.state.nodes[placement.node].state is NodeState.LOST:
                    continue
                for uuid in placement.gpu_uuids:
                    assert (placement.node, uuid) not in held, f"1: {replica.id} shares {uuid} on {placement.node}"
                    held.add((placement.node, uuid))

    def _last_ready_stays(self, before: Cluster, model: str) -> None:
        def ready(state: Cluster) -> set[str]:
            return {r.id for r in state.replicas.values() if r.model == model and r.state is ReplicaState.READY}

        left = {name for name in ready(before) if self._was_let_go(before.replicas[name])}
        if left and wanted(self.state, model) and not self._downtime_allowed(before, model, left):
            assert ready(self.state), f"8: {left} left, and no other replica of {model} is ready"

    def _was_let_go(self, before: Replica) -> bool:
        """True where it was taken away in this step, rather than that it ended by itself or was lost."""
        after = self.state.replicas.get(before.id)
        if after is None:
            return True
        ended = any(line.state == ReplicaState.FAILED.value for line in after.story[len(before.story) :])
        return not stands(after) and not after.lost and not ended

    def _downtime_allowed(self, before: Cluster, model: str, left: set[str]) -> bool:
        allowed = any(drain.force or model in drain.allow_downtime for drain in before.drains.values())
        return allowed or any(before.replicas[name].may_stop_first for name in left)

    def restart_control(self) -> None:
        """Kill it and start it from what it had stored. Agents and gateways are yet to come back."""
        replicas = {
            name: codec.REPLICAS.decode(name, codec.encode_replica(replica))
            for name, replica in self.state.replicas.items()
        }
        stored = {name: codec.DRAINS.decode(name, codec.encode_drain(d)) for name, d in self.state.drains.items()}
        nodes = {
            name: codec.without_session(codec.NODES.decode(name, codec.encode_node(each)))
            for name, each in self.state.nodes.items()
        }
        self.state = replace(
            self.state,
            nodes=nodes,
            replicas=replicas,
            drains=stored,
            gateways={},
            grace_until_s=self.now.monotonic_s + 30.0,
            tables_settled_at_s=self.now.monotonic_s + self.state.lease_s,
        )
        for door in self.doors.values():
            door.connected = door.known = False
        self.settle()

    def come_back(self) -> None:
        """All agents and gateways connect again."""
        for name in self.state.nodes:
            if self.state.nodes[name].session is None:
                self.connect(name)
        for door in self.doors.values():
            door.connected = door.known = True

    def drain(self, name: str, **options: object) -> Drain:
        """Plan, and carry it out if it may be."""
        planned = drains.plan(self.state, name, now=self.now, **options)  # type: ignore[arg-type]
        if drains.refusal(planned) is None:
            self.state = apply(self.state, [PutDrain(planned)])
            self.settle()
        return planned

    def undrain(self, name: str) -> None:
        self.state = apply(self.state, [RemoveDrain(name)])
        self.settle()

    def add(self, new: Node) -> None:
        """Another node connects."""
        self.engines[new.id] = {}
        new = replace(new, heard_at_s=self.now.monotonic_s)
        self.state = replace(self.state, nodes={**self.state.nodes, new.id: new})
        self.settle()

    def describe(self, name: str, inventory: Inventory | None) -> None:
        """A node says anew what it has."""
        self._node(name, inventory=inventory)
        self.settle()

    def edit(self, *models: ModelSpec, engines: Iterable[EngineSpec] = ()) -> None:
        file = Catalog(models=models, engines=tuple(engines))
        self.state, actions = with_file(self.state, file, self.now)
        self.notes += [action for action in actions if isinstance(action, Note)]
        self.settle()

    def carry_out(self, actions: Iterable[Action]) -> None:
        """What an operator asked for."""
        actions = tuple(actions)
        self.state = apply(self.state, actions)
        self.notes += [action for action in actions if isinstance(action, Note)]
        self.settle()

    def install(self, name: str, *engines: EngineOnNode) -> None:
        """A node says which engines it has now."""
        self._node(name, engines=engines)
        self.settle()

    # -- agents and gateways

    def connect(self, name: str) -> None:
        self._node(name, session=(self.state.nodes[name].session or 0) + 1, heard_at_s=self.now.monotonic_s)
        self._report(name)
        self.settle()

    def restart_agent(self, name: str) -> None:
        """What it had started runs on; what it was only preparing is forgotten, and asked of it again."""
        self.cut(name)
        self.engines[name] = {k: e for k, e in self.engines[name].items() if e.state is not ShardState.PREPARING}
        self.connect(name)

    def cut(self, name: str) -> None:
        """Its stream breaks. What runs there runs on."""
        self._node(name, session=None)
        self.settle()

    def mute(self, name: str) -> None:
        """Its stream stays open, and nothing comes over it."""
        self.muted.add(name)

    def hear(self, name: str) -> None:
        self.muted.discard(name)

    def lose(self, name: str, *, power: bool = False) -> None:
        """Cut it off until it is judged lost."""
        self.cut(name)
        if power:
            self.engines[name].clear()
        for _ in range(7):
            self.tick(5.0)
        assert self.state.nodes[name].state is NodeState.LOST

    def fail(self, replica_id: str, rank: int = 0) -> None:
        replica = self.state.replicas[replica_id]
        at = replica.placements[rank].node
        self.engines[at][replica.shard_id(rank)].state = ShardState.FAILED
        self._report(at)
        self.settle()

    def tick(self, seconds: float = 1.0) -> bool:
        """Time passes, and everyone that is connected gets one step on. True where something changed."""
        self.now = later(seconds, self.now)
        moved = False
        for name, each in self.state.nodes.items():
            if each.session is not None and name not in self.muted:
                moved = self._converge(name) or moved
                self._node(name, heard_at_s=self.now.monotonic_s)
                self._report(name)
        for door in self.doors.values():
            if door.connected:
                door.heard_at_s = self.now.monotonic_s
            if door.connected and door.acknowledges:
                door.may_send = frozenset(
                    endpoint.replica for route in routes(self.state) for endpoint in route.endpoints
                )
        return self.settle() or moved

    def run(self, *, at_most: int = 400) -> None:
        """Until nothing happens any more, also not when the next thing is due in less than an hour."""
        for _ in range(at_most):
            if not self.tick():
                wake = next_wake_s(replace(self.state, nodes={}), self.now)
                if wake is None or wake > self.now.monotonic_s + 3600.0:
                    return
                self.tick(max(min(wake - self.now.monotonic_s, 14.0), 0.0))
        raise AssertionError(f"11: not settled: {self.state.drains}, {list(self.state.replicas.values())}")

    def until(self, condition: Callable[[], bool], *, at_most: int = 100) -> None:
        for _ in range(at_most):
            if condition():
                return
            self.tick()
        raise AssertionError(f"never came: {self.state.drains}, {list(self.state.replicas.values())}")

    def _converge(self, name: str) -> bool:
        asked = {shard.id: shard for shard in desired(self.state, name)}
        here, moved = self.engines[name], False
        for key, engine in list(here.items()):
            wish = asked.get(key)
            if wish is None or wish.generation != engine.asked.generation:
                if engine.state in (ShardState.STOPPING, ShardState.FAILED, ShardState.PREPARING):
                    del here[key]
                else:
                    engine.state = ShardState.STOPPING
                moved = True
            else:
                engine.asked = wish
        for key, wish in asked.items():
            if key not in here:
                here[key] = Engine(wish)
                moved = True
            elif here[key].asked.generation == wish.generation:
                moved = self._advance(here[key]) or moved
        return moved

    def _advance(self, engine: Engine) -> bool:
        before = engine.state
        if engine.state is ShardState.PREPARING and engine.asked.go:
            engine.state = ShardState.STARTING
        elif engine.state is ShardState.STARTING and self.taken(engine.asked):
            engine.state, engine.port_taken = ShardState.FAILED, True
        elif engine.state is ShardState.STARTING and self.broken(engine.asked):
            engine.state = ShardState.FAILED
        elif engine.state is ShardState.STARTING and not self.slow(engine.asked):
            engine.state = ShardState.READY
        return engine.state is not before

    def _report(self, name: str) -> None:
        seen = [(_seen(engine), engine.asked) for _, engine in sorted(self.engines[name].items())]
        shards = tuple(replace(shard, prepared=shard.prepared and not self.fetching(asked)) for shard, asked in seen)
        self._node(name, shards=shards)

    def _node(self, name: str, **changes: object) -> None:
        nodes = {**self.state.nodes, name: replace(self.state.nodes[name], **changes)}  # type: ignore[arg-type]
        self.state = replace(self.state, nodes=nodes)

    # -- looking

    def replicas(self, model: str = "m") -> list[Replica]:
        return sorted((r for r in self.state.replicas.values() if r.model == model), key=lambda r: (r.number, r.id))

    def on(self, name: str, model: str = "m") -> list[Replica]:
        return [replica for replica in self.replicas(model) if name in nodes_of(replica)]

    def ready(self, model: str = "m") -> list[Replica]:
        return [replica for replica in self.replicas(model) if replica.state is ReplicaState.READY]

    def move(self, name: str, replica: str | None = None) -> Move:
        moves = self.state.drains[name].moves
        if replica is None:
            (move,) = moves
            return move
        return next(move for move in moves if move.replica == replica)

    def is_drained(self, name: str) -> bool:
        return self.state.nodes[name].state is NodeState.DRAINED and self.state.drains[name].state is DrainState.DONE

    def told(self, kind: str) -> list[str]:
        return [note.words for note in self.notes if note.kind == kind]


def _seen(engine: Engine) -> ObservedShard:
    ready = engine.state is ShardState.READY and engine.asked.rank == 0
    failed = engine.state is ShardState.FAILED and not engine.port_taken
    return ObservedShard(
        id=engine.asked.id,
        generation=engine.asked.generation,
        state=engine.state,
        since=NOW.wall_s,
        why=f"{engine.state.value} here",
        endpoint=f"10.0.0.1:{engine.asked.placement.port}" if ready else None,
        exit=Exit(status=1, last_lines=("no such layer",)) if failed else None,
        port_taken=engine.port_taken,
        prepared=engine.state is ShardState.PREPARING,
    )
