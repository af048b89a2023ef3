"""Faults that were put into the code to see whether the simulation finds them. Each is one that people do write.

``python -m tests.simulation.planted`` plants them one by one and says which seed finds each first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from llmgw.cluster import (
    brake,
    capacity,
    derived,
    engines,
    fitness,
    lifecycle,
    observe,
    quiet,
    replacing,
    scaling,
    topology,
)
from llmgw.cluster.model import Cluster, Instant, Node, NodeState, ObservedShard, Replica, ReplicaState
from llmgw.cluster.step import Step
from llmgw.control import leadership, plane
from llmgw.link import course
from llmgw.store import memory

from .run import Outcome, parse_seeds, report, simulate
from .run import quiet as without_logs

Undo = list[tuple[object, str, object]]


@dataclass(frozen=True)
class Planted:
    name: str
    words: str
    plant: Callable[[Undo], None]


@contextmanager
def planted(fault: Planted) -> Iterator[None]:
    undo: Undo = []
    fault.plant(undo)
    try:
        yield
    finally:
        for owner, name, was in reversed(undo):
            setattr(owner, name, was)


def _put(undo: Undo, owner: object, name: str, value: object) -> None:
    undo.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _everywhere(undo: Undo, owner: object, name: str, value: object) -> None:
    """Also where the function was imported by its name."""
    original = getattr(owner, name)
    for module in [module for key, module in sys.modules.items() if key.startswith("llmgw.")]:
        if getattr(module, name, None) is original:
            _put(undo, module, name, value)


def _fence(undo: Undo) -> None:
    _put(undo, memory.MemoryStore, "_check_lead", lambda self, epoch: None)


def _start_grace(undo: Undo) -> None:
    def lost_at_s(cluster: Cluster, node: Node) -> float:
        return node.heard_at_s + cluster.lost_after_s

    _everywhere(undo, lifecycle, "lost_at_s", lost_at_s)


def _stall(undo: Undo) -> None:
    def beat(self: Any) -> Instant:
        now: Instant = self.now()
        self._last_beat_s = now.monotonic_s
        return now

    _put(undo, plane.Plane, "_beat", beat)


def _brake(undo: Undo) -> None:
    _everywhere(undo, brake, "braked", lambda cluster, now: None)


def _generation(undo: Undo) -> None:
    def observed(node: Node, replica: Replica, rank: int) -> ObservedShard | None:
        return node.shard(replica.shard_id(rank))

    _everywhere(undo, lifecycle, "observed", observed)


def _not_ended(undo: Undo) -> None:
    _leftovers(undo)
    _everywhere(undo, lifecycle, "all_gone", lambda nodes, replica: True)


def _not_caught_up(undo: Undo) -> None:
    _leftovers(undo)
    original = lifecycle.gone

    def gone(nodes: Any, replica: Replica, rank: int) -> bool:
        node = nodes.get(replica.placements[rank].node)
        return original(nodes, replica, rank) or (
            node.session is not None and node.shard(replica.shard_id(rank)) is None
        )

    _everywhere(undo, lifecycle, "gone", gone)


def _released(undo: Undo) -> None:
    _leftovers(undo)

    def release(step: Step, replica: Replica) -> None:
        if replica.placements:
            step.put(replace(replica, placements=(), previous=replica.placements))

    _put(undo, observe, "_release", release)


def _ports(undo: Undo) -> None:
    def block(self: Any, after: int) -> int | None:
        return None if self.inventory is None else int(self.inventory.ports.first)

    _put(undo, capacity.Room, "_block", block)


def _leftovers(undo: Undo) -> None:
    _everywhere(undo, capacity, "_leftovers", lambda shards, held: ())


def _fabrics(undo: Undo) -> None:
    original = topology.seats

    def seats(inventory: Any) -> tuple[topology.Seat, ...]:
        found = original(inventory)
        other = {"ib-a": "ib-b", "ib-b": "ib-a"}
        return (found[0], replace(found[0], fabric=other[found[0].fabric])) if len(found) == 1 else found

    _everywhere(undo, topology, "seats", seats)


def _draining_nodes(undo: Undo) -> None:
    original = fitness.basic_rule

    def basic_rule(node: Node, needs: Any, drains: Any) -> Any:
        draining = node.state in (NodeState.DRAINING, NodeState.DRAINED)
        return original(replace(node, state=NodeState.READY) if draining else node, needs, ())

    _everywhere(undo, fitness, "basic_rule", basic_rule)


def _together(undo: Undo) -> None:
    _put(undo, derived, "_TOLD_TO_START", tuple(ReplicaState))


def _acknowledged(undo: Undo) -> None:
    _everywhere(undo, quiet, "waits_for", lambda cluster, replica, now: ())


def _in_flight(undo: Undo) -> None:
    _put(undo, quiet, "_in_flight", lambda gateway, replica_id: "")


def _still_routed(undo: Undo) -> None:
    original = derived._routable

    def routable(cluster: Cluster, replica: Replica) -> bool:
        draining = replica.state is ReplicaState.DRAINING
        return original(cluster, replace(replica, state=ReplicaState.READY) if draining else replica)

    _put(undo, derived, "_routable", routable)


def _unheard(undo: Undo) -> None:
    _everywhere(undo, derived, "unheard", lambda cluster, replica: False)


def _scale_down(undo: Undo) -> None:
    _put(undo, scaling, "_LEAST_MISSED", tuple(reversed(scaling._LEAST_MISSED)))


def _verdict(undo: Undo) -> None:
    original = derived._should_run

    def should_run(node: Node, replica: Replica, rank: int) -> bool:
        return not replica.lost and original(node, replica, rank)

    _put(undo, derived, "_should_run", should_run)


def _older_leader(undo: Undo) -> None:
    async def hold(self: Any) -> None: ...

    _put(undo, leadership.Leadership, "hold", hold)
    original = course.Conversation.__init__

    def begin(self: Any, server: str, newest_epoch: int) -> None:
        original(self, server, 0)

    _put(undo, course.Conversation, "__init__", begin)


def _lost_answer(undo: Undo) -> None:
    _put(undo, plane._Doubtful, "add", lambda self, change: None)


def _any_version(undo: Undo) -> None:
    original = fitness.basic_rule

    def basic_rule(node: Node, needs: Any, drains: Any) -> Any:
        return original(node, replace(needs, version=""), drains)

    _everywhere(undo, fitness, "basic_rule", basic_rule)


def _builds_in_use(undo: Undo) -> None:
    _everywhere(undo, engines, "builds_for", lambda cluster, for_all, here: tuple(for_all))


def _engines_not_stored(undo: Undo) -> None:
    original = plane.Plane._change

    def change(self: Any, *arguments: Any) -> Any:
        return replace(original(self, *arguments), engines=())

    _put(undo, plane.Plane, "_change", change)


def _upgrade_first(undo: Undo) -> None:
    def is_sure(nodes: Mapping[str, Node], replica: Replica) -> bool:
        return bool(replica.placements)

    _put(undo, replacing, "is_sure", is_sure)


FAULTS = (
    Planted("fence", "a write with the epoch of a deposed leader goes through", _fence),
    Planted("start-grace", "a control plane that has just started judges at once who is lost", _start_grace),
    Planted("stall", "a control plane that was stopped judges the silence that it slept through", _stall),
    Planted("brake", "more than half of the nodes are judged lost at once", _brake),
    Planted("generation", "a shard of an older generation is taken for the newest", _generation),
    Planted("not-ended", "a replica counts as ended while processes of it still run", _not_ended),
    Planted("not-caught-up", "a shard that is not reported yet is taken for one that has ended", _not_caught_up),
    Planted("released", "a failed replica gives up its GPUs while its processes still run", _released),
    Planted("ports", "every shard of a node gets the first block of ports", _ports),
    Planted("fabrics", "a node on one fabric counts as on the other too", _fabrics),
    Planted("draining-nodes", "replicas are placed on nodes that are to be emptied", _draining_nodes),
    Planted("together", "ranks start as they come, without waiting for each other", _together),
    Planted("acknowledged", "a replica that leaves stops before gateways have taken up the table", _acknowledged),
    Planted("in-flight", "requests in flight at a replica that leaves are not waited for", _in_flight),
    Planted("still-routed", "a replica that leaves stays in the routing table", _still_routed),
    Planted("unheard", "a restarted control plane routes to ranks that it has not heard", _unheard),
    Planted("scale-down", "scaling down takes those that serve, and leaves those that do not", _scale_down),
    Planted("verdict", "a node that returns is told to stop what it runs before the verdict", _verdict),
    Planted("older-leader", "a leader does not look after its lease, and agents go back to it", _older_leader),
    Planted("lost-answer", "a write whose answer was lost is not written again", _lost_answer),
    Planted("any-version", "a replica is placed wherever its engine is, at whatever version", _any_version),
    Planted("builds-in-use", "nodes are not told to have the versions that their replicas run on", _builds_in_use),
    Planted("engines-not-stored", "which version was in effect before is not stored", _engines_not_stored),
    Planted("upgrade-first", "an original goes once its replacement is placed, ready or not", _upgrade_first),
)


def find(fault: Planted, seeds: Sequence[int], steps: int) -> Outcome | None:
    """The first seed that finds it; None where none does. A seed that ends by anything else has found nothing."""
    with planted(fault):
        for seed in seeds:
            outcome = simulate(seed, steps)
            if outcome.rule == "crash":
                raise RuntimeError(report(outcome))
            if outcome.rule:
                return outcome
    return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted")
    parser.add_argument("--seeds", default="1-300")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", help="the name of one fault")
    asked = parser.parse_args(arguments)
    without_logs()
    seeds, missed = parse_seeds(asked.seeds), 0
    for fault in FAULTS:
        if asked.only not in (None, fault.name):
            continue
        began = time.process_time()
        found = find(fault, seeds, asked.steps)
        spent_s = time.process_time() - began
        if found is None:
            missed += 1
            print(f"{fault.name:<15} NOT FOUND in {len(seeds)} seeds, {spent_s:.1f} s", flush=True)
        else:
            words = found.words.splitlines()[0][:110]
            print(f"{fault.name:<15} seed {found.seed:>4}, {spent_s:5.1f} s: {words}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
