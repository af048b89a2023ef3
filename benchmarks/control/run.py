"""What a control plane costs: N simulated agents register with a real ``llmgw server``, stay, and take up replicas.

    .venv/bin/python benchmarks/control/run.py [--agents 10,50,100,200,500,1000] [--seconds 30]

The control plane has one core to itself, everything else (agents, gateway, this script) another. Prints one row of a
table for each N; README.md beside this file explains the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from processes import MODEL, Crowd, Server, make_pki, quick_directory
from readings import choose_cores, core_busy_s, cpu_s, machine, percentile, resident_bytes

from llmgw.client import AdminClient

POLL_S = 0.1
NODES_CALLS = 20
NODES_EVERY_S = 0.25
GIVE_UP_S = 120.0
OWN_FILES = 500
"""Open files that a control plane or this script needs besides one for each agent."""


@dataclass
class Row:
    """One N. Seconds and bytes, unless a name says otherwise."""

    agents: int
    all_ready_s: float = 0.0
    """From the first dial until the admin API shows every node ready."""
    registrations_s: list[float] = field(default_factory=list)
    """From dial to welcome, of each agent."""
    registering_cpu_s: float = 0.0
    others_percent: float = 0.0
    """Of that time, how much the control plane's core worked for others: what disturbed the measurement."""
    steady_cpu_percent: float = 0.0
    """Of one core, with heartbeats alone."""
    serving_cpu_percent: float = 0.0
    """Of one core, with heartbeats and a replica on each node."""
    resident_bytes: list[int] = field(default_factory=list)
    """At the start, with all registered, at the end."""
    nodes_s: list[float] = field(default_factory=list)
    """``GET /api/v1/nodes``, one after another."""
    scale_s: float = 0.0
    """From asking for N replicas until all are ready."""
    scaling_cpu_s: float = 0.0
    again: int = 0
    """Connections that had to be made again."""
    troubles: dict[str, int] = field(default_factory=dict)


def measure(agents: int, pki: Path, options: argparse.Namespace, cores: tuple[int, int]) -> Row:
    row = Row(agents)
    server = Server(pki, cores=cores)
    crowd: Crowd | None = None
    try:
        server.start()
        crowd = Crowd(agents, pki, server.url, within_s=options.within, core=cores[1])
        with server.admin() as admin:
            _register(row, server, crowd, admin, cores[0])
            row.steady_cpu_percent = _steady(server.pid, options.seconds)
            _list_nodes(row, admin)
            _scale(row, server, admin)
            row.serving_cpu_percent = _steady(server.pid, options.seconds)
            row.resident_bytes.append(resident_bytes(server.pid))
        told = crowd.last_report()
        row.again, row.troubles = told["again"], told["troubles"]
    except Exception:
        print(server.log(), file=sys.stderr)
        raise
    finally:
        if crowd is not None:
            crowd.stop()
        server.stop(keep=options.keep)
    return row


def _register(row: Row, server: Server, crowd: Crowd, admin: AdminClient, core: int) -> None:
    row.resident_bytes.append(resident_bytes(server.pid))
    before_s, busy_s, asked_s = cpu_s(server.pid), core_busy_s(core), time.monotonic()
    crowd.connect()
    told = crowd.report()
    _until(admin, "nodes", row.agents)
    row.all_ready_s = time.monotonic() - told["began_s"]
    row.registrations_s = told["registrations_s"]
    row.registering_cpu_s = cpu_s(server.pid) - before_s
    others_s = core_busy_s(core) - busy_s - row.registering_cpu_s
    row.others_percent = max(0.0, 100 * others_s / (time.monotonic() - asked_s))
    row.resident_bytes.append(resident_bytes(server.pid))


def _steady(pid: int, seconds: float) -> float:
    """CPU of a process over some time, in percent of one core. Nobody asks it anything meanwhile."""
    time.sleep(1.0)
    before_s, began_s = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_s(pid) - before_s) / (time.monotonic() - began_s)


