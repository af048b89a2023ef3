"""What must always hold, checked against the physical world, the committed state, and what is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from llmgw.cluster.lifecycle import AWAY, ENDED
from llmgw.cluster.model import (
    PORT_BLOCK,
    Cluster,
    DrainState,
    EngineHistory,
    Node,
    NodeState,
    Placement,
    Replica,
    ReplicaState,
)
from llmgw.cluster.reconcile import reconcile
from llmgw.cluster.scaling import wanted
from llmgw.control.plane import STALL_S, TICK_S, Plane
from llmgw.link.messages import Desired, Routes, Welcome
from llmgw.store.base import Change, Lead

from .builds import ENGINE
from .machine import Engine, Machine
from .story import Violation

if TYPE_CHECKING:
    from .agent import Agent, Caller
    from .control import ControlPlane, SimPeer
    from .gateway import Gateway, Request
    from .world import World

_R = ReplicaState
LIVE = frozenset({_R.PLACING, _R.PREPARING, _R.STARTING, _R.READY})
LEAVING = frozenset({_R.DRAINING, _R.STOPPING})
DEAR_EVERY = 16
"""Turns between two checks that ask reconcile again."""
BRAKE_WINDOW_S = 60.0
SLACK_S = 1e-6

T = TypeVar("T")


class Checks:
    def __init__(self, world: World) -> None:
        self.world = world
        self.counted: Counter[str] = Counter()
        self.replicas: dict[str, Replica] = {}
        """As they were last committed."""
        self.engines: dict[str, EngineHistory] = {}
        """As they were last committed."""
        self.epoch = 0
        self._started: set[tuple[str, int]] = set()
        self._prepared: set[tuple[str, int]] = set()
        self._refused: set[tuple[str, int]] = set()
        self._readied: set[tuple[str, int]] = set()
        self._sent: dict[str, set[tuple[str, int]]] = {}
        self._asked: dict[str, int] = {}
        """By replica: the highest generation that was asked of a node."""
        self._excused: dict[str, set[str]] = {}
        """By replica: nodes that were away when a generation of it was placed, so that an older one may live there."""
        self._newest: dict[str, int] = {}
        """By peer and life: the newest epoch it was welcomed with."""
        self._heard: dict[str, dict[str, float]] = {}
        self._heard_before: dict[str, float] = {}
        self._before: dict[str, Cluster] = {}
        self._fresh_at: dict[str, float] = {}
        self._lost_at: dict[str, float] = {}
        self._turns = 0

    # -- on the nodes

    def spawned(self, engine: Engine, machine: Machine) -> None:
        shard, placement = engine.shard, engine.shard.placement
        key = (shard.id, shard.generation)
        if key in self._started:
            raise Violation("5", f"{engine.name} is started a second time")
        self._started.add(key)
        self.counted["engines"] += 1
        self._has_version(engine, machine)
        uuids = set(placement.gpu_uuids)
        stated = shard.profile.gpus_per_node
        if len(uuids) != stated:
            raise Violation("4", f"{engine.name} has {len(uuids)} GPUs, its profile says {stated}")
        for other in machine.engines:
            theirs = other.shard.placement
            shared = uuids & set(theirs.gpu_uuids)
            if shared:
                raise Violation("1", f"{engine.name} and {other.name} share {shared} on {machine.id}")
            apart = abs(placement.port - theirs.port)
            if apart < PORT_BLOCK:
                raise Violation("1", f"{engine.name} and {other.name} share ports on {machine.id}")
        for rank in range(shard.profile.nodes if shard.profile.nodes > 1 else 0):
            other_key = (f"{engine.replica}/{rank}", shard.generation)
            if other_key not in self._prepared:
                raise Violation("5", f"{engine.name} starts, and rank {rank} is not prepared yet")
        excused = self._excused.get(engine.replica, ())
        for elsewhere in self.world.machines:
            for other in elsewhere.engines:
                older = other.replica == engine.replica and other.shard.generation < shard.generation
                if older and elsewhere.id not in excused:
                    raise Violation("5", f"{engine.name} starts while {other.name} still runs on {elsewhere.id}")

    def _has_version(self, engine: Engine, machine: Machine) -> None:
        profile = engine.shard.profile
        if profile.engine != ENGINE:
            return
        self.counted["engines of a version"] += 1
        if machine.id not in self.world.builds.named and profile.engine_version not in machine.installed:
            raise Violation(
                "version", f"{engine.name} starts on {machine.id}, which has not {profile.engine_version!r} installed"
            )

    def refused(self, shard_id: str, generation: int) -> None:
        self._refused.add((shard_id, generation))

    def prepared(self, shard_id: str, generation: int) -> None:
        self._prepared.add((shard_id, generation))

    def up(self, engine: Engine) -> None:
        self.counted["engines that came up"] += 1

    def proved(self, engine: Engine) -> None:
        self._readied.add((engine.shard.id, engine.shard.generation))

    def stopped_by_agent(self, engine: Engine) -> None:
        """What is committed must agree that it should not run any more."""
        replica = self.replicas.get(engine.replica)
        if replica is None or replica.generation != engine.shard.generation:
            return
        if replica.state in LIVE or replica.state is _R.DRAINING:
            raise Violation(
                "stop", f"{engine.name} is stopped on {engine.machine.id}, and is {replica.state.value}: {replica.why}"
            )
        if replica.lost:
            raise Violation(
                "verdict",
                f"{engine.name} is stopped on {engine.machine.id} before it is known whether it is taken up again",
            )

    def welcomed(self, caller: Caller, welcome: Welcome) -> None:
        life = f"{caller.name}#{caller.boots}"
        newest = self._newest.get(life, 0)
        if welcome.epoch < newest:
            raise Violation("9", f"{caller.name} was welcomed with {newest}, then {welcome.epoch}")
        self._newest[life] = welcome.epoch

    def desired_taken(self, agent: Agent, frame: Desired) -> None:
        life = f"{agent.name}#{agent.boots}"
        newest = self._newest.get(life, 0)
        if frame.epoch != newest:
            raise Violation("9", f"{agent.name} takes epoch {frame.epoch}, and has seen {newest}")

    def asked(self, gateway: Gateway, request: Request, engine: Engine) -> None:
        if engine.replica == request.replica:
            return
        self.counted["requests at a port that has another engine"] += 1
        leader = self.world.leader()
        if leader is None or leader.stopped or gateway.table is None or gateway.stream not in leader.streams:
            return
        if gateway.table.version == leader.desk.table_version and _names(gateway.table, request):
            raise Violation("3", f"{request.replica} is routed to a port at which {engine.name} listens")

    # -- at the store

    def leads(self, process: ControlPlane, lead: Lead) -> None:
        if lead.epoch <= self.epoch:
            raise Violation("9", f"epoch {lead.epoch} follows {self.epoch}")
        self.epoch = lead.epoch
        self.counted["leaders"] += 1
        self._heard[process.name] = {}
        self._fresh_at[process.name] = process.clock().monotonic_s
        self._before.pop(process.name, None)

    def written(self, process: ControlPlane, epoch: int, change: Change) -> None:
        if epoch != self.epoch:
            raise Violation("9", f"{process.name} writes with epoch {epoch}, {self.epoch} leads")
        self.counted["commits"] += 1
        for event in change.events:
            process.tell("{}: {}", event.kind, event.words)
        for replica in change.replicas:
            asked = self._asked.get(replica.id, 0)
            if replica.generation < asked:
                raise Violation(
                    "9", f"{replica.id} goes back to generation {replica.generation}, and {asked} was asked for"
                )
            self.replicas[replica.id] = replica
        for name in change.removed_replicas:
            self.replicas.pop(name, None)
        for history in change.engines:
            self.engines[history.name] = history
            self.counted["rollbacks"] += bool(history.rolled_back)

    # -- what is sent

    def heard(self, process: ControlPlane, peer: SimPeer) -> None:
        if peer.role == "node":
            self._heard[process.name][peer.id] = process.clock().monotonic_s

    def went_on(self, process: ControlPlane, paused_s: float) -> None:
        """It was stopped for a while: if for long, it can't judge who was silent meanwhile."""
        if paused_s > TICK_S + STALL_S:
            self._fresh_at[process.name] = process.clock().monotonic_s

    def clock_set(self) -> None:
        """What was lost before by the wall clock is not known to be recent any more."""
        self._lost_at.clear()

    def sent(self, process: ControlPlane, peer: SimPeer, frame: Any) -> None:
        if isinstance(frame, Desired):
            self._desired_sent(process, peer, frame)
        elif isinstance(frame, Routes):
            self._routes_sent(process, frame)

    def _desired_sent(self, process: ControlPlane, peer: SimPeer, frame: Desired) -> None:
        assert process.plane is not None
        sent = self._sent.setdefault(peer.id, set())
        node = process.plane.cluster.nodes.get(peer.id)
        builds = {(spec.name, spec.version) for spec in frame.engines}
        for shard in frame.shards:
            profile = shard.profile
            if profile.engine == ENGINE and (profile.engine, profile.engine_version) not in builds:
                raise Violation("version", f"{peer.id} is asked for {shard.id} without {profile.engine_version!r}")
            key = (shard.id, shard.generation)
            if key in sent:
                continue
            if node is None or not node.probed or node.state in (*AWAY, NodeState.JOINING):
                raise Violation(
                    "7", f"{shard.id} is asked of {peer.id}, which is {node.state.value if node else 'not known'}"
                )
            sent.add(key)
            replica_id = shard.id.rpartition("/")[0]
            self._asked[replica_id] = max(shard.generation, self._asked.get(replica_id, 0))

    def _routes_sent(self, process: ControlPlane, frame: Routes) -> None:
        assert process.plane is not None
        cluster = process.plane.cluster
        for route in frame.routes:
            for endpoint in route.endpoints:
                replica = cluster.replicas.get(endpoint.replica)
                if replica is None:
                    raise Violation("3", f"{endpoint.replica} is routed and not known")
                assert replica is not None
                if replica.state is not _R.READY:
                    raise Violation("3", f"{replica.id} is routed, and is {replica.state.value}")
                self._routed(process, cluster, replica)

    def _routed(self, process: ControlPlane, cluster: Cluster, replica: Replica) -> None:
        name, generation = replica.id, replica.generation
        ranks = replica.profile.nodes if replica.profile is not None else 1
        if len(replica.placements) != ranks:
            raise Violation("3", f"{name} is routed with {len(replica.placements)} ranks")
        for rank, placement in enumerate(replica.placements):
            key = (replica.shard_id(rank), generation)
            if rank <= 0 and key not in self._readied:
                raise Violation("3", f"{key} is routed, and was never ready")
            if key not in self._started:
                raise Violation("3", f"{key} is routed, and was never started")
            node = cluster.nodes.get(placement.node)
            if ranks != 1 and placement.node not in self._heard[process.name]:
                raise Violation("3", f"{name} is routed, and {placement.node} has not spoken to {process.name} yet")
            if node is None or node.session is None:
                continue
            shard = node.shard(key[0])
            if shard is None or shard.generation != generation or shard.state in ENDED:
                raise Violation("3", f"{key} is routed, and {placement.node} reports {shard}")

    # -- a control plane's turn

    def before_turn(self, process: ControlPlane, plane: Plane) -> None:
        self._before[process.name] = plane.cluster
        self._heard_before = dict(self._heard[process.name])

    def after_turn(self, process: ControlPlane, plane: Plane) -> None:
        before, after = self._before[process.name], plane.cluster
        self._turns += 1
        if plane.trouble is not None:
            return  # What came in is taken up, and nothing was decided on it.
        if after.nodes is not before.nodes:
            self._nodes_judged(process, before, after)
        if after.replicas is not before.replicas or after.catalog is not before.catalog:
            self._replicas_changed(process, plane, before, after)
        if self._turns % DEAR_EVERY == 0:
            self._decided_alike(process, plane)
            if plane.epoch == self.epoch:
                self._stored_as_decided(after)

    def _decided_alike(self, process: ControlPlane, plane: Plane) -> None:
        now = process.clock()
        cluster = plane.cluster
        actions = reconcile(cluster, now)
        again = reconcile(_shuffled(cluster), now)
        if repr(actions) != repr(again):
            raise Violation("10", f"the order of a mapping decided: {actions} against {again}")

    def _stored_as_decided(self, after: Cluster) -> None:
        """A control plane that is killed now must find what this one knows."""
        if after.replicas.keys() != self.replicas.keys():
            raise Violation(
                "stored",
                f"{sorted(after.replicas.keys() ^ self.replicas.keys())} are known here or stored, and not both",
            )
        for name, replica in after.replicas.items():
            stored = self.replicas[name]
            if replica is not stored and _timeless(replica) != _timeless(stored):
                raise Violation("stored", f"{replica} is stored as {stored}")
        if after.engines != self.engines:
            raise Violation("stored", f"{after.engines} are stored as {self.engines}")

    def _nodes_judged(self, process: ControlPlane, before: Cluster, after: Cluster) -> None:
        now_s = process.clock().monotonic_s
        fresh = []
        for name, node in after.nodes.items():
            old = before.nodes.get(name)
            if node.state is NodeState.LOST and (old is None or old.state is not NodeState.LOST):
                fresh.append(node)
        for node in fresh:
            heard_s = self._heard_before.get(node.id, 0.0)
            since_s = max(heard_s, self._fresh_at[process.name])
            if now_s - since_s < after.lost_after_s - SLACK_S:
                raise Violation(
                    "13",
                    f"{node.id} is judged lost after {now_s - since_s:.1f} s of {after.lost_after_s:g} s: {node.why}",
                )
            self.counted["nodes lost"] += 1
        if fresh:
            self._braked(now_s, fresh, before, after)
        for node in fresh:
            self._lost_at[node.id] = self.world.timeline.now

    def _braked(self, now_s: float, fresh: list[Node], before: Cluster, after: Cluster) -> None:
        brake = after.brake or before.brake
        if brake is not None and brake.released:
            return
        now = self.world.timeline.now
        ids = {node.id for node in fresh if not _is_emptied(before, after, node)}
        if not ids:
            return
        counted = [
            node
            for node in after.nodes.values()
            if node.state is not NodeState.REVOKED
            and not (_is_silent(after, node, now_s) and _is_emptied(before, after, node))
            and (
                node.state is not NodeState.LOST
                or node.id in ids
                or now - self._lost_at.get(node.id, -1e9) <= BRAKE_WINDOW_S - 1.0
            )
        ]
        silent = [
            node
            for node in counted
            if node.state in (NodeState.LOST, NodeState.SUSPECT) and _is_silent(after, node, now_s)
        ]
        if len(silent) >= 2 and 2 * len(silent) > len(counted):
            raise Violation(
                "brake", f"{sorted(ids)} are judged lost, while {len(silent)} of {len(counted)} nodes are silent"
            )

    # -- replicas

    def _replicas_changed(self, process: ControlPlane, plane: Plane, before: Cluster, after: Cluster) -> None:
        models = set()
        for name, replica in after.replicas.items():
            old = before.replicas.get(name)
            if replica is old:
                continue
            models.add(replica.model)
            self._replica_changed(process, plane, old, replica, after)
        for name, old in before.replicas.items():
            if name not in after.replicas:
                models.add(old.model)
        if after.catalog is not before.catalog:
            models |= {spec.name for spec in after.catalog.models}
        for model in sorted(models):
            self._not_too_many(after, model)
            self._last_ready_stays(before, after, model)

    def _replica_changed(
        self, process: ControlPlane, plane: Plane, old: Replica | None, replica: Replica, after: Cluster
    ) -> None:
        if replica.state not in LIVE and not replica.why:
            raise Violation("12", f"{replica.id} is {replica.state.value} without a reason")
        if replica.state is _R.FAILED and old is not None and old.state in LIVE and not replica.lost:
            self._has_failed(old, after)
        if replica.placements and (old is None or old.generation != replica.generation):
            self._placed(old, replica, after)
        if old is not None and old.state is _R.READY and replica.state in LEAVING:
            self._replaced(old, replica, after)
        if replica.state is _R.STOPPING and old is not None and old.state in (_R.DRAINING, _R.READY):
            self._stopped_in_peace(process, plane, old, replica, after)

    def _replaced(self, old: Replica, replica: Replica, after: Cluster) -> None:
        """What a roll takes away is in the catalog still, and its replacement serves: an upgrade costs no replica."""
        beside = [each for each in after.replicas.values() if each.replaces == old.id and each.state not in LEAVING]
        rolled = "takes over from it" in replica.why or "in its place" in replica.why or "is in effect" in replica.why
        if not rolled or self._failed(old, after) or old.may_stop_first:
            return
        ready = [each for each in after.replicas.values() if each.model == old.model and each.state is _R.READY]
        # Scaled down in the same turn, the replacement may leave as well.
        leaves = any(each.replaces == old.id and each.state in LEAVING for each in after.replicas.values())
        if leaves and len(ready) >= wanted(after, old.model):
            return
        if not any(each.state is _R.READY for each in beside):
            raise Violation("8", f"{old.id} leaves, and nothing serves in its place: {replica.why}")

    def _has_failed(self, replica: Replica, after: Cluster) -> None:
        """A rank of that very generation must have ended, or must have been refused where it is."""
        if not replica.placements or _lost(replica, after) or _without_engine(replica, after):
            return
        keys = [(replica.shard_id(rank), replica.generation) for rank in range(len(replica.placements))]
        live = {(engine.shard.id, engine.shard.generation) for each in self.world.machines for engine in each.engines}
        if any(key in self._refused or (key in self._started and key not in live) for key in keys):
            return
        begun = replica.state in (_R.STARTING, _R.READY) or any(key in self._started for key in keys)
        if not begun or all(map(self._has, keys, replica.placements)):
            raise Violation(
                "failed", f"{replica.id} is failed in generation {replica.generation}, and no rank of it has"
            )

    def _has(self, key: tuple[str, int], placement: Placement) -> bool:
        """Whether the agent there knows of the shard: one that was killed on the way to its start does not."""
        life = next(each.lives.get(key[0]) for each in self.world.agents if each.machine.id == placement.node)
        return life is not None and life.generation == key[1]

    def _placed(self, old: Replica | None, replica: Replica, after: Cluster) -> None:
        self.counted["placed"] += 1
        assert replica.profile is not None
        ranks = replica.profile.nodes
        if len(replica.placements) != ranks or len({each.node for each in replica.placements}) != ranks:
            raise Violation("2", f"{replica.id} of {ranks} ranks lies on {[each.node for each in replica.placements]}")
        for placement in replica.placements:
            node = after.nodes[placement.node]
            has = node.engine(replica.profile.engine, replica.profile.engine_version)
            if has is None or not has.usable:
                raise Violation("version", f"{replica.id} is placed on {node.id}, which has {has}: {replica.profile}")
            if node.state is not NodeState.READY or placement.node in after.drains:
                raise Violation("7", f"{replica.id} is placed on {node.id}, which is {node.state.value}")
            if ranks > 1:
                names = {fabric.name for fabric in node.inventory.fabrics} if node.inventory else set()
                if replica.fabric is None or replica.fabric not in names:
                    raise Violation(
                        "2", f"{replica.id} on fabric {replica.fabric} lies on {node.id}, which has {sorted(names)}"
                    )
        away = {name for name, node in after.nodes.items() if node.state in AWAY}
        away |= {machine.id for machine in self.world.machines if machine.id not in after.nodes}
        self._excused.setdefault(replica.id, set()).update(away)

    def _stopped_in_peace(
        self, process: ControlPlane, plane: Plane, old: Replica, replica: Replica, after: Cluster
    ) -> None:
        if after.halting:
            return
        self.counted["drained"] += 1
        by_s = old.drained_by_s
        if not self._runs_whole(old) or _lost(old, after):
            self.counted["ended while they drained"] += 1
            return
        if old.state is _R.DRAINING and by_s and process.clock().monotonic_s >= by_s:
            self.counted["drained past the limit"] += 1
            return
        for gateway in self.world.gateways:
            desk = process.desk.gateways.get(gateway.name)
            if desk is None or gateway.stream is None or getattr(desk.peer, "stream", None) is not gateway.stream:
                continue
            flight = len(gateway.at.get(replica.id, ()))
            if flight != 0:
                raise Violation("drain", f"{replica.id} stops while {gateway.name} has {flight} requests there")
            named = gateway.table is not None and any(
                endpoint.replica == replica.id for route in gateway.table.routes for endpoint in route.endpoints
            )
            if named:
                raise Violation("drain", f"{replica.id} stops while {gateway.name} still sends to it")

    def _runs_whole(self, replica: Replica) -> bool:
        live = {(engine.shard.id, engine.shard.generation) for each in self.world.machines for engine in each.engines}
        return all((replica.shard_id(rank), replica.generation) in live for rank in range(len(replica.placements)))

    def _not_too_many(self, after: Cluster, model: str) -> None:
        replicas = [each for each in after.replicas.values() if each.model == model]
        live = [each for each in replicas if each.state in LIVE]
        standing = {each.id for each in replicas if each.state not in LEAVING and not each.lost}
        beside = [each for each in replicas if each.replaces in standing and each.id in standing]
        surge = min(len(beside), 1 + len(after.drains))
        most = wanted(after, model) + surge
        if len(live) > most:
            raise Violation(
                "6", f"{len(live)} of {model} live, {most} may: {[(each.id, each.state.value) for each in replicas]}"
            )

    def _last_ready_stays(self, before: Cluster, after: Cluster, model: str) -> None:
        if wanted(after, model) == 0:
            return
        left = [each for each in after.replicas.values() if each.model == model and each.state is _R.READY]
        if left:
            return
        went = [
            (old, after.replicas.get(old.id))
            for old in before.replicas.values()
            if old.model == model and old.state is _R.READY and not self._failed(old, after)
        ]
        if went and not any(self._downtime_allowed(before, after, old, now) for old, now in went):
            raise Violation(
                "8", f"the last ready of {model} goes: {[(old.id, now.why if now else '') for old, now in went]}"
            )

    def _failed(self, old: Replica, after: Cluster) -> bool:
        """It did not go of anybody's will."""
        now = after.replicas.get(old.id)
        stays = now is not None and now.state not in LEAVING
        return stays or not self._runs_whole(old) or _lost(old, after)

    def _downtime_allowed(self, before: Cluster, after: Cluster, replica: Replica, now: Replica | None) -> bool:
        if replica.may_stop_first or (now is not None and now.may_stop_first):
            return True
        for placement in replica.placements:
            for drain in (before.drains.get(placement.node), after.drains.get(placement.node)):
                if drain is not None and (drain.force or replica.model in drain.allow_downtime):
                    return True
        return False


