"""When a replica that leaves is quiet: no gateway can send it anything new, and none has a request in flight at it."""

from __future__ import annotations

from llmgw.cluster.lifecycle import stop
from llmgw.cluster.model import Cluster, Gateway, Instant, Replica, ReplicaState
from llmgw.cluster.step import Step
from llmgw.cluster.wording import count

_UNSETTLED = (
    "gateways that have not come back since this control plane took the lead: the lease of the table that they may "
    "still send by runs on"
)


def waits_for(cluster: Cluster, replica: Replica, now: Instant) -> tuple[str, ...]:
    """What the replica still has to wait for before it may stop, in words that name the gateways; empty: nothing."""
    waits = _unsettled(cluster, now)
    for _, gateway in sorted(cluster.gateways.items()):
        sends, busy = _sends(cluster, gateway, replica.id, now), _in_flight(gateway, replica.id)
        if sends:
            waits.append(f"{sends}, with {busy}" if busy else sends)
        elif busy:
            waits.append(f"{busy} through gateway {gateway.id}")
    return tuple(waits)


def still_sending(cluster: Cluster, replica: Replica, now: Instant) -> tuple[str, ...]:
    """Of what the replica waits for, which gateways may still send it something new; empty: none."""
    sends = (_sends(cluster, gateway, replica.id, now) for _, gateway in sorted(cluster.gateways.items()))
    return (*_unsettled(cluster, now), *filter(None, sends))


def _unsettled(cluster: Cluster, now: Instant) -> list[str]:
    return [] if now.monotonic_s >= cluster.tables_settled_at_s else [_UNSETTLED]


def _sends(cluster: Cluster, gateway: Gateway, replica_id: str, now: Instant) -> str:
    if not gateway.connected:
        if now.monotonic_s >= gateway.heard_at_s + cluster.lease_s:
            return ""
        return f"gateway {gateway.id} is not connected: the lease of the table that it may still send by runs on"
    if gateway.may_send is None:
        return f"gateway {gateway.id} has not taken up a table yet"
    return f"gateway {gateway.id} has not taken up the table without it yet" if replica_id in gateway.may_send else ""


def _in_flight(gateway: Gateway, replica_id: str) -> str:
    """What one that is not connected has in flight is not known: its lease is all that can be waited for."""
    traffic = gateway.traffic.get(replica_id) if gateway.connected else None
    return f"{count(traffic.in_flight, 'request')} in flight" if traffic is not None and traffic.in_flight else ""


def let_go(step: Step) -> None:
    """Stop the replicas that leave, and are quiet or have used up the time that their requests may take."""
    for replica in list(step.replicas.values()):
        if replica.state is ReplicaState.DRAINING:
            waits = waits_for(step.cluster, replica, step.now)
            if step.cluster.halting:
                stop(step, replica, "the cluster is being stopped")
            elif not waits:
                stop(step, replica, replica.why)
            elif step.now.monotonic_s >= replica.drained_by_s:
                stop(step, replica, f"{replica.why}; out of time, it does not wait any longer for: {'; '.join(waits)}")
