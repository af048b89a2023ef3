"""With the faults stopped: the wished state is reached within a bounded time, and then nothing changes any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmgw.cluster import rolling
from llmgw.cluster.beside import original
from llmgw.cluster.catalog import Profile
from llmgw.cluster.differing import same_to_run
from llmgw.cluster.engines import on_spares
from llmgw.cluster.model import Cluster, DrainState, MoveState, Node, NodeState, Replica, ReplicaState
from llmgw.cluster.reconcile import reconcile
from llmgw.cluster.scaling import standing, wanted

from .builds import ENGINE
from .machine import BROKEN
from .story import Violation

if TYPE_CHECKING:
    from .world import World

WITHIN_S = 900.0
"""Longer than every backoff, limit and lease on the way there, one after another."""
LOOK_EVERY_S = 2.0
STILL_FOR_S = 20.0
_R = ReplicaState


class Healing:
    def __init__(self, world: World) -> None:
        self.world = world

    def run(self) -> None:
        world = self.world
        world.faults.cease()
        world.operator.leave()
        ends_at = world.timeline.now + WITHIN_S
        clients_end_at = world.timeline.now + 5.0
        still_since: float | None = None
        state: object = None
        while True:
            self._go_to(world.timeline.now + LOOK_EVERY_S)
            if world.timeline.now > clients_end_at:
                world.clients = False
            world.operator.put_right()
            amiss = self.amiss()
            leader = world.leader()
            now = _stands(leader.plane.cluster) if leader is not None and leader.plane is not None else None
            if amiss or now != state:
                still_since, state = world.timeline.now, now
            elif still_since is not None and world.timeline.now - still_since >= STILL_FOR_S:
                break
            if world.timeline.now >= ends_at:
                raise Violation("11", f"not settled {WITHIN_S:g} s after the faults: {amiss}")
        self._nothing_left_to_do()

    def _go_to(self, when_s: float) -> None:
        timeline = self.world.timeline
        there = timeline.at(when_s, lambda: None)
        while there.act is not None and timeline.now < when_s:
            timeline.step()

    def _nothing_left_to_do(self) -> None:
        world = self.world
        leader = world.leader()
        assert leader is not None
        assert leader.plane is not None
        actions = reconcile(leader.plane.cluster, leader.clock())
        if actions:
            raise Violation("11", f"still something to do: {actions}")
        if world.open_requests:
            raise Violation("14", f"{len(world.open_requests)} requests have not ended")
        for gateway in world.gateways:
            if gateway.in_flight != 0:
                raise Violation("14", f"{gateway.name} counts requests in flight")

    # -- what is not as it should be

    def amiss(self) -> str:
        """In words; empty where all is well."""
        world = self.world
        leader = world.leader()
        if leader is None or leader.plane is None:
            return "nobody leads"
        cluster = leader.plane.cluster
        return (
            self._nodes(cluster)
            or self._models(cluster)
            or self._engines(cluster)
            or self._builds(cluster)
            or self._gateways(leader.plane.epoch)
            or (f"{len(world.open_requests)} requests are open" if world.open_requests else "")
        )

    def _nodes(self, cluster: Cluster) -> str:
        for machine in self.world.machines:
            node = cluster.nodes.get(machine.id)
            if node is None or node.session is None:
                return f"{machine.id} is not connected"
            expected = {NodeState.DRAINING, NodeState.DRAINED} if machine.id in cluster.drains else {NodeState.READY}
            if node.state not in expected:
                return f"{machine.id} is {node.state.value}: {node.why}"
        return "" if cluster.brake is None else f"the brake is on: {cluster.brake.words}"

    def _models(self, cluster: Cluster) -> str:
        for replica in cluster.replicas.values():
            at_rest = replica.state in (_R.READY, _R.UNPLACED)
            if not (at_rest or _held_by_a_drain(cluster, replica) or _goes_on_in_vain(cluster, replica)):
                return f"{replica.id} is {replica.state.value}: {replica.why}"
            if replica.lost:
                return f"{replica.id} is lost: {replica.why}"
        models = {spec.name for spec in cluster.catalog.models} | {each.model for each in cluster.replicas.values()}
        for model in sorted(models):
            count = len(standing(cluster, model))
            if count != wanted(cluster, model):
                return f"{model} has {count} replicas, wanted {wanted(cluster, model)}"
        return self._rolls(cluster) or self._drains(cluster)

    def _rolls(self, cluster: Cluster) -> str:
        for replica in cluster.replicas.values():
            why = rolling.reason(cluster, replica) if replica.state is _R.READY else ""
            held = rolling.held_by(cluster, replica) if why else ""
            if why and not any(words in held for words in ("no room", "no node has", "fits nowhere")):
                return f"{replica.id} is not rolled over ({why}): {rolling.held_by(cluster, replica)}"
        return ""

    def _drains(self, cluster: Cluster) -> str:
        for drain in cluster.drains.values():
            stuck = [move for move in drain.moves if move.state is MoveState.BLOCKED]
            if drain.state is not DrainState.DONE and not stuck:
                return f"the drain of {drain.node} is {drain.state.value}: {drain.why}"
            for move in stuck:
                if not bool(move.why):
                    raise Violation("12", f"{move} is blocked without a reason")
        return ""

    def _engines(self, cluster: Cluster) -> str:
        meant = {
            (replica.shard_id(rank), replica.generation, placement.node)
            for replica in cluster.replicas.values()
            for rank, placement in enumerate(replica.placements)
            if replica.state is _R.READY
        }
        there = {
            (engine.shard.id, engine.shard.generation, machine.id)
            for machine in self.world.machines
            for engine in machine.engines
        }
        if meant != there:
            return f"engines {sorted(there - meant)} run and should not, {sorted(meant - there)} should and do not"
        return self._room(cluster)

    def _builds(self, cluster: Cluster) -> str:
        """What can be installed is, and nothing lies about that nobody wants."""
        builds = self.world.builds
        for machine in self.world.machines if builds.used else ():
            if machine.id in builds.named:
                continue
            history = cluster.engines[ENGINE]
            version = history.in_effect.version
            if machine.id in builds.known[version].on and version not in machine.installed:
                return f"{machine.id} has not {version} yet"
            runs = {engine.shard.profile.engine_version for engine in machine.engines}
            kept = {build.version for build in (history.in_effect, history.kept, *history.older) if build is not None}
            if machine.installed - kept - runs:
                return f"{machine.id} has {sorted(machine.installed - kept - runs)} left over"
        return ""

    def _room(self, cluster: Cluster) -> str:
        """An unplaced replica of one node must not have an obvious place."""
        for replica in cluster.replicas.values():
            spec = cluster.catalog.model(replica.model)
            if replica.state is not _R.UNPLACED or spec is None:
                continue
            for profile in (*spec.profiles, *on_spares(cluster, spec).profiles):
                if profile.nodes == 1 and any(self._fits(cluster, node, profile) for node in cluster.nodes.values()):
                    return f"{replica.id} is unplaced, and would fit: {replica.why}"
        return ""

    def _fits(self, cluster: Cluster, node: Node, profile: Profile) -> bool:
        engine = node.engine(profile.engine, profile.engine_version)
        if node.id in cluster.drains or node.inventory is None or engine is None or not engine.usable:
            return False
        gpus, memory_bytes = profile.gpus_per_node, profile.memory_bytes or 0
        held = [
            placement
            for replica in cluster.replicas.values()
            for placement in replica.placements
            if placement.node == node.id
        ]
        free_gpus = len(node.inventory.gpus) - sum(len(placement.gpu_uuids) for placement in held)
        free_bytes = node.inventory.memory_bytes - (1 << 30) - sum(placement.memory_bytes for placement in held)
        ports = (node.inventory.ports.last - node.inventory.ports.first + 1) // 100 - len(held)
        return free_gpus >= gpus and free_bytes >= memory_bytes and ports > 0

    def _gateways(self, epoch: int) -> str:
        for gateway in self.world.gateways:
            if not gateway.connected or gateway.table is None or gateway.table.epoch != epoch:
                return f"{gateway.name} has no table of epoch {epoch}"
        return ""


def _stands(cluster: Cluster) -> object:
    """Not the words: a node that goes on trying what can't be installed says so each time."""
    return {key: (each.state, each.generation, each.placements) for key, each in cluster.replicas.items()}


def _goes_on_in_vain(cluster: Cluster, replica: Replica) -> bool:
    """What the catalog says now fits nowhere, and what it ran by before never served either."""
    ran, spec = replica.spec, cluster.catalog.model(replica.model)
    if replica.state is not _R.FAILED or ran is None or spec is None or same_to_run(ran, spec):
        return False
    return any(BROKEN in profile.args for profile in ran.profiles)


def _held_by_a_drain(cluster: Cluster, replica: Replica) -> bool:
    """Its ranks are prepared, and are not started any more: it has no other place, and the drain waits for one."""
    drains = [cluster.drains.get(placement.node) for placement in replica.placements]
    waiting = any(drain is not None and drain.state is DrainState.WAITING and not drain.force for drain in drains)
    held = replica.state is _R.PREPARING and len(drains) > 1 and waiting and "to be emptied" in replica.why
    return held and original(cluster, replica) is None
