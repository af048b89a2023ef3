"""What must hold of every cluster, whatever happened to it. Numbers are those of the project's list of invariants."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from llmgw.cluster.explain import why
from llmgw.cluster.lifecycle import ENDED, RUNNING, STARTED, STORY_LINES, all_gone, away, is_live, observed
from llmgw.cluster.model import PORT_BLOCK, Cluster, Instant, NodeState, Replica, ReplicaState, ShardState
from llmgw.cluster.observe import moved_away
from llmgw.cluster.quiet import waits_for
from llmgw.cluster.reconcile import desired, routes
from llmgw.cluster.scaling import standing, wanted

LEAVING = (ReplicaState.DRAINING, ReplicaState.STOPPING)


def violations(cluster: Cluster) -> list[str]:
    """All that is wrong with a cluster that has been reconciled; empty: nothing."""
    found: list[str] = []
    found += _shared(cluster)
    found += _routable(cluster)
    found += _gpu_counts(cluster)
    found += _fabrics(cluster)
    found += _too_many(cluster)
    found += _unexplained(cluster)
    for replica in cluster.replicas.values():
        found += _of_replica(replica)
    return found


def _shared(cluster: Cluster) -> list[str]:
    """1. No two shards that hold something share a GPU, a port, or more memory than there is."""
    found: list[str] = []
    gpus: Counter[tuple[str, str]] = Counter()
    ports: dict[str, list[int]] = {}
    for replica in cluster.replicas.values():
        for placement in replica.placements:
            if away(cluster.nodes.get(placement.node)):
                continue
            gpus.update((placement.node, uuid) for uuid in placement.gpu_uuids)
            ports.setdefault(placement.node, []).append(placement.port)
    found += [f"1: {where} is held {times} times" for where, times in gpus.items() if times > 1]
    for node, firsts in ports.items():
        ordered = sorted(firsts)
        found += [
            f"1: ports {low} and {high} of {node} overlap" for low, high in pairwise(ordered) if high - low < PORT_BLOCK
        ]
    for node_id in cluster.nodes:
        asked = [uuid for shard in desired(cluster, node_id) for uuid in shard.placement.gpu_uuids]
        found += [f"1: {node_id} is asked to share {uuid}" for uuid, times in Counter(asked).items() if times > 1]
    return found


def _routable(cluster: Cluster) -> list[str]:
    """3. What is routed to has all its shards, of one generation, each seen ready, and an endpoint."""
    found = []
    for route in routes(cluster):
        if not route.endpoints and not route.why_none:
            found.append(f"12: no word on why {route.model} has no endpoint")
        for endpoint in route.endpoints:
            replica = cluster.replicas[endpoint.replica]
            if replica.state is not ReplicaState.READY or replica.profile is None:
                found.append(f"3: {replica.id} is routed to while {replica.state}")
                continue
            if len(replica.placements) != replica.profile.nodes or endpoint.url != f"http://{replica.endpoint}":
                found.append(f"3: {replica.id} is routed to without all its shards")
            for rank, placement in enumerate(replica.placements):
                node = cluster.nodes.get(placement.node)
                if node is None or away(node):
                    found.append(f"3: {replica.id} is routed to on {placement.node}, which is away")
                elif node.session is not None:
                    shard = node.shard(replica.shard_id(rank))
                    if shard is None or (shard.generation, shard.state) != (replica.generation, ShardState.READY):
                        found.append(f"3: {replica.id} is routed to while {placement.node} reports {shard}")
                if node is not None and len(replica.placements) > 1 and node.heard_at_s <= 0.0:
                    found.append(f"3: {replica.id} is routed to before {placement.node} has been heard")
                if node is not None and endpoint.preferred and (node.silent or node.state is NodeState.SUSPECT):
                    found.append(f"3: {replica.id} is preferred on {placement.node}, which is suspect")
            nodes = [cluster.nodes[placement.node] for placement in replica.placements]
            if not endpoint.preferred and all(is_live(node) for node in nodes):
                found.append(f"3: {replica.id} is not preferred, and all its nodes are live")
    return found


def _gpu_counts(cluster: Cluster) -> list[str]:
    """4. A shard has exactly the GPUs that its profile states."""
    found = []
    for replica in cluster.replicas.values():
        stated = replica.profile.gpus_per_node if replica.profile is not None else None
        found += [
            f"4: {replica.id} has GPUs {placement.gpu_uuids}, not {stated}"
            for placement in replica.placements
            if not len(set(placement.gpu_uuids)) == len(placement.gpus) == stated
        ]
    return found


def _fabrics(cluster: Cluster) -> list[str]:
    """2. All ranks of a replica over several nodes lie on one fabric, and of their generation all or none may start."""
    found = []
    for replica in cluster.replicas.values():
        if not replica.placements:
            continue
        several = len(replica.placements) > 1
        if several is not (replica.fabric is not None) or several is not (replica.dist_init is not None):
            found.append(f"2: {replica.id} over {len(replica.placements)} nodes has fabric {replica.fabric}")
        for placement in replica.placements:
            node = cluster.nodes.get(placement.node)
            names = [fabric.name for fabric in node.inventory.fabrics] if node and node.inventory else []
            if several and node is not None and replica.fabric not in names:
                found.append(f"2: {replica.id} on {replica.fabric} has a rank on {placement.node}, which has {names}")
        told = {
            shard.go
            for placement in replica.placements
            for shard in desired(cluster, placement.node)
            if shard.id.startswith(f"{replica.id}/")
        }
        if len(told) > 1:
            found.append(f"2: some ranks of {replica.id} are told to start, and others not")
    return found


def broken(before: Cluster, after: Cluster, now: Instant) -> list[str]:
    """All that a step must not have done; empty: nothing."""
    found = _judged(before, after, now)
    for name, old in before.replicas.items():
        new = after.replicas.get(name)
        if new is not None:
            found += _generation(after, old, new)
        if old.state is ReplicaState.DRAINING and (new is None or new.state is ReplicaState.STOPPING):
            found += _stopped_in_peace(before, after, old, now)
    for model in sorted({replica.model for replica in before.replicas.values()}):
        found += _last_ready(before, after, model)
    return found


def _judged(before: Cluster, after: Cluster, now: Instant) -> list[str]:
    """13. No node is judged lost inside a grace period, nor while the brake is on."""
    found = []
    for name, node in after.nodes.items():
        old = before.nodes.get(name)
        if old is None or node.state is not NodeState.LOST or old.state is NodeState.LOST:
            continue
        if now.monotonic_s < after.grace_until_s:
            found.append(f"13: {name} is judged lost inside the grace period")
        if after.brake is not None and not after.brake.released:
            found.append(f"13: {name} is judged lost while the brake is on")
    return found


def _generation(cluster: Cluster, old: Replica, new: Replica) -> list[str]:
    """5. A generation ends as a whole before the next begins; ranks start together."""
    found = []
    if new.generation < old.generation:
        found.append(f"5: {old.id} goes back from generation {old.generation} to {new.generation}")
    if new.generation > old.generation and not all_gone(cluster.nodes, old):
        found.append(f"5: {old.id} begins anew while its last generation may be running")
    begins = new.state is ReplicaState.STARTING and old.state in (ReplicaState.PLACING, ReplicaState.PREPARING)
    if begins and len(new.placements) > 1:
        nodes = [cluster.nodes[placement.node] for placement in new.placements]
        shards = [observed(node, new, rank) for rank, node in enumerate(nodes)]
        ready_to = all(shard is not None and shard.prepared for shard in shards)
        runs = any(shard is not None and shard.state in STARTED for shard in shards)
        if not ready_to and not runs:
            found.append(f"5: {old.id} is told to start before all its ranks are prepared")
    return found


def _stopped_in_peace(before: Cluster, after: Cluster, old: Replica, now: Instant) -> list[str]:
    """8. What leaves is not stopped under its requests, but where it is out of time, has ended, or all is to stop."""
    waits = waits_for(before, old, now)
    if not waits or after.halting or now.monotonic_s >= old.drained_by_s or _has_ended(after, old):
        return []
    return [f"8: {old.id} is stopped while it waits for {waits}"]


def _last_ready(before: Cluster, after: Cluster, model: str) -> list[str]:
    """8. The last ready replica of a model does not leave by itself while one is wanted."""
    ready = [r for r in before.replicas.values() if r.model == model and r.state is ReplicaState.READY]
    left = [r for r in ready if r.id not in after.replicas or after.replicas[r.id].state in LEAVING]
    serving = any(r.model == model and r.state is ReplicaState.READY for r in after.replicas.values())
    if wanted(after, model) and not serving and not all(_has_ended(after, replica) for replica in left):
        return [f"8: the last ready replica of {model} leaves"]
    return []


def _has_ended(cluster: Cluster, replica: Replica) -> bool:
    """True where one of its ranks has ended, or its node is lost, or the ranks can't meet any more."""
    for rank, placement in enumerate(replica.placements):
        node = cluster.nodes.get(placement.node)
        if node is None or away(node):
            return True
        shard = observed(node, replica, rank)
        if node.session is not None and (shard is None or shard.state in ENDED):
            return True
        if replica.state is not ReplicaState.DRAINING and moved_away(replica, node, rank):
            return True
    return False


