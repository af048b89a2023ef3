"""Many runs of what the tests here run once: ``python -m tests.cluster.net.soak CASE [--runs N]``; prints a table.

Needs root, iproute2, nftables and util-linux. Ends with status 1 where a run did not come to its end, and says where.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from tests.cluster.lab import eventually
from tests.cluster.net.lab import NetLab
from tests.cluster.net.load import Load
from tests.cluster.net.reference import FABRICS, QUICK, WIDE, Reference, drained, models, nodes_of, partitioned

PHASES = ("before it is noticed", "while it is suspect", "as it is placed anew", "while it starts", "once it is ready")
PARTITION_S = 120.0


@contextlib.contextmanager
def cluster(text: str, extra: str = "") -> Iterator[NetLab]:
    lab = NetLab.build(text, extra=extra)
    try:
        yield lab
    finally:
        lab.close()


def reference(run: int) -> dict[str, float]:
    """A node loses its power at default settings; seconds until its replica is ready on the other fabric."""
    return _reference("")


def quick(run: int) -> dict[str, float]:
    """The same with ``lost_after: 5s``."""
    return _reference("nodes: {lost_after: 5s}\n")


def _reference(extra: str) -> dict[str, float]:
    with cluster(models(), extra) as lab:
        case = Reference.start(lab)
        with Load(lab, case.key, "wide", clients=4, tokens=60) as load:
            took_s = case.failed_over(load=load, within_s=90)
        assert not load.failed, load.words()
        return {"seconds": took_s, "requests": load.whole, "failed before a token": len(load.failed)}


def restarts(run: int) -> dict[str, float]:
    """The same with the control plane killed and started again in the middle of one of its phases, in turn."""
    phase = run % len(PHASES)
    with cluster(models(), QUICK) as lab:
        case = Reference.start(lab)

        def state(name: str) -> str:
            return str(next(node["state"] for node in lab.get("nodes") if node["id"] == name))

        def meanwhile() -> None:
            if phase == 1:
                eventually(lambda: state("node02") == "suspect", "it is suspect", 20)
            if phase >= 2:
                eventually(lambda: state("node02") == "lost", "it is lost", 20)
            if phase == 3:
                eventually(lambda: any(found["state"] == "starting" for found in case.wide()), "it starts", 20)
            if phase == 4:
                case.ready(2, 30)
            case.server.kill()
            case.server = lab.server()

        with Load(lab, case.key, "wide", clients=4, tokens=60) as load:
            took_s = case.failed_over(load=load, within_s=90, meanwhile=meanwhile)
        assert not load.failed, load.words()
        return {"phase": phase, "seconds": took_s, "failed before a token": len(load.failed)}


def drain(run: int) -> dict[str, float]:
    """A node of a two-node replica (its leader's, or a worker's, in turn) is emptied under twenty streams."""
    with cluster(f"models:\n{WIDE}") as lab:
        case = Reference.start(lab)
        victim = next(replica for replica in case.ready(2, 10) if FABRICS[nodes_of(replica)[0]] == "ib-a")
        with Load(lab, case.key, "wide", clients=20, tokens=80) as load:
            began_s = time.monotonic()
            report = drained(lab, nodes_of(victim)[run % 2])
            took_s = time.monotonic() - began_s
        assert not load.broken, load.words()
        assert not load.failed, load.words()
        finished = sum(move["finished"] for move in report["moves"])
        return {
            "seconds": took_s,
            "streams": load.whole,
            "finished at the original": finished,
            "broken": 0,
            "failed": 0,
        }


def partition(run: int) -> dict[str, float]:
    """A node is cut off for two minutes and heals."""
    labs: list[NetLab] = []

    def build(text: str, *, extra: str = "") -> NetLab:
        labs.append(NetLab.build(text, extra=extra))
        return labs[-1]

    began_s = time.monotonic()
    try:
        partitioned(build, extra="", until_replaced=True, cut_s=PARTITION_S)
    finally:
        for lab in labs:
            lab.close()
    return {"seconds": time.monotonic() - began_s}


CASES: dict[str, Callable[[int], dict[str, float]]] = {
    case.__name__: case for case in (reference, quick, restarts, drain, partition)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="all of them, where none is named")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    failures = sum(soak(name, options.runs) for name in options.cases or CASES)
    return 1 if failures else 0


def soak(name: str, runs: int) -> int:
    print(f"## {name}: {CASES[name].__doc__}\n", flush=True)
    rows, failures = [], 0
    for run in range(runs):
        try:
            rows.append(CASES[name](run))
        except Exception:
            failures += 1
            print(f"run {run} failed\n{traceback.format_exc()}", flush=True)
    for column in rows[0] if rows else ():
        values = [row[column] for row in rows]
        spread = f"median {statistics.median(values):.1f}, least {min(values):.1f}, most {max(values):.1f}"
        print(f"- {column}: {spread}")
    print(f"- {runs} runs, {len(rows)} came to the same end, {failures} did not\n", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