def _names(table: Routes, request: Request) -> bool:
    """Whether the request still goes by this table."""
    sent = (request.replica, request.generation)
    return any((each.replica, each.generation) == sent for route in table.routes for each in route.endpoints)


def _timeless(replica: Replica) -> Replica:
    """Without the times of one control plane's own clock, which are not stored."""
    return replace(replica, drained_from_s=0.0, drained_by_s=0.0, whole_by_s=0.0)


def _lost(replica: Replica, after: Cluster) -> bool:
    """A node of it has gone, or its ranks can't find each other there any more."""
    for placement in replica.placements:
        node = after.nodes.get(placement.node)
        if node is None or node.state in AWAY:
            return True
        if len(replica.placements) > 1 and node.inventory and node.inventory.mgmt_addr != placement.address:
            return True
    return False


def _is_silent(cluster: Cluster, node: Node, now_s: float) -> bool:
    return node.session is None or now_s - node.heard_at_s >= cluster.suspect_after_s


def _is_emptied(before: Cluster, after: Cluster, node: Node) -> bool:
    """It was drained, and may be switched off."""
    drain = after.drains.get(node.id)
    was = before.nodes.get(node.id, node)
    return was.state is NodeState.DRAINED or (drain is not None and drain.state is DrainState.DONE)


def _without_engine(replica: Replica, after: Cluster) -> bool:
    """One of its nodes says that the engine which it was to start there does not run any more."""
    profile = replica.profile
    assert profile is not None
    for placement in replica.placements:
        engine = after.nodes[placement.node].engine(profile.engine, profile.engine_version)
        if engine is None or not engine.usable:
            return True
    return False


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
        engines=_backwards(cluster.engines),
    )


def _backwards(mapping: Any) -> dict[Any, Any]:
    return dict(reversed(list(mapping.items())))