def _too_many(cluster: Cluster) -> list[str]:
    """6. As many as wanted, those that can't be placed among them; beside each at most one that is to replace it."""
    found = []
    models = {replica.model for replica in cluster.replicas.values()} | {spec.name for spec in cluster.catalog.models}
    for model in sorted(models):
        own = standing(cluster, model)
        if len(own) != wanted(cluster, model):
            found.append(f"6: {model} has {len(own)} replicas, {wanted(cluster, model)} wanted")
        beside = Counter(
            replica.replaces
            for replica in cluster.replicas.values()
            if replica.model == model and not replica.lost and replica.state not in LEAVING and replica not in own
        )
        found += [f"6: {old} has {times} replacements" for old, times in beside.items() if times > 1]
    return found


def _unexplained(cluster: Cluster) -> list[str]:
    """12. Whatever is not done has a reason."""
    found = [
        f"12: {replica.id} is {replica.state} without a word"
        for replica in cluster.replicas.values()
        if not replica.why
    ]
    for spec in cluster.catalog.models:
        explanation = why(cluster, spec.name)
        if explanation.refusal is not None:
            for refused in explanation.refusal.profiles:
                if not refused.summary or (refused.nodes and len(refused.nodes) != len(cluster.nodes)):
                    found.append(f"12: {spec.name}: not every node says why not")
    return found


