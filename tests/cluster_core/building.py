"""Short ways to write down clusters in tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from llmgw.cluster.catalog import Catalog, EngineName, ModelSpec, Profile
from llmgw.cluster.model import (
    Cluster,
    Cpu,
    EngineOnNode,
    EngineState,
    Exit,
    Fabric,
    Gpu,
    Hca,
    Instant,
    Inventory,
    Node,
    NodeState,
    ObservedShard,
    PortRange,
    Replica,
    ReplicaState,
    ShardState,
)
from llmgw.cluster.reconcile import apply, desired, reconcile

GIB = 1 << 30
NOW = Instant(1_700_000_000.0, 1000.0)
"""2023-11-14 22:13:20 UTC."""


def later(seconds: float, now: Instant = NOW) -> Instant:
    return Instant(now.wall_s + seconds, now.monotonic_s + seconds)


def gpu(index: int, **changes: Any) -> Gpu:
    return replace(Gpu(index=index, uuid=f"GPU-{index}", name="H200", memory_bytes=141 * GIB), **changes)


def inventory(
    *,
    gpus: int | Iterable[Gpu] = 0,
    memory_gib: float = 16,
    labels: Mapping[str, str] | None = None,
    ports: str = "20000-29999",
    fabrics: tuple[str, ...] = (),
    address: str = "127.0.0.1",
) -> Inventory:
    """``fabrics``: names of fabrics, with an adapter on each."""
    first, last = ports.split("-")
    hcas = [Hca(name=f"mlx5_{index}", port=1, state="ACTIVE") for index, _ in enumerate(fabrics)]
    return Inventory(
        hostname="host",
        os="Debian GNU/Linux 12",
        kernel="6.1.0",
        libc="glibc 2.36",
        cpu=Cpu(model="EPYC", architecture="x86_64", cores=8, extensions=("avx2", "fma")),
        memory_bytes=int(memory_gib * GIB),
        mgmt_addr=address,
        hcas=tuple(hcas),
        fabrics=tuple(Fabric(name=name, hcas=(hca.name,)) for name, hca in zip(fabrics, hcas, strict=True)),
        gpus=tuple(gpu(index) for index in range(gpus)) if isinstance(gpus, int) else tuple(gpus),
        labels=labels or {},
        ports=PortRange(int(first), int(last)),
    )


def engine(
    name: EngineName = "sim",
    state: EngineState = EngineState.INSTALLED,
    words: str = "",
    *,
    version: str = "1.0",
    named: bool = False,
) -> EngineOnNode:
    return EngineOnNode(name=name, version=version, state=state, words=words, named=named)


def node(
    name: str,
    *,
    gpus: int | Iterable[Gpu] = 0,
    memory_gib: float = 16,
    labels: Mapping[str, str] | None = None,
    ports: str = "20000-29999",
    fabrics: Iterable[str] = (),
    address: str = "127.0.0.1",
    engines: Iterable[EngineOnNode] = (engine("sim"), engine("llamacpp")),
    **changes: Any,
) -> Node:
    """A node that is ready and connected."""
    described = inventory(
        gpus=gpus, memory_gib=memory_gib, labels=labels, ports=ports, fabrics=tuple(fabrics), address=address
    )
    ready = Node(
        id=name,
        state=NodeState.READY,
        since=NOW.wall_s,
        session=1,
        heard_at_s=NOW.monotonic_s,
        inventory=described,
        probed=True,
        engines=tuple(engines),
    )
    return replace(ready, **changes)


def profile(name: str = "p", engine: EngineName = "sim", **fields: Any) -> Profile:
    return Profile(name=name, engine=engine, **fields)


def model(name: str = "m", *profiles: Profile, **fields: Any) -> ModelSpec:
    return ModelSpec(name=name, profiles=profiles or (profile(),), **fields)


def cluster(nodes: Iterable[Node] = (), models: Iterable[ModelSpec] = (), **fields: Any) -> Cluster:
    return Cluster(
        name="lab",
        secret="secret",
        catalog=Catalog(models=tuple(models)),
        nodes={node.id: node for node in nodes},
        **fields,
    )


def settled(state: Cluster, now: Instant = NOW) -> Cluster:
    """The cluster after one step, which must leave nothing more to do at the same time."""
    after = apply(state, reconcile(state, now))
    again = reconcile(after, now)
    assert again == (), again
    return after


def with_node(state: Cluster, name: str, /, **changes: Any) -> Cluster:
    return replace(state, nodes={**state.nodes, name: replace(state.nodes[name], **changes)})


def heard(state: Cluster, now: Instant) -> Cluster:
    """All nodes that are connected have just been heard."""
    nodes = {
        key: replace(node, heard_at_s=now.monotonic_s) if node.session else node for key, node in state.nodes.items()
    }
    return replace(state, nodes=nodes)


def with_catalog(state: Cluster, *models: ModelSpec) -> Cluster:
    return replace(state, catalog=Catalog(models=models))


def reported(state: Cluster, shard_state: ShardState, **fields: Any) -> Cluster:
    """Every connected node reports all that it should run, in this state; ranks above 0 serve nothing."""
    for name, at in state.nodes.items():
        if at.session is not None:
            shards = tuple(
                observed(
                    shard.id,
                    shard.generation,
                    shard_state,
                    None if shard.rank else f"127.0.0.1:{shard.placement.port}",
                    **fields,
                )
                for shard in desired(state, name)
            )
            state = with_node(state, name, shards=shards)
    return state


def observed(
    shard_id: str, generation: int, state: ShardState, endpoint: str | None = None, **fields: Any
) -> ObservedShard:
    if state is ShardState.FAILED:
        fields = {"exit": Exit(status=1, last_lines=("boom",)), **fields}
    return ObservedShard(
        id=shard_id,
        generation=generation,
        state=state,
        since=NOW.wall_s,
        endpoint=endpoint if state is ShardState.READY else None,
        **fields,
    )


def ready(state: Cluster, now: Instant = NOW) -> Cluster:
    """The cluster with everything placed that can be, and ready."""
    state = settled(state, now)
    if any(len(replica.placements) > 1 for replica in state.replicas.values()):
        state = settled(reported(state, ShardState.PREPARING, prepared=True), now)
    return settled(reported(state, ShardState.READY), now)


def only(state: Cluster, model: str = "m") -> Replica:
    """The one replica of the model that neither leaves nor was lost with its nodes."""
    (replica,) = (
        found
        for found in state.replicas.values()
        if found.model == model and not found.lost and found.state not in (ReplicaState.DRAINING, ReplicaState.STOPPING)
    )
    return replica


def lost_one(state: Cluster, model: str = "m") -> Replica:
    """The one replica of the model that was lost with its nodes."""
    (replica,) = (found for found in state.replicas.values() if found.model == model and found.lost)
    return replica
