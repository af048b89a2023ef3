"""Hundreds of nodes that say all the time how they are: the store is for what changes, so nobody waits for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmgw.cluster.model import EngineState
from llmgw.link.messages import Heartbeat, Observed
from llmgw.link.server import Peer
from llmgw.store.base import Change
from llmgw.store.sqlite import SqliteStore
from tests.control.clock import Time
from tests.control.floor import ENGINE, VITALS, ControlFloor, open_floor

NODES = 300
BEATS = 12
"""A minute of them."""


class Counting(SqliteStore):
    commits = 0

    async def commit(self, epoch: int, change: Change) -> None:
        self.commits += 1
        await super().commit(epoch, change)


def says(floor: ControlFloor, peer: Peer, beat: int) -> None:
    """A heartbeat with other figures than the last, and the progress of a download."""
    vitals = replace(VITALS, memory_available_bytes=VITALS.memory_available_bytes - beat)
    plane = floor.plane
    floor.desk.on_heartbeat(
        peer, Heartbeat(epoch=plane.epoch, session=peer.session, sent_at=float(beat), vitals=vitals)
    )
    engines = (ENGINE, replace(ENGINE, name="llamacpp", state=EngineState.DOWNLOADING, words=f"{beat} %"))
    floor.desk.on_frame(peer, Observed(epoch=plane.epoch, session=peer.session, revision=1, engines=engines))


async def test_three_hundred_nodes_write_nothing_by_saying_how_they_are(tmp_path: Path) -> None:
    clock = Time()
    store = await Counting.open(tmp_path / "state" / "llmgw.db")
    try:
        async with open_floor(tmp_path, store, clock=clock) as floor:
            peers = [floor.join(f"n{number:03}") for number in range(NODES)]
            for peer in peers:
                says(floor, peer, 0)
            await floor.obey(*peers)
            registered = store.commits
            assert registered < NODES / 10, "what comes in together is written together"
            for beat in range(1, BEATS + 1):
                for _ in range(2):
                    clock.move(2.5)
                    await floor.settled()
                for peer in peers:
                    says(floor, peer, beat)
                await floor.settled()
            assert store.commits == registered
            node = floor.plane.cluster.nodes["n299"]
            assert node.vitals is not None
            assert node.vitals.memory_available_bytes == VITALS.memory_available_bytes - BEATS
            assert node.engines[1].words == f"{BEATS} %"
            # Something that does change is still written at once, and once.
            await floor.plane.ask(lambda: floor.plane.set_scale("m", 3))
            assert len((await store.load()).replicas) == 3
    finally:
        await store.close()