def _of_replica(replica: Replica) -> list[str]:
    found = []
    state, name = replica.state, replica.id
    if len(replica.story) > STORY_LINES:
        found.append(f"{name}: its story has {len(replica.story)} lines")
    if state in RUNNING and not (replica.placements and replica.profile and replica.spec and replica.generation):
        found.append(f"{name} is {state} without a place")
    if state is ReplicaState.UNPLACED and bool(replica.placements) is not replica.lost:
        found.append(f"{name} is unplaced with placements {replica.placements}, lost={replica.lost}")
    if (replica.endpoint is not None) is not (state is ReplicaState.READY) and state is not ReplicaState.DRAINING:
        found.append(f"{name} is {state} with endpoint {replica.endpoint}")
    if replica.lost and state not in (ReplicaState.FAILED, ReplicaState.UNPLACED, ReplicaState.STOPPING):
        found.append(f"{name} is {state} and lost")
    return found + _counts(replica)


def _counts(replica: Replica) -> list[str]:
    """5. Every generation but the running one has ended by itself, once."""
    if replica.state in RUNNING or replica.lost:
        right = replica.restarts == replica.generation - 1
    elif replica.state in (ReplicaState.FAILED, ReplicaState.UNPLACED):
        right = replica.restarts == replica.generation
    else:
        right = replica.generation - 1 <= replica.restarts <= replica.generation
    return (
        []
        if right
        else [f"5: {replica.id} ({replica.state}): {replica.restarts} restarts, generation {replica.generation}"]
    )
