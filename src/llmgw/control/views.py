"""What the admin API answers: shapes for people and scripts. Times are RFC 3339 UTC, sizes bytes, durations seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmgw.cluster.explain import why, why_replica
from llmgw.cluster.model import (
    Cluster,
    EngineOnNode,
    Exit,
    Instant,
    Inventory,
    Load,
    Node,
    ObservedShard,
    Placement,
    Replica,
    ReplicaState,
    Vitals,
)
from llmgw.cluster.quiet import waits_for
from llmgw.cluster.refusal import Refusal
from llmgw.control.drain_views import BrakeView, DrainView
from llmgw.control.times import rfc3339
from llmgw.store.base import ApiKey, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldView:
    """What a replica's rank holds on a node: kept for it from its placing until it is known to have ended."""

    shard: str
    gpus: tuple[int, ...]
    """As they were numbered then; ``gpu_uuids`` says which they are."""
    gpu_uuids: tuple[str, ...]
    memory_bytes: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    id: str
    state: str
    since: str
    why: str
    address: str
    agent_version: str
    connected: bool
    silent_s: float | None
    """Seconds since the last message; None where nothing was heard since this control plane started."""
    probed: bool
    inventory: Inventory | None
    vitals: Vitals | None
    engines: tuple[EngineOnNode, ...]
    shards: tuple[ObservedShard, ...]
    weights: tuple[str, ...]
    warnings: tuple[str, ...]
    gpus_free: int = 0
    """Usable GPUs that nothing is placed on."""
    held: tuple[HeldView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryView:
    at: str
    generation: int
    state: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    id: str
    model: str
    state: str
    since: str
    why: str
    generation: int
    profile: str | None
    engine: str | None
    placements: tuple[Placement, ...]
    pids: tuple[int | None, ...]
    endpoint: str | None
    restarts: int
    retry_at: str | None
    last_exit: Exit | None
    fabric: str | None = None
    """The fabric that its nodes share; None where it runs on one node."""
    dist_init: str | None = None
    """host:port at which its ranks meet."""
    replaces: str | None = None
    """The replica that it takes over from."""
    lost: bool = False
    load: Load | None = None
    """How busy its engine was at the last heartbeat; None: not known, or it serves nothing."""
    waits_for: tuple[str, ...] = ()
    """What a draining one waits for before it is stopped, by gateway."""
    story: tuple[StoryView, ...] = ()
    engine_version: str | None = None
    """Which version of its engine it runs on; empty: whichever its node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    name: str
    aliases: tuple[str, ...]
    task: str
    source: str | None
    profiles: tuple[str, ...]
    replicas: int
    """Wanted now: what the file says, or the override."""
    replicas_in_file: int
    scaled: bool
    ready: int
    why: str
    """How many are ready, and why not more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyView:
    model: str
    wanted: int
    ready: int
    summary: str
    replicas: tuple[tuple[str, str, str], ...]
    """(id, state, why) of each."""
    refusal: Refusal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    id: str
    at: str
    kind: str
    subject: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView:
    id: str
    name: str
    created_at: str
    revoked_at: str | None
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayView:
    id: str
    address: str
    version: str
    table_sent: int
    table_acked: int
    connected: bool = True
    may_send_for_s: float | None = None
    """Of one that is not connected: how much longer it may send by its last table."""
    in_flight: int = 0
    """Requests that it has open at replicas that leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    cluster: str
    version: str
    epoch: int
    trouble: str | None
    """Why nothing can be written just now; None: all is well."""
    halting: bool
    table_version: int
    nodes: dict[str, int]
    """Nodes by state."""
    replicas: dict[str, int]
    models_ready: int
    """Models of which at least one replica is ready."""
    models: int
    gateways: tuple[GatewayView, ...]
    brake: BrakeView | None = None
    """Many nodes are silent at once, and none is judged lost; None: it is not on."""
    drains: tuple[DrainView, ...] = ()
    rolled_back: dict[str, str] = field(default_factory=dict)
    """Engines of which the file's version is not in effect: from which to which, and why."""
    lacking: dict[str, int] = field(default_factory=dict)
    """Models that want more replicas than are ready: how many more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartView:
    """Replicas that are replaced by fresh ones, one after another."""

    model: str
    replicas: tuple[str, ...]
    allow_downtime: bool
    words: str


def node_views(cluster: Cluster, now_s: float) -> list[NodeView]:
    """All nodes, by id, in one pass over the replicas."""
    held: dict[str, list[HeldView]] = {}
    for _, replica in sorted(cluster.replicas.items()):
        for rank, placement in enumerate(replica.placements):
            held.setdefault(placement.node, []).append(_held(replica, rank))
    return [node_view(node, now_s, held.get(node_id, ())) for node_id, node in sorted(cluster.nodes.items())]


def held_on(cluster: Cluster, node_id: str) -> tuple[HeldView, ...]:
    return tuple(
        _held(replica, rank)
        for _, replica in sorted(cluster.replicas.items())
        for rank, placement in enumerate(replica.placements)
        if placement.node == node_id
    )


def _held(replica: Replica, rank: int) -> HeldView:
    placement = replica.placements[rank]
    return HeldView(
        shard=replica.shard_id(rank),
        gpus=placement.gpus,
        gpu_uuids=placement.gpu_uuids,
        memory_bytes=placement.memory_bytes,
        port=placement.port,
    )


def node_view(node: Node, now_s: float, held: Sequence[HeldView] = ()) -> NodeView:
    taken = {uuid for each in held for uuid in each.gpu_uuids}
    gpus = node.inventory.gpus if node.inventory else ()
    return NodeView(
        id=node.id,
        state=node.state,
        since=rfc3339(node.since),
        why=node.why,
        address=node.address,
        agent_version=node.agent_version,
        connected=node.session is not None,
        silent_s=round(now_s - node.heard_at_s, 1) if node.heard_at_s else None,
        probed=node.probed,
        inventory=node.inventory,
        vitals=node.vitals,
        engines=node.engines,
        shards=node.shards,
        weights=node.weights,
        warnings=node.inventory.warnings if node.inventory else (),
        gpus_free=sum(gpu.problem is None and gpu.uuid not in taken for gpu in gpus),
        held=tuple(held),
    )


def replica_view(cluster: Cluster, replica: Replica, now: Instant, *, story: bool = False) -> ReplicaView:
    shards = [
        observed if (observed := _shard(cluster, placement, replica.shard_id(rank), replica.generation)) else None
        for rank, placement in enumerate(replica.placements)
    ]
    leader = shards[0] if shards else None
    return ReplicaView(
        id=replica.id,
        model=replica.model,
        state=replica.state,
        since=rfc3339(replica.since),
        why=why_replica(cluster, replica),
        generation=replica.generation,
        profile=replica.profile.name if replica.profile else None,
        engine=replica.profile.engine if replica.profile else None,
        engine_version=replica.profile.engine_version if replica.profile else None,
        placements=replica.placements,
        pids=tuple(shard.pid if shard else None for shard in shards),
        endpoint=leader.endpoint if leader else None,
        restarts=replica.restarts,
        retry_at=rfc3339(replica.retry_at) if replica.retry_at is not None else None,
        last_exit=replica.last_exit,
        fabric=replica.fabric,
        dist_init=replica.dist_init,
        replaces=replica.replaces,
        lost=replica.lost,
        load=load_of(cluster, replica),
        waits_for=waits_for(cluster, replica, now) if replica.state is ReplicaState.DRAINING else (),
        story=tuple(
            StoryView(at=rfc3339(line.at), generation=line.generation, state=line.state, why=line.why)
            for line in (replica.story if story else ())
        ),
    )


def load_of(cluster: Cluster, replica: Replica) -> Load | None:
    """As rank 0's node told it last, if that node is connected and the replica serves."""
    if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING) or not replica.placements:
        return None
    leader = cluster.nodes.get(replica.placements[0].node)
    if leader is None or leader.session is None or leader.vitals is None:
        return None
    return leader.vitals.loads.get(replica.shard_id(0))


