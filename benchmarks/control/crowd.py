"""The process that holds the simulated agents. Started by ``run.py``; it is spoken to in lines of JSON.

    python crowd.py --agents N --pki DIR --url https://HOST:PORT/v1/stream --within SECONDS

It makes a TLS context for each agent, prints ``{"made": N}``, waits for a line ``connect``, lets all agents dial within
SECONDS, prints what their registrations took once the last was welcomed, and stays connected until its input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import uvloop
from node import SimulatedAgent

from llmgw.pki.contexts import ClientIdentity, client_context


def agent_id(number: int) -> str:
    return f"bench-node-{number:04}"


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def main(count: int, pki: Path, url: str, within_s: float) -> None:
    lines = await _input()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
        agents = []
        for number in range(count):
            id = agent_id(number)
            tls, _ = client_context(ClientIdentity(pki / "ca.pem", pki / f"{id}.pem", pki / f"{id}-key.pem"))
            agents.append(SimulatedAgent(id, tls, url, http))
        say(made=len(agents))
        await lines.readline()
        async with asyncio.TaskGroup() as group:
            began_s = time.monotonic()
            tasks = []
            for number, agent in enumerate(agents):
                await asyncio.sleep(max(0.0, began_s + number * within_s / count - time.monotonic()))
                tasks.append(group.create_task(agent.run()))
            dialled_s = time.monotonic() - began_s
            for agent in agents:
                await agent.welcomed.wait()
            _report(agents, began_s, dialled_s)
            await lines.readline()
            _report(agents, began_s, dialled_s)
            for task in tasks:
                task.cancel()


def _report(agents: list[SimulatedAgent], began_s: float, dialled_s: float) -> None:
    courses = [agent.course for agent in agents]
    troubles = Counter(trouble for course in courses for trouble in course.troubles)
    say(
        began_s=began_s,
        dialled_within_s=dialled_s,
        last_welcome_s=max(course.welcomed_s for course in courses),
        registrations_s=[round(course.welcomed_s - course.began_s, 4) for course in courses],
        again=sum(course.attempts - 1 for course in courses),
        troubles=dict(troubles.most_common(5)),
    )


async def _input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--agents", type=int, required=True)
    options.add_argument("--pki", type=Path, required=True)
    options.add_argument("--url", required=True)
    options.add_argument("--within", type=float, required=True)
    given = options.parse_args()
    uvloop.run(main(given.agents, given.pki, given.url, given.within))