def _list_nodes(row: Row, admin: AdminClient) -> None:
    for _ in range(NODES_CALLS):
        began_s = time.monotonic()
        nodes = admin.get("nodes")
        row.nodes_s.append(time.monotonic() - began_s)
        if len(nodes) != row.agents:
            raise RuntimeError(f"{len(nodes)} nodes are listed, {row.agents} registered")
        time.sleep(NODES_EVERY_S)


def _scale(row: Row, server: Server, admin: AdminClient) -> None:
    before_s, began_s = cpu_s(server.pid), time.monotonic()
    admin.put(f"models/{MODEL}/scale", {"replicas": row.agents})
    _until(admin, "replicas", row.agents)
    row.scale_s = time.monotonic() - began_s
    row.scaling_cpu_s = cpu_s(server.pid) - before_s


def _until(admin: AdminClient, what: str, count: int) -> None:
    """Waits until as many nodes or replicas are ready."""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        status: dict[str, Any] = admin.get("status")
        if status[what].get("ready", 0) == count:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {GIVE_UP_S:g} s not all {count} {what} are ready: {status[what]}")
        time.sleep(POLL_S)


HEAD = (
    "| agents | all ready | registration p50 / p99 | CPU per registration | core held by others | steady CPU "
    "| per agent | with N replicas | memory start / registered / end | `GET nodes` p50 / max | scale to N | again |\n"
    + "| ---: " * 12
    + "|"
)


def line(row: Row) -> str:
    start, registered, end = (size / 2**20 for size in row.resident_bytes)
    cells = (
        str(row.agents),
        f"{row.all_ready_s:.1f} s",
        f"{percentile(row.registrations_s, 50):.2f} / {percentile(row.registrations_s, 99):.2f} s",
        f"{1000 * row.registering_cpu_s / row.agents:.1f} ms",
        f"{row.others_percent:.0f} %",
        f"{row.steady_cpu_percent:.1f} %",
        f"{row.steady_cpu_percent / row.agents:.3f} %",
        f"{row.serving_cpu_percent:.1f} %",
        f"{start:.0f} / {registered:.0f} / {end:.0f} MiB",
        f"{1000 * percentile(row.nodes_s, 50):.0f} / {1000 * max(row.nodes_s):.0f} ms",
        f"{row.scale_s:.1f} s ({row.scaling_cpu_s:.1f} s CPU)",
        str(row.again),
    )
    return f"| {' | '.join(cells)} |"


def allow_files(agents: int) -> None:
    """Raise the limit of open files, which the processes started here inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = agents + OWN_FILES
    if soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        sys.exit(f"{agents} agents need {needed} open files, and the hard limit is {hard}: raise it (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="10,50,100,200,500,1000", help="numbers of agents, a row each")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each steady state is looked at")
    parser.add_argument("--within", type=float, default=1.0, help="seconds within which all agents dial")
    parser.add_argument("--json", type=Path, help="also write every row here, as JSON lines")
    parser.add_argument("--keep", action="store_true", help="keep the control plane's directory")
    options = parser.parse_args()
    counts = [int(text) for text in options.agents.split(",")]
    cores = choose_cores()
    allow_files(max(counts))
    pki = quick_directory()
    try:
        began_s = time.monotonic()
        make_pki(pki / "pki", max(counts))
        print(f"{max(counts)} certificates in {time.monotonic() - began_s:.1f} s", file=sys.stderr)
        print(f"{machine()}\nControl plane on core {cores[0]}, all else on core {cores[1]}.\n")
        os.sched_setaffinity(0, {cores[1]})
        print(HEAD, flush=True)
        for count in counts:
            row = measure(count, pki / "pki", options, cores)
            print(line(row), flush=True)
            if row.troubles:
                print(f"broken connections at {count} agents: {row.troubles}", file=sys.stderr)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    finally:
        shutil.rmtree(pki, ignore_errors=True)


if __name__ == "__main__":
    main()
