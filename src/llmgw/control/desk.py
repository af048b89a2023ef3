"""Where peers come in: turns what the stream delivers into work for the plane, and sends out what follows.

Nodes get their desired shards, gateways the routing table. Both are whole each time and sent only where they
changed, routes before shards: a replica leaves the table before its node is told to stop it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.derived import desired, gateway_addresses, unconfirmed
from llmgw.cluster.engines import builds_for, builds_kept
from llmgw.cluster.model import Cluster, DesiredShard, Gateway, Instant, Traffic
from llmgw.cluster.starting import builds_for_all
from llmgw.control import fold
from llmgw.control.logs import Logs
from llmgw.control.plane import Plane
from llmgw.control.table import Table
from llmgw.control.watch import Watch
from llmgw.link.messages import Desired, Heartbeat, LogLines, Observed, Routes, RoutesAck, TrafficReport
from llmgw.link.server import Peer, RefusedPeer

UNACKNOWLEDGED_KEPT = 100
"""Tables that a gateway was sent and has not acknowledged, of which is remembered what is in them."""
FORGOTTEN_AFTER_LEASES = 10
"""A gateway that has been away for as many leases is forgotten."""

HELD_S = 10.0
"""How long this control plane's first tables are kept from gateways that have an older one, where replicas that were
ready must be left out of them until all their nodes are heard: agents dial again within seconds."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a node was asked for."""

    shards: tuple[DesiredShard, ...]
    engines: tuple[EngineSpec, ...]
    engines_kept: tuple[EngineSpec, ...]
    gateways: tuple[str, ...]


@dataclass(slots=True)
class NodeDesk:
    peer: Peer
    revision: int = 0
    sent: Wanted | None = None


@dataclass(slots=True)
class GatewayDesk:
    peer: Peer
    sent: int = 0
    acked: int = 0
    unacknowledged: deque[tuple[int, frozenset[str]]] = field(default_factory=deque)
    """Version, and the replicas that are in it, or in one before it that is remembered no more."""

    def remember(self, version: int, replicas: frozenset[str]) -> None:
        """A table was sent. Of many that are not acknowledged, the oldest are remembered as one."""
        self.unacknowledged.append((version, replicas))
        if len(self.unacknowledged) > UNACKNOWLEDGED_KEPT:
            (_, oldest), (second, more) = self.unacknowledged.popleft(), self.unacknowledged.popleft()
            self.unacknowledged.appendleft((second, oldest | more))


