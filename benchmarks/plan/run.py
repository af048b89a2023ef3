"""What it takes to decide where everything goes: from nothing, and where one thing has changed.

    .venv/bin/python benchmarks/plan/run.py [--nodes 10,100,1000,10000] [--scenes single,mixed]

Every figure is processor time of one whole ``reconcile``, on one core: the decisions alone, without writing or sending
them. README.md beside this file explains the columns.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from scenes import GPUS, NOW, PER_FABRIC, SCENES, cluster, observed, running

from llmgw.cluster.actions import PutReplica
from llmgw.cluster.model import Cluster, Instant, NodeState, Replica, ReplicaState, ShardState
from llmgw.cluster.placement import Planner
from llmgw.cluster.reconcile import apply, reconcile
from llmgw.version import VERSION

TIMES = 7
LATER = Instant(NOW.wall_s + 2.0, NOW.monotonic_s + 2.0)


@dataclass(frozen=True)
class Row:
    scene: str
    nodes: int
    replicas: int
    placed: int
    full_s: float
    idle_s: float
    again_s: tuple[float, float]
    lost_s: tuple[float, float]


def measure(scene: str, nodes: int) -> Row:
    nothing = cluster(scene, nodes)
    full_s = min(_taken(lambda: reconcile(nothing, NOW), 3 if nodes <= 1000 else 1))
    state = running(scene, nodes)
    placed = sum(replica.state is ReplicaState.READY for replica in state.replicas.values())
    return Row(
        scene=scene,
        nodes=nodes,
        replicas=len(state.replicas),
        placed=placed,
        full_s=full_s,
        idle_s=min(_taken(lambda: reconcile(state, NOW), TIMES)),
        again_s=_first_and_best(_failed(state), LATER),
        lost_s=_first_and_best(_with_a_lost_node(state), NOW),
    )


def _failed(state: Cluster) -> Cluster:
    """One replica has failed and ended, and its backoff is over: its next generation is due."""
    replica = next(each for each in state.replicas.values() if each.state is ReplicaState.READY)
    failed = _reported(state, replica, ShardState.FAILED)
    failed = apply(failed, reconcile(failed, NOW))
    stopped = _reported(failed, replica, ShardState.STOPPED)
    stopped = apply(stopped, reconcile(stopped, NOW))
    heard = {key: replace(node, heard_at_s=LATER.monotonic_s) for key, node in stopped.nodes.items()}
    return replace(stopped, nodes=heard)


def _reported(state: Cluster, replica: Replica, shard_state: ShardState) -> Cluster:
    nodes = dict(state.nodes)
    for rank, placement in enumerate(replica.placements):
        node = nodes[placement.node]
        others = tuple(shard for shard in node.shards if shard.id != replica.shard_id(rank))
        nodes[placement.node] = replace(node, shards=(*others, observed(replica, rank, shard_state)))
    return replace(state, nodes=nodes)


def _with_a_lost_node(state: Cluster) -> Cluster:
    """One node is silent for too long now: what it ran is to be placed elsewhere in the same step."""
    replica = next(each for each in state.replicas.values() if each.state is ReplicaState.READY)
    name = replica.placements[-1].node
    silent = replace(state.nodes[name], heard_at_s=NOW.monotonic_s - 2 * state.lost_after_s, session=None)
    return replace(state, nodes={**state.nodes, name: replace(silent, state=NodeState.SUSPECT)})


def _first_and_best(state: Cluster, now: Instant) -> tuple[float, float]:
    if not any(isinstance(action, PutReplica) for action in reconcile(state, now)):
        raise RuntimeError("nothing was decided: this measures something else")
    _forget()
    first, *others = _taken(lambda: reconcile(state, now), TIMES + 1)
    return first, min(others)


def _forget() -> None:
    """A planner keeps what it worked out of a cluster: have it look at another one, as after a start."""
    Planner(cluster("single", 1))


def _taken(work: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        gc.collect()
        began_s = time.process_time()
        work()
        taken.append(time.process_time() - began_s)
    return taken


HEAD = (
    "| scene | nodes | replicas | placed | full plan | nothing to do | one replica again: first / next "
    "| one node lost: first / next |\n| --- " + "| ---: " * 7 + "|"
)


def line(row: Row) -> str:
    again, lost = (" / ".join(f"{1000 * each_s:.1f}" for each_s in times) for times in (row.again_s, row.lost_s))
    cells = (
        row.scene,
        f"{row.nodes:,}",
        f"{row.replicas:,}",
        f"{row.placed:,}",
        f"{1000 * row.full_s:,.0f} ms" if row.full_s > 0.01 else f"{1000 * row.full_s:.1f} ms",
        f"{1000 * row.idle_s:.1f} ms",
        f"{again} ms",
        f"{lost} ms",
    )
    return f"| {' | '.join(cells)} |"


def machine() -> str:
    processors = (
        text.partition(":")[2].strip()
        for text in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in text
    )
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    load = " ".join(f"{average:.1f}" for average in os.getloadavg())
    return (
        f"{when}, {next(processors, platform.machine())}, {os.cpu_count()} cores, load average {load}, "
        f"Python {platform.python_version()}, llmgw v{VERSION}. Nodes of {GPUS} GPUs, {PER_FABRIC} to a fabric."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="10,30,100,300,1000,3000,10000", help="numbers of nodes, a row each")
    parser.add_argument("--scenes", default=",".join(SCENES), help=f"of {', '.join(SCENES)}")
    options = parser.parse_args()
    print(f"{machine()}\n\n{HEAD}", flush=True)
    for scene in options.scenes.split(","):
        for nodes in map(int, options.nodes.split(",")):
            print(line(measure(scene, nodes)), flush=True)


if __name__ == "__main__":
    main()
