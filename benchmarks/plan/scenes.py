"""Clusters to plan for: nodes with 8 GPUs, 16 nodes to a fabric, two replicas for each node."""

from __future__ import annotations

from dataclasses import replace

from llmgw.cluster.catalog import Catalog, ModelSpec, Profile
from llmgw.cluster.model import (
    Cluster,
    Cpu,
    EngineOnNode,
    EngineState,
    Fabric,
    Gpu,
    Hca,
    Instant,
    Inventory,
    Node,
    NodeState,
    ObservedShard,
    Replica,
    ShardState,
)
from llmgw.cluster.reconcile import apply, reconcile

NOW = Instant(1_700_000_000.0, 1000.0)
GPUS = 8
PER_FABRIC = 16
PER_NODE = 2
SCENES = ("single", "mixed", "one model", "all different")


def cluster(scene: str, nodes: int) -> Cluster:
    """A cluster with nothing placed yet."""
    return Cluster(
        name="lab",
        secret="secret",
        catalog=Catalog(models=_models(scene, nodes * PER_NODE)),
        nodes={node.id: node for node in map(_node, range(nodes))},
    )


def running(scene: str, nodes: int) -> Cluster:
    """The same with everything placed and ready."""
    state = cluster(scene, nodes)
    placed = apply(state, reconcile(state, NOW))
    shards: dict[str, list[ObservedShard]] = {}
    for replica in placed.replicas.values():
        for rank, placement in enumerate(replica.placements):
            endpoint = f"{placement.address}:{placement.port}" if rank == 0 else None
            shard = observed(replica, rank, ShardState.READY, endpoint)
            shards.setdefault(placement.node, []).append(shard)
    reporting = {name: replace(node, shards=tuple(shards.get(name, ()))) for name, node in placed.nodes.items()}
    placed = replace(placed, nodes=reporting)
    return apply(placed, reconcile(placed, NOW))


def observed(replica: Replica, rank: int, state: ShardState, endpoint: str | None = None) -> ObservedShard:
    return ObservedShard(
        id=replica.shard_id(rank),
        generation=replica.generation,
        state=state,
        since=NOW.wall_s,
        endpoint=endpoint,
        prepared=True,
    )


def _models(scene: str, replicas: int) -> tuple[ModelSpec, ...]:
    if scene == "one model":
        return (ModelSpec(name="m", profiles=(_profile(2),), replicas=replicas),)
    if scene == "all different":
        return tuple(
            ModelSpec(name=f"m{number:05}", profiles=(_profile(1 + number % 4),), replicas=1)
            for number in range(replicas)
        )
    each = 20
    models = []
    for number in range(max(replicas // each, 1)):
        spans = scene == "mixed" and number % 2 == 1
        profile = _profile(1 + number % 4, nodes=2) if spans else _profile(1 + number % 4, rack=number % 10)
        models.append(
            ModelSpec(
                name=f"m{number:05}",
                profiles=(profile, Profile(name="cpu", engine="sim", memory_bytes=1 << 30)),
                replicas=each,
            )
        )
    return tuple(models)


def _profile(gpus: int, *, nodes: int = 1, rack: int = 1) -> Profile:
    return Profile(
        name="gpus",
        engine="sim",
        nodes=nodes,
        gpus_per_node=gpus,
        tensor_parallel=gpus,
        pipeline_parallel=nodes,
        node_selector={"rack": f"r{rack}"} if rack % 3 == 0 else {},
    )


def _node(number: int) -> Node:
    name = f"n{number:05}"
    adapters = ("mlx5_0", "mlx5_1")
    gid = f"fe80:0000:0000:{number // PER_FABRIC:04x}:0002:c903:00ef:{number % PER_FABRIC:04x}"
    inventory = Inventory(
        hostname=name,
        os="Debian GNU/Linux 12",
        kernel="6.1.0",
        libc="glibc 2.36",
        cpu=Cpu(model="EPYC", architecture="x86_64", cores=64),
        memory_bytes=(1 << 40) + number * 4096,
        mgmt_addr=f"10.0.{number // 256}.{number % 256}",
        gpus=tuple(
            Gpu(index=index, uuid=f"GPU-{number}-{index}", name="H200", memory_bytes=141 << 30, nvlink_group=0)
            for index in range(GPUS)
        ),
        hcas=tuple(Hca(name=name, port=1, state="ACTIVE", link_layer="InfiniBand", gid=gid) for name in adapters),
        fabrics=(Fabric(name=f"ib-{number // PER_FABRIC:03}", hcas=adapters),),
        labels={"rack": f"r{number % 10}"},
    )
    return Node(
        id=name,
        state=NodeState.READY,
        since=NOW.wall_s,
        session=1,
        heard_at_s=NOW.monotonic_s,
        inventory=inventory,
        probed=True,
        engines=(EngineOnNode(name="sim", version="1.0", state=EngineState.INSTALLED),),
    )