class Desk:
    """Implements ``llmgw.link.server.Delegate``."""

    def __init__(self, plane: Plane, logs: Logs) -> None:
        self._plane = plane
        self._logs = logs
        self.nodes: dict[str, NodeDesk] = {}
        self.gateways: dict[str, GatewayDesk] = {}
        self._table = Table(plane.epoch)
        self._watch = Watch()
        self._unsent: set[str] = set()
        """Nodes whose desired shards may be others than they were last sent."""
        self._for_all: tuple[object, ...] = ()
        """What is the same for all nodes, as it was sent last."""
        self._builds: tuple[EngineSpec, ...] = ()
        self._kept: tuple[EngineSpec, ...] = ()
        self._gateways: tuple[str, ...] = ()
        self._held_until_s = plane.now().monotonic_s + HELD_S
        plane.on_settled.append(self.send_out)

    @property
    def table_version(self) -> int:
        return self._table.version

    # -- from the stream

    def on_welcomed(self, peer: Peer) -> None:
        self._plane.tell(partial(self._join, peer, self._plane.now()))

    def on_frame(self, peer: Peer, frame: Observed | RoutesAck | TrafficReport | LogLines) -> None:
        match frame:
            case LogLines():
                self._logs.deliver(frame)
            case RoutesAck():
                self._plane.tell(partial(self._acked, peer, frame, self._plane.now()))
            case TrafficReport():
                self._plane.tell(partial(self._traffic, peer, frame.replicas, self._plane.now()))
            case Observed():
                self._plane.tell(partial(self._observed, peer, frame, self._plane.now()))

    def on_heartbeat(self, peer: Peer, frame: Heartbeat) -> None:
        if peer.role == "node":
            self._plane.tell(partial(self._beat, peer, frame, self._plane.now()), soon=False)

    def on_closed(self, peer: Peer, why: str) -> None:
        self._plane.tell(partial(self._gone, peer, why, self._plane.now()))

    def on_refused(self, refusal: RefusedPeer) -> None:
        subject = refusal.claimed_id or refusal.common_name or ""
        self._plane.tell(partial(self._plane.note, "peer.refused", subject, f"{refusal.address}: {refusal.words}"))

    # -- on the writer

    def _join(self, peer: Peer, now: Instant) -> None:
        if peer.role == "gateway":
            self.gateways[peer.id] = GatewayDesk(peer)
            # Which table it goes by is known once it has acknowledged one: till then it may send anything anywhere.
            address, _, _ = peer.address.rpartition(":")
            addresses = (address.strip("[]"), *peer.hello.addresses)
            known = Gateway(id=peer.id, connected=True, heard_at_s=now.monotonic_s, addresses=addresses)
            self._plane.put_gateway(known)
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

    def _acked(self, peer: Peer, frame: RoutesAck, now: Instant) -> None:
        desk = self.gateways.get(peer.id)
        if desk is None or desk.peer is not peer or frame.version <= desk.acked:
            return
        desk.acked = frame.version
        may_send = None
        while desk.unacknowledged and desk.unacknowledged[0][0] <= frame.version:
            version, replicas = desk.unacknowledged.popleft()
            may_send = replicas if version == frame.version else None
        known = self._plane.cluster.gateways[peer.id]
        if may_send is not None:
            on_their_way = [replicas for _, replicas in desk.unacknowledged]
            known = replace(known, may_send=may_send.union(*on_their_way))
        self._plane.put_gateway(replace(known, heard_at_s=now.monotonic_s, traffic=frame.traffic))

    def _traffic(self, peer: Peer, traffic: Mapping[str, Traffic], now: Instant) -> None:
        if (desk := self.gateways.get(peer.id)) and desk.peer is peer:
            known = self._plane.cluster.gateways[peer.id]
            self._plane.put_gateway(replace(known, heard_at_s=now.monotonic_s, traffic=traffic))

    def _gone(self, peer: Peer, why: str, now: Instant) -> None:
        if peer.role == "gateway":
            if (gateway := self.gateways.get(peer.id)) and gateway.peer is peer:
                del self.gateways[peer.id]
                # From now on and not from its last word: it may have heard us until now, and its lease with that.
                known = replace(self._plane.cluster.gateways[peer.id], connected=False, heard_at_s=now.monotonic_s)
                self._plane.put_gateway(known)
                self._plane.note("gateway.disconnected", peer.id, why)
            return
        if (desk := self.nodes.get(peer.id)) and desk.peer is peer:
            del self.nodes[peer.id]
            self._logs.node_gone(peer.id)
        node = self._plane.cluster.nodes.get(peer.id)
        if node is not None and node.session == peer.session:
            self._plane.put_nodes([fold.gone(node, peer.session)])
            self._plane.note("node.disconnected", peer.id, why)

    # -- out

    def send_out(self) -> None:
        cluster = self._plane.cluster
        changed = self._watch.look(cluster)
        self._unsent |= changed.nodes
        self._look_at_what_all_get(cluster)
        self._table.follow(cluster, self._plane.keys, changed.models)
        self._send_routes(cluster)
        self._send_desired(cluster)
        self._forget_gateways(cluster)

    def _look_at_what_all_get(self, cluster: Cluster) -> None:
        self._builds, self._kept = builds_for_all(cluster), builds_kept(cluster)
        self._gateways = gateway_addresses(cluster)
        for_all = (self._builds, self._kept, self._gateways)
        if for_all != self._for_all:
            self._for_all = for_all
            self._unsent |= self.nodes.keys()

    def _send_routes(self, cluster: Cluster) -> None:
        table, held = self._table, self._is_held(cluster)
        for desk in self.gateways.values():
            if desk.sent >= table.version or (held and desk.peer.hello.routes_version):
                continue
            desk.remember(table.version, table.replicas)
            desk.sent = table.version
            self._may_send_too(desk.peer.id, table.replicas)
            desk.peer.send(
                Routes(
                    epoch=self._plane.epoch,
                    session=desk.peer.session,
                    version=table.version,
                    lease_s=cluster.lease_s,
                    routes=table.routes,
                    keys=table.keys,
                )
            )

    def _is_held(self, cluster: Cluster) -> bool:
        if self._plane.now().monotonic_s >= self._held_until_s or not unconfirmed(cluster):
            self._held_until_s = 0.0
        return self._held_until_s > 0.0

    def _may_send_too(self, gateway_id: str, replicas: frozenset[str]) -> None:
        """From the moment a table is sent: it may be in use long before it is known to be."""
        known = self._plane.cluster.gateways[gateway_id]
        if known.may_send is not None and not replicas <= known.may_send:
            self._plane.put_gateway(replace(known, may_send=known.may_send | replicas))

    def _send_desired(self, cluster: Cluster) -> None:
        asked = []
        for node_id in sorted(self._unsent):
            if self._send_node(cluster, node_id):
                asked.append(node_id)
            self._unsent.discard(node_id)
        if not asked:
            return
        self._plane.put_nodes(
            replace(node, caught_up=False)
            for node in map(cluster.nodes.get, asked)
            if node is not None and node.session == self.nodes[node.id].peer.session
        )

    def _send_node(self, cluster: Cluster, node_id: str) -> bool:
        """Send the node what it should run now; False where it has that already, or is not here."""
        desk = self.nodes.get(node_id)
        if desk is None:
            return False
        here = {replica_id: cluster.replicas[replica_id] for replica_id in self._watch.here.get(node_id, ())}
        shards = desired(replace(cluster, replicas=here), node_id)
        wanted = Wanted(shards, builds_for(cluster, self._builds, here.values()), self._kept, self._gateways)
        if wanted == desk.sent:
            return False
        desk.sent = wanted
        desk.revision += 1
        desk.peer.send(
            Desired(
                epoch=self._plane.epoch,
                session=desk.peer.session,
                revision=desk.revision,
                shards=wanted.shards,
                engines=wanted.engines,
                engines_kept=wanted.engines_kept,
                gateways=wanted.gateways,
            )
        )
        return True

    def _forget_gateways(self, cluster: Cluster) -> None:
        """Those that have been away for long: a name that is not used any more must not stand in the lists for ever."""
        oldest_s = self._plane.now().monotonic_s - FORGOTTEN_AFTER_LEASES * cluster.lease_s
        gone = [
            gateway.id
            for gateway in cluster.gateways.values()
            if not gateway.connected and gateway.heard_at_s < oldest_s
        ]
        if gone:
            self._plane.forget_gateways(gone)
