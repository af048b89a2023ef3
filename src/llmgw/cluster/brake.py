"""Whether so many nodes fell silent at once that the fault is rather the network's, or this control plane's own."""

from __future__ import annotations

from dataclasses import replace

from llmgw.cluster.lifecycle import is_heard, is_overdue, is_silent
from llmgw.cluster.model import Brake, Cluster, DrainState, Instant, Node, NodeState

RECENT_S = 60.0
"""Nodes lost within the last minute are counted as silent with those that are now; those lost longer not at all."""
CLOCKS_APART_S = 900.0
"""By no more than this are the clocks of control planes, or of one before and after it was set, taken to differ."""
_NAMED = 5


def braked(cluster: Cluster, now: Instant) -> Brake | None:
    """The brake as it should be now. It is put on when a node would be judged lost, and comes off when no more than
    half of the nodes are silent."""
    quiet = (node for node in cluster.nodes.values() if not is_heard(cluster, node, now))
    if next(quiet, None) is None or next(quiet, None) is None:
        return None
    counted = [node for _, node in sorted(cluster.nodes.items()) if _counts(cluster, node, now)]
    silent = tuple(node.id for node in counted if is_silent(cluster, node, now))
    if len(silent) < 2 or 2 * len(silent) <= len(counted):
        return None
    old = cluster.brake
    if old is None:
        if not any(node.state is not NodeState.LOST and is_overdue(cluster, node, now) for node in counted):
            return None
        return Brake(since=now.wall_s, silent=silent, words=_words(silent, len(counted)))
    return old if silent == old.silent else replace(old, silent=silent, words=_words(silent, len(counted)))


def recent_until_s(cluster: Cluster, node: Node, now: Instant) -> tuple[float, ...]:
    """Monotonic times at which a lost node may stop counting as silent."""
    by_wall_s = node.since + now.monotonic_s - now.wall_s
    if node.heard_at_s > 0.0:
        return (by_wall_s + RECENT_S, node.heard_at_s + cluster.lost_after_s + RECENT_S)
    return (by_wall_s + RECENT_S, by_wall_s + CLOCKS_APART_S, cluster.grace_until_s + RECENT_S)


def _counts(cluster: Cluster, node: Node, now: Instant) -> bool:
    if _is_emptied(cluster, node) and not is_heard(cluster, node, now):
        return False
    if node.state is NodeState.LOST and not is_heard(cluster, node, now):
        # By either clock: that of the wall may have been set, and the other does not outlive a control plane.
        ago_s = now.wall_s - node.since
        if 0.0 <= ago_s < RECENT_S:
            return True
        if node.heard_at_s > 0.0:
            return now.monotonic_s < node.heard_at_s + cluster.lost_after_s + RECENT_S
        # Lost under a control plane before this one, whose clock may have been another.
        return abs(ago_s) < CLOCKS_APART_S and now.monotonic_s < cluster.grace_until_s + RECENT_S
    return node.state is not NodeState.REVOKED


def _is_emptied(cluster: Cluster, node: Node) -> bool:
    """True where it was drained, and may have been switched off as well."""
    drain = cluster.drains.get(node.id)
    return drain is not None and drain.state is DrainState.DONE


def _words(silent: tuple[str, ...], counted: int) -> str:
    names = ", ".join(silent[:_NAMED]) + (f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else "")
    return (
        f"{len(silent)} of {counted} nodes are silent ({names}): more likely the network's fault, or this control "
        "plane's, than theirs, so none of them is judged lost and nothing is moved; if they are gone indeed: "
        "llmgw ctl brake release"
    )
