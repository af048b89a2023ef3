"""What is timed, each as seconds of as many runs as were asked for."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from loopback import NARROW_NODE, LoopbackCluster, certificates, until
from processes import Crowd, Server, agent_id
from readings import choose_cores

from llmgw.agent.discovery import DiscoverySettings, discover, read_vitals
from llmgw.link.messages import Heartbeat
from llmgw.link.wire import decode, encode

AT_ONCE = 16
"""Requests that are sent right after an engine was killed."""
ASK = {"messages": [{"role": "user", "content": "Tell me of the sea."}], "ignore_eos": True}
LISTINGS = ("status", "nodes", f"nodes/{agent_id(NARROW_NODE)}", "models", "replicas", "engines", "events")
BATCH = 1000


def revoked(cluster: LoopbackCluster, number: int) -> float:
    """From the request that `ctl cert revoke` sends to the end of the agent's connection, at the agent's side."""
    pid = cluster.agents[number].pid
    (stream,) = _connections(cluster.ports["agents"]) & _sockets(pid)
    with ThreadPoolExecutor(1) as pool:
        began_s = time.monotonic()
        asked = pool.submit(cluster.client.post, f"certificates/{agent_id(number)}/revoke", {"why": "a benchmark"})
        until(lambda: stream not in _connections(cluster.ports["agents"]), "the connection of a revoked node is closed")
        took_s = time.monotonic() - began_s
        asked.result()
    return took_s


def _connections(port: int) -> set[str]:
    """Inodes of sockets that are connected to this port of 127.0.0.1; one that was closed has none (proc(5), tcp)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[2] == f"0100007F:{port:04X}"}


def _sockets(pid: int) -> set[str]:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def rank_killed(cluster: LoopbackCluster, rank: int) -> tuple[float, float]:
    """From the kill of one of two ranks until the other's process has ended, and until the gateway's table is without
    the replica."""
    (replica,) = cluster.scale("wide", 1)
    id, pids = replica["id"], replica["pids"]
    until(lambda: cluster.routed(id), "the replica is in the table")
    took_s: dict[str, float] = {}
    with _ended(pids[1 - rank]) as other_ended:
        began_s = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)

        def both() -> bool:
            for what, happened in (("other", other_ended()), ("table", not cluster.routed(id))):
                if happened:
                    took_s.setdefault(what, time.monotonic() - began_s)
            return len(took_s) == 2

        until(both, "the other rank has ended and the replica has left the table")
    return took_s["other"], took_s["table"]


@contextmanager
def _ended(pid: int) -> Iterator[Callable[[], bool]]:
    """Asks whether this process, which need not be a child of ours, has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield lambda: bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def engine_killed(cluster: LoopbackCluster, key: str) -> float:
    """The slowest of the requests that are sent right after one of three engines was killed: each must be answered."""
    victim = cluster.scale("narrow", 3)[0]
    body = ASK | {"model": "narrow", "max_tokens": 1}

    async def one(client: httpx2.AsyncClient) -> float:
        began_s = time.monotonic()
        (await client.post("chat/completions", json=body)).raise_for_status()
        return time.monotonic() - began_s

    async def all_of_them() -> float:
        async with httpx2.AsyncClient(**_to(cluster, key)) as client:
            await asyncio.gather(*(one(client) for _ in range(AT_ONCE)))  # so that connections are there
            os.kill(victim["pids"][0], signal.SIGKILL)
            return max(await asyncio.gather(*(one(client) for _ in range(AT_ONCE))))

    return asyncio.run(all_of_them())


def client_leaves(cluster: LoopbackCluster, key: str, runs: int) -> list[float]:
    """From the end of a client's connection, within a stream, until its engine counts a request as cancelled."""
    (replica,) = cluster.scale("narrow", 1)
    took_s = []
    with httpx2.Client(base_url=f"http://{replica['endpoint']}", trust_env=False) as engine:
        for _ in range(runs):
            took_s.append(_client_leaves(cluster, key, lambda: int(engine.get("/sim/stats").json()["cancelled"])))
    return took_s


def _client_leaves(cluster: LoopbackCluster, key: str, cancelled: Callable[[], int]) -> float:
    before = cancelled()
    body = ASK | {"model": "narrow", "max_tokens": 10_000, "stream": True}
    with httpx2.Client(**_to(cluster, key)) as client:
        with client.stream("POST", "chat/completions", json=body) as answer:
            answer.raise_for_status()
            lines = answer.iter_lines()
            for _ in range(20):
                next(lines)
            began_s = time.monotonic()
        until(lambda: cancelled() > before, "the engine sees that its client has left")
    return time.monotonic() - began_s


def _to(cluster: LoopbackCluster, key: str) -> dict[str, Any]:
    """How the gateway is reached."""
    headers = {"authorization": f"Bearer {key}"}
    return {"base_url": cluster.gateway, "headers": headers, "timeout": 60, "trust_env": False}


def listings(cluster: LoopbackCluster) -> float:
    """All that the admin API lists, one after another, while one node's agent stands still."""
    agent = cluster.agents[NARROW_NODE]
    agent.send_signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        for path in LISTINGS:
            cluster.client.get(path)
        return time.monotonic() - began_s
    finally:
        agent.send_signal(signal.SIGCONT)


def crowd(agents: int) -> list[float]:
    """Each agent's time from dial to welcome, where all dial one control plane at once."""
    cores = choose_cores()
    with certificates(agents) as pki:
        server = Server(pki, cores=cores)
        crowd: Crowd | None = None
        try:
            server.start()
            crowd = Crowd(agents, pki, server.url, within_s=0.0, core=cores[1])
            crowd.connect()
            registrations_s: list[float] = crowd.report()["registrations_s"]
            return registrations_s
        finally:
            if crowd is not None:
                crowd.stop()
            server.stop()


def heartbeat() -> float:
    """One of many that are decoded one after another."""
    text = encode(Heartbeat(epoch=1, session=1, sent_at=1.0, vitals=read_vitals(Path("/"))))
    return _each(lambda: decode(text), BATCH)


def vitals() -> float:
    return _each(lambda: read_vitals(Path("/")), BATCH // 20)


def discovery() -> float:
    """All that an agent finds out about its machine, of this one."""
    began_s = time.perf_counter()
    asyncio.run(discover(DiscoverySettings()))
    return time.perf_counter() - began_s


def _each(work: Callable[[], object], times: int) -> float:
    began_s = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began_s) / times
