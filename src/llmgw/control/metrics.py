"""What the control plane tells Prometheus, read off the cluster at each scrape."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from llmgw.cluster.model import DrainState, NodeState, ReplicaState
from llmgw.control.desk import Desk
from llmgw.control.plane import Plane


def exposition(plane: Plane, desk: Desk) -> str:
    registry = CollectorRegistry()
    cluster = plane.cluster
    nodes = Gauge("llmgw_nodes", "Nodes by state.", ["state"], registry=registry)
    counted = Counter(node.state for node in cluster.nodes.values())
    for node_state in NodeState:
        nodes.labels(node_state.value).set(counted[node_state])
    replicas = Gauge("llmgw_replicas", "Replicas by model and state.", ["model", "state"], registry=registry)
    by_state = Counter((replica.model, replica.state) for replica in cluster.replicas.values())
    for model in {spec.name for spec in cluster.catalog.models} | {
        replica.model for replica in cluster.replicas.values()
    }:
        for state in ReplicaState:
            replicas.labels(model, state.value).set(by_state[model, state])
    restarts = Gauge(
        "llmgw_replica_restarts", "Restarts of the replicas there are, by model.", ["model"], registry=registry
    )
    for replica in cluster.replicas.values():
        restarts.labels(replica.model).inc(replica.restarts)
    drains = Gauge(
        "llmgw_drains", "Nodes that are being emptied, or are, by how far it is.", ["state"], registry=registry
    )
    drained = Counter(drain.state for drain in cluster.drains.values())
    for drain_state in DrainState:
        drains.labels(drain_state.value).set(drained[drain_state])
    brake = Gauge("llmgw_brake", "1 while so many nodes are silent that none is judged lost.", registry=registry)
    brake.set(cluster.brake is not None and not cluster.brake.released)
    Gauge("llmgw_gateways", "Gateways connected.", registry=registry).set(len(desk.gateways))
    Gauge("llmgw_table_version", "Version of the routing table.", registry=registry).set(desk.table_version)
    Gauge("llmgw_leader_epoch", "Epoch of this leader.", registry=registry).set(plane.epoch)
    Gauge("llmgw_store_writable", "1 while the store takes writes.", registry=registry).set(plane.trouble is None)
    return generate_latest(registry).decode()
