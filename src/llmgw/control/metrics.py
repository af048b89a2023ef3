"""What the control plane tells Prometheus, read off the cluster at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmgw.cluster.model import Cluster, DrainState, NodeState, ReplicaState
from llmgw.control.crl_file import CrlFile
from llmgw.control.desk import Desk
from llmgw.control.plane import Plane
from llmgw.control.views import load_of


def exposition(plane: Plane, desk: Desk, crl: CrlFile | None = None) -> str:
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
    _certificates(plane, crl, registry)
    registry.register(ReplicaLoads(cluster))
    return generate_latest(registry).decode()


def _certificates(plane: Plane, crl: CrlFile | None, registry: CollectorRegistry) -> None:
    now = plane.now().wall_s
    expiry = Gauge(
        "llmgw_node_certificate_expiry_seconds",
        "Seconds until the certificate that a node uses expires.",
        ["node"],
        registry=registry,
    )
    until: dict[str, float] = {}
    for each in plane.book.certificates():
        if each.role == "node" and each.state == "current" and each.not_after:
            until[each.node] = max(each.not_after, until.get(each.node, 0.0))
    for node, not_after in until.items():
        expiry.labels(node).set(not_after - now)
    if crl is not None and crl.next_update is not None:
        stale = Gauge(
            "llmgw_crl_expiry_seconds", "Seconds until the list of what was revoked is stale.", registry=registry
        )
        stale.set(crl.next_update - now)


class ReplicaLoads(Collector):
    """How busy the engines are, as nodes told at their last heartbeat. A replica of which it is not known is not there,
    and a count starts anew where its engine does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        loads = [
            ([replica.model, replica.id], load)
            for _, replica in sorted(self._cluster.replicas.items())
            if (load := load_of(self._cluster, replica)) is not None
        ]
        for name, field, words, kind in _LOADS:
            family = kind(f"llmgw_replica_{name}", words, labels=["model", "replica"])
            for labels, load in loads:
                if (value := getattr(load, field)) is not None:
                    family.add_metric(labels, value)
            yield family


_LOADS: tuple[tuple[str, str, str, type[GaugeMetricFamily] | type[CounterMetricFamily]], ...] = (
    ("requests_running", "running", "Requests that the engine works on.", GaugeMetricFamily),
    ("requests_waiting", "waiting", "Requests that the engine has taken and not begun.", GaugeMetricFamily),
    ("kv_used_ratio", "kv_used_ratio", "Part of the cache of keys and values that is taken.", GaugeMetricFamily),
    ("prompt_tokens_total", "prompt_tokens_total", "Tokens that the engine has read.", CounterMetricFamily),
    ("generation_tokens_total", "generation_tokens_total", "Tokens that it has given out.", CounterMetricFamily),
)
"""Each metric: its name, the field of a Load, what it is, and of which kind."""