def _shard(cluster: Cluster, placement: Placement, shard_id: str, generation: int) -> ObservedShard | None:
    node = cluster.nodes.get(placement.node)
    shard = node.shard(shard_id) if node else None
    return shard if shard and shard.generation == generation else None


def model_views(cluster: Cluster) -> list[ModelView]:
    return [model_view(cluster, spec.name) for spec in cluster.catalog.models]


def model_view(cluster: Cluster, name: str) -> ModelView:
    spec = cluster.catalog.model(name)
    if spec is None:
        raise KeyError(name)
    explanation = why(cluster, name)
    return ModelView(
        name=spec.name,
        aliases=spec.aliases,
        task=spec.task,
        source=spec.source,
        profiles=tuple(profile.name for profile in spec.profiles),
        replicas=explanation.wanted,
        replicas_in_file=spec.replicas,
        scaled=name in cluster.scale,
        ready=explanation.ready,
        why=explanation.summary,
    )


def why_view(cluster: Cluster, name: str) -> WhyView:
    explanation = why(cluster, name)
    return WhyView(
        model=explanation.model,
        wanted=explanation.wanted,
        ready=explanation.ready,
        summary=explanation.summary,
        replicas=tuple((replica.id, str(replica.state), replica.why) for replica in explanation.replicas),
        refusal=explanation.refusal,
    )


def event_view(event: Event) -> EventView:
    return EventView(id=event.id, at=rfc3339(event.at), kind=event.kind, subject=event.subject, words=event.words)


def key_view(key: ApiKey) -> KeyView:
    return KeyView(
        id=key.id,
        name=key.name,
        created_at=rfc3339(key.created_at),
        revoked_at=rfc3339(key.revoked_at) if key.revoked_at is not None else None,
        models=key.models,
    )
