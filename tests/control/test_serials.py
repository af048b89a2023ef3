"""Certificates at their first use: entered in one step however many come at once, and not forgotten by a full disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from llmgw.cluster.model import Cluster
from llmgw.control.plane import Plane
from llmgw.control.serials import Serials
from llmgw.link.session import Presented
from llmgw.pki.certificate import PeerIdentity
from llmgw.store.base import Change, Saved, StoreError
from llmgw.store.identities import Certificate
from llmgw.store.memory import MemoryStore
from tests.control.leading import leading

NODES = {f"{number:02x}": f"n{number}" for number in range(50)}


class FullAtFirst(MemoryStore):
    """Counts what is written, and takes nothing before ``room`` is set."""

    def __init__(self, *, room: bool) -> None:
        super().__init__()
        self.room = room
        self.entering: list[dict[str, str]] = []
        self.refused = asyncio.Event()

    async def commit(self, epoch: int, change: Change) -> None:
        if not self.room:
            self.refused.set()
            raise StoreError("the disk is full")
        await super().commit(epoch, change)
        if change.certificates:
            self.entering.append({each.serial: each.node for each in change.certificates})


@asynccontextmanager
async def running(store: FullAtFirst, saved: Saved) -> AsyncIterator[Plane]:
    leadership = await leading(store)
    plane = Plane(Cluster(name="c", secret="s"), store=store, leadership=leadership, saved=saved)
    task = asyncio.ensure_future(plane.run())
    try:
        yield plane
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settled(plane: Plane) -> None:
    async def nothing() -> None:
        return None

    async with asyncio.timeout(10):
        await plane.ask(nothing)


def presented(serial: str, node: str, instance: str = "") -> Presented:
    identity = PeerIdentity(
        common_name=node,
        role="node",
        id=node,
        cluster="c",
        serial=serial,
        not_after=datetime(2100, 1, 1, tzinfo=UTC),
        roles={"node": node},
    )
    return Presented(
        role="node", id=node, identity=identity, address="10.0.0.1:1", machine=node, instance=instance or node
    )


def let_in(serials: Serials, serial: str, node: str) -> None:
    assert serials.allow(presented(serial, node)) is None
    serials.used(presented(serial, node))


async def stored(store: FullAtFirst) -> dict[str, str]:
    return {each.serial: each.node for each in (await store.load()).certificates}


async def entered(store: FullAtFirst) -> list[str]:
    return [event.subject for event in await store.events(limit=1000) if event.kind == "certificate.entered"]


async def test_fifty_certificates_are_entered_in_one_step() -> None:
    store = FullAtFirst(room=True)
    async with running(store, Saved()) as plane:
        serials = Serials(plane)
        for serial, node in NODES.items():
            let_in(serials, serial, node)
        await settled(plane)
        plane.note("control.test", "", "another step")
        await settled(plane)
    assert store.entering == [NODES]
    assert await stored(store) == NODES
    assert await entered(store) == list(NODES.values())


async def test_a_certificate_that_is_known_is_not_entered_again() -> None:
    store = FullAtFirst(room=True)
    known = Certificate(serial="00", node="n0", not_after=4e9, first_used_at=1.0)
    async with running(store, Saved(certificates=(known,))) as plane:
        serials = Serials(plane)
        let_in(serials, "00", "n0")
        assert "is that of n0, not of n1" in str(serials.allow(presented("00", "n1")))
        await settled(plane)
    assert store.entering == []
    assert await entered(store) == []


async def test_a_full_disk_only_puts_off_what_is_entered() -> None:
    store = FullAtFirst(room=False)
    async with running(store, Saved()) as plane:
        serials = Serials(plane)
        let_in(serials, "00", "n0")
        async with asyncio.timeout(10):
            await store.refused.wait()
        let_in(serials, "01", "n1")
        assert store.entering == []
        store.room = True
        await settled(plane)
    assert await stored(store) == {"00": "n0", "01": "n1"}
    assert await entered(store) == ["n0", "n1"]
