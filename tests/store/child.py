"""A process with a store of its own, for the tests: ``python child.py SCENE PATH``. Prints one line per thing done."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from llmgw.cluster.model import Node, NodeState, Replica, ReplicaState
from llmgw.store.base import Change, Event, StoreError
from llmgw.store.sqlite import SqliteStore


def step(number: int, filling: str = "") -> Change:
    """A step whose parts all carry ``number``: half of one would show."""
    return Change(
        nodes=[Node(id="n", state=NodeState.READY, since=float(number), why=filling)],
        replicas=[Replica(id="r", model="m", state=ReplicaState.READY, since=float(number), generation=number)],
        replicas_made={"m": number},
        events=[Event(id=f"{number:026}", at=float(number), kind="test", subject="n", words=filling)],
    )


async def leading(store: SqliteStore) -> int:
    taken = await store.lead("child", lease_s=30.0, alone=True)
    assert taken is not None
    return taken.epoch


async def write_forever(path: Path) -> None:
    store = await SqliteStore.open(path)
    epoch = await leading(store)
    number = 0
    while True:
        number += 1
        await store.commit(epoch, step(number))
        print(number, flush=True)


async def hold(path: Path) -> None:
    store = await SqliteStore.open(path)
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await store.close()


async def refuse_to_open(path: Path) -> None:
    try:
        await SqliteStore.open(path)
    except StoreError as error:
        print(type(error).__name__, error, flush=True)


async def fill_the_disk(path: Path) -> None:
    """On a small file system: write until it is full, then make room and go on."""
    ballast = path.with_name("ballast")
    ballast.write_bytes(b"x" * 300_000)
    store = await SqliteStore.open(path)
    epoch = await leading(store)
    number, filling = 0, "x" * 50_000
    try:
        while True:
            number += 1
            await store.commit(epoch, step(number, filling))
    except StoreError as error:
        print("refused", number, error, flush=True)
    saved = await store.load()
    print("kept", saved.replicas[0].generation, int(saved.nodes[0].since), saved.replicas_made["m"], flush=True)
    try:
        await store.backup(str(path.with_name("copy.db")))
    except StoreError as error:
        print("no backup", sorted(entry.name for entry in path.parent.iterdir()), error, flush=True)
    ballast.unlink()
    await store.commit(epoch, step(number))
    print("goes on", (await store.load()).replicas[0].generation, flush=True)
    await store.close()


SCENES = {
    "write-forever": write_forever,
    "hold": hold,
    "refuse-to-open": refuse_to_open,
    "fill-the-disk": fill_the_disk,
}

if __name__ == "__main__":
    asyncio.run(SCENES[sys.argv[1]](Path(sys.argv[2])))
