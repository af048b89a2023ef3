"""Where peers come in: turns what the stream delivers into work for the plane, and sends out what follows.

Nodes get their desired shards, gateways the routing table. Both are whole each time and sent only where they
changed, routes before shards: a replica leaves the table before its node is told to stop it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from llmgw.cluster.catalog import Catalog
from llmgw.cluster.model import DesiredShard, Instant, NodeState, Route
from llmgw.cluster.reconcile import desired, desired_by_node, routes
from llmgw.control import fold
from llmgw.control.logs import Logs
from llmgw.control.plane import Plane
from llmgw.link.messages import Desired, Heartbeat, LogLines, Observed, Routes, RoutesAck, RoutesKey, TrafficReport
from llmgw.link.server import Peer, RefusedPeer

VERSIONS_PER_EPOCH = 1_000_000
"""Table versions of one leader; a later leader's are all higher, so a gateway can tell which table is newer."""


@dataclass(slots=True)
class NodeDesk:
    peer: Peer
    revision: int = 0
    sent: tuple[tuple[DesiredShard, ...], object] | None = None


@dataclass(slots=True)
class GatewayDesk:
    peer: Peer
    sent: int = 0
    acked: int = 0


class Desk:
    """Implements ``llmgw.link.server.Delegate``."""

    def __init__(self, plane: Plane, logs: Logs) -> None:
        self._plane = plane
        self._logs = logs
        self.nodes: dict[str, NodeDesk] = {}
        self.gateways: dict[str, GatewayDesk] = {}
        self._table: tuple[tuple[Route, ...], tuple[RoutesKey, ...]] = ((), ())
        self._made = 0
        self._seen: tuple[object, ...] = ()
        """What was last sent out from. All immutable, so identity tells whether anything can have changed."""
        self._standing: dict[str, tuple[NodeState, bool]] = {}
        plane.on_settled.append(self.send_out)

    @property
    def table_version(self) -> int:
        return self._plane.epoch * VERSIONS_PER_EPOCH + self._made

    # -- from the stream

    def on_welcomed(self, peer: Peer) -> None:
        self._plane.tell(partial(self._join, peer, self._plane.now()))

    def on_frame(self, peer: Peer, frame: Observed | RoutesAck | TrafficReport | LogLines) -> None:
        match frame:
            case LogLines():
                self._logs.deliver(frame)
            case RoutesAck():
                self._plane.tell(partial(self._acked, peer, frame.version))
            case Observed():
                self._plane.tell(partial(self._observed, peer, frame, self._plane.now()))

    def on_heartbeat(self, peer: Peer, frame: Heartbeat) -> None:
        if peer.role == "node":
            self._plane.tell(partial(self._beat, peer, frame, self._plane.now()), soon=False)

    def on_closed(self, peer: Peer, why: str) -> None:
        self._plane.tell(partial(self._gone, peer, why))

    def on_refused(self, refusal: RefusedPeer) -> None:
        subject = refusal.claimed_id or refusal.common_name or ""
        self._plane.tell(partial(self._plane.note, "peer.refused", subject, f"{refusal.address}: {refusal.words}"))

    # -- on the writer

    def _join(self, peer: Peer, now: Instant) -> None:
        if peer.role == "gateway":
            self.gateways[peer.id] = GatewayDesk(peer)
            self._plane.note("gateway.connected", peer.id, f"connected from {peer.address}")
            return
        self.nodes[peer.id] = NodeDesk(peer)
        old = self._plane.cluster.nodes.get(peer.id)
        self._plane.take(fold.joined(old, peer.hello, peer.session, peer.address, now))

    def _observed(self, peer: Peer, frame: Observed, now: Instant) -> None:
        desk, node = self.nodes.get(peer.id), self._plane.cluster.nodes.get(peer.id)
        if desk is not None and node is not None and node.session == peer.session:
            self._plane.take(fold.observed(node, frame, now, caught_up=frame.revision >= desk.revision))

    def _beat(self, peer: Peer, frame: Heartbeat, now: Instant) -> None:
        if (node := self._plane.cluster.nodes.get(peer.id)) and node.session == peer.session:
            self._plane.take(fold.heartbeat(node, frame, now))

    def _acked(self, peer: Peer, version: int) -> None:
        if (gateway := self.gateways.get(peer.id)) and gateway.peer is peer:
            gateway.acked = max(gateway.acked, version)

    def _gone(self, peer: Peer, why: str) -> None:
        if peer.role == "gateway":
            if (gateway := self.gateways.get(peer.id)) and gateway.peer is peer:
                del self.gateways[peer.id]
                self._plane.note("gateway.disconnected", peer.id, why)
            return
        if (desk := self.nodes.get(peer.id)) and desk.peer is peer:
            del self.nodes[peer.id]
            self._logs.node_gone(peer.id)
        node = self._plane.cluster.nodes.get(peer.id)
        if node is not None and node.session == peer.session:
            self._plane.put_node(fold.gone(node, peer.session))
            self._plane.note("node.disconnected", peer.id, why)

    # -- out

    def send_out(self) -> None:
        cluster = self._plane.cluster
        seen = (cluster.replicas, cluster.catalog, self._plane.keys)
        # Heartbeats make every node a new value: what is sent out depends on no more of it than this.
        standing = {node_id: (node.state, node.probed) for node_id, node in cluster.nodes.items()}
        moved = standing != self._standing or not _same(seen, self._seen)
        if moved or any(desk.sent < self.table_version for desk in self.gateways.values()):
            self._send_routes()
        wanted = desired_by_node(cluster) if moved else {}
        for node_id, desk in self.nodes.items():
            if moved or desk.sent is None:
                shards = wanted[node_id] if node_id in wanted else desired(cluster, node_id)
                self._send_desired(desk, shards, cluster.catalog)
        self._seen, self._standing = seen, standing

    def _send_routes(self) -> None:
        cluster, plane = self._plane.cluster, self._plane
        keys = tuple(
            RoutesKey(id=key.id, hash=key.hash, models=key.models)
            for key in plane.keys.values()
            if key.revoked_at is None
        )
        table = (routes(cluster), keys)
        if table != self._table or self._made == 0:
            self._table = table
            self._made += 1
        for desk in self.gateways.values():
            if desk.sent < self.table_version:
                desk.sent = self.table_version
                desk.peer.send(
                    Routes(
                        epoch=plane.epoch,
                        session=desk.peer.session,
                        version=self.table_version,
                        routes=table[0],
                        keys=table[1],
                    )
                )

    def _send_desired(self, desk: NodeDesk, shards: tuple[DesiredShard, ...], catalog: Catalog) -> None:
        wanted = (shards, catalog.engines)
        if wanted == desk.sent:
            return
        desk.sent = wanted
        desk.revision += 1
        desk.peer.send(
            Desired(
                epoch=self._plane.epoch,
                session=desk.peer.session,
                revision=desk.revision,
                shards=shards,
                engines=catalog.engines,
            )
        )
        node = self._plane.cluster.nodes.get(desk.peer.id)
        if node is not None and node.session == desk.peer.session:
            self._plane.put_node(replace(node, caught_up=False))


def _same(now: tuple[object, ...], before: tuple[object, ...]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
