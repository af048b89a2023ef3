"""Steps per second that the SQLite store takes, each on the disk before it counts.

    python benchmarks/store.py [DIRECTORY]

A step is what a replica's change of state writes: the replica with a full story, its node, and an event. It runs in
DIRECTORY (by default the current one), since it is the disk under it that is measured.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from llmgw.cluster.model import Node, NodeState, Replica, ReplicaState, StoryLine
from llmgw.store.base import Change, Event, Store
from llmgw.store.bounds import STORY_KEPT
from llmgw.store.memory import MemoryStore
from llmgw.store.sqlite import SqliteStore

SECONDS = 3.0


def step(number: int) -> Change:
    story = tuple(
        StoryLine(at=float(i), generation=i, state="starting", why="engine started") for i in range(STORY_KEPT)
    )
    return Change(
        nodes=[Node(id="llmgw-node01", state=NodeState.READY, since=float(number))],
        replicas=[Replica(id="m-abcde", model="m", state=ReplicaState.READY, since=float(number), story=story)],
        events=[Event(id=f"{number:026}", at=0.0, kind="replica.ready", subject="m-abcde", words="is ready")],
    )


async def steps_per_second(store: Store) -> float:
    taken = await store.lead("benchmark", lease_s=60.0, alone=True)
    assert taken is not None
    epoch = taken.epoch
    number, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        number += 1
        await store.commit(epoch, step(number))
    return number / (time.perf_counter() - began)


async def main(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as place:
        for name, store in (("sqlite", await SqliteStore.open(Path(place) / "llmgw.db")), ("memory", MemoryStore())):
            print(f"{name}: {await steps_per_second(store):.0f} steps/s", flush=True)
            await store.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
