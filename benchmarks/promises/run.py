"""What the documentation promises in seconds, measured: real processes on this machine, one table.

    .venv/bin/python benchmarks/promises/run.py [--runs 10] [--strict]

Exits with status 1 where a median is over what is promised, with --strict where a single run is. README.md beside this
file explains the rows.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import measures
from loopback import NARROW_NODE, LoopbackCluster, certificates
from readings import machine, percentile

AGENTS = 100


@dataclass(frozen=True)
class Row:
    promise: str
    promised_s: float
    took_s: Sequence[float]
    worst_percent: float = 100.0

    @property
    def median_s(self) -> float:
        return median(self.took_s)

    @property
    def worst_s(self) -> float:
        return percentile(self.took_s, self.worst_percent)

    def line(self) -> str:
        cells = (shown(self.promised_s), shown(self.median_s), shown(self.worst_s), str(len(self.took_s)))
        return f"| {self.promise:39} | " + " | ".join(f"{cell:>8}" for cell in cells[:3]) + f" | {cells[3]:>4} |"


def shown(took_s: float) -> str:
    if took_s >= 1:
        return f"{took_s:.2f} s"
    return f"{1e3 * took_s:.1f} ms" if took_s >= 1e-3 else f"{1e6 * took_s:.1f} µs"


def on_a_cluster(times: range) -> Iterator[Row]:
    first = NARROW_NODE + 1  # of those that are revoked
    nodes = first + len(times)
    with certificates(nodes) as pki:
        cluster = LoopbackCluster(pki)
        try:
            cluster.start_all(nodes)
            listed_s = [measures.listings(cluster) for _ in times]
            yield Row("7 listings while an agent stands still", 2.0, listed_s)
            closed_s = [measures.revoked(cluster, first + number) for number in times]
            yield Row("revoked: its agent's connection closed", 1.0, closed_s)
            for rank, killed, other in ((1, "worker", "leader"), (0, "leader", "worker")):
                ended_s, gone_s = zip(*(measures.rank_killed(cluster, rank) for _ in times), strict=True)
                yield Row(f"{killed} killed: its {other} has ended", 1.0, ended_s)
                yield Row(f"{killed} killed: out of the table", 1.0, gone_s)
            key = cluster.key()
            answered_s = [measures.engine_killed(cluster, key) for _ in times]
            yield Row("engine killed: slowest answer by others", 1.0, answered_s)
            yield Row("client leaves: its engine sees it", 0.5, measures.client_leaves(cluster, key, len(times)))
        except Exception:
            print(cluster.log(), file=sys.stderr)
            raise
        finally:
            cluster.stop()


def rows(runs: int) -> Iterator[Row]:
    times = range(runs)
    yield Row("a heartbeat is decoded", 50e-6, [measures.heartbeat() for _ in times])
    yield Row("a reading of vitals", 20e-3, [measures.vitals() for _ in times])
    yield Row("an agent finds out about its machine", 0.1, [measures.discovery() for _ in times])
    yield from on_a_cluster(times)
    dialled_s = [took_s for _ in times[::3] for took_s in measures.crowd(AGENTS)]
    yield Row(f"{AGENTS} dial at once: welcome (worst: p99)", 10.0, dialled_s, worst_percent=99.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of each row")
    parser.add_argument("--strict", action="store_true", help="let no run be over what is promised")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended, as it is by Ctrl-C
    print(textwrap.fill(machine(), 79) + "\n")
    print(
        f"| {'promise':39} | promised |   median |    worst | runs |\n| --- | ---: | ---: | ---: | ---: |", flush=True
    )
    over, once = [], []
    for row in rows(options.runs):
        print(row.line(), flush=True)
        if row.median_s > row.promised_s:
            over.append(row.promise)
        elif row.worst_s > row.promised_s:
            once.append(row.promise)
    print(f"\nLoad average at the end: {os.getloadavg()[0]:.1f}.")
    for words, found in (("by its median", over), ("in its worst run alone", once)):
        if found:
            print(f"Over what is promised {words}: {'; '.join(found)}.")
    sys.exit(1 if over or (options.strict and once) else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
