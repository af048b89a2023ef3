"""Builds of engines through the control plane: what nodes are sent, what is stored, what operators see and do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from llmgw.cluster.actions import PutReplica
from llmgw.cluster.catalog import Catalog, EngineSpec, ModelSpec, Profile
from llmgw.cluster.lifecycle import FAILURES_GIVEN_UP
from llmgw.cluster.model import EngineOnNode, EngineState, ReplicaState, Vitals
from llmgw.link.messages import Desired, Heartbeat, Hello, Observed
from llmgw.link.server import Peer
from llmgw.store.base import Store
from llmgw.store.memory import MemoryStore
from tests.control.clock import Time
from tests.control.floor import GIB, VITALS, ControlFloor, dialled_in, inventory, open_floor

OLD, NEW = (EngineSpec(name="llamacpp", version=version, source="index") for version in ("b10068", "b10991"))
CHAT = ModelSpec(
    name="chat",
    source="/m.gguf",
    profiles=(Profile(name="p", engine="llamacpp", memory_bytes=GIB),),
)
LARGE = replace(CHAT, name="large", profiles=(replace(CHAT.profiles[0], memory_bytes=20 * GIB),))


def there(*versions: str, state: EngineState = EngineState.INSTALLED, words: str = "") -> tuple[EngineOnNode, ...]:
    return tuple(EngineOnNode(name="llamacpp", version=each, state=state, words=words) for each in versions)


@asynccontextmanager
async def a_floor(
    folder: Path, *models: ModelSpec, engines: tuple[EngineSpec, ...] = (OLD,), store: Store | None = None
) -> AsyncIterator[ControlFloor]:
    catalog = Catalog(models=models or (CHAT,), engines=engines)
    async with open_floor(folder, store, clock=Time(), catalog=catalog) as floor:
        yield floor


def join(floor: ControlFloor, id: str, engines: tuple[EngineOnNode, ...], session: int = 1) -> Peer:
    hello = Hello(role="node", id=id, inventory=inventory(id), vitals=VITALS, probed=True, engines=engines, version="1")
    peer = dialled_in(hello, session)
    floor.desk.on_welcomed(peer)
    return peer


def reports(floor: ControlFloor, peer: Peer, engines: tuple[EngineOnNode, ...]) -> None:
    floor.desk.on_frame(
        peer, Observed(epoch=floor.plane.epoch, session=peer.session, revision=1_000_000, engines=engines)
    )


async def edit(floor: ControlFloor, *engines: EngineSpec, models: tuple[ModelSpec, ...] = (CHAT,)) -> None:
    async def act() -> None:
        catalog = Catalog(models=models, engines=engines)
        floor.plane.take_catalog(catalog, suspect_after_s=15.0, lost_after_s=30.0, in_flight_s=600.0)

    await floor.plane.ask(act)


async def last(peer: Peer) -> Desired:
    """The newest that the node was asked for."""
    async with asyncio.timeout(10):
        frame = await peer.outbox.get()
        while len(peer.outbox):
            frame = await peer.outbox.get()
    assert isinstance(frame, Desired)
    return frame


async def words(floor: ControlFloor, kind: str) -> list[str]:
    return [event.words for event in await floor.store.events(limit=1000) if event.kind == kind]


async def test_nodes_are_sent_the_builds_in_effect_those_they_run_and_those_they_keep(tmp_path: Path) -> None:
    async with a_floor(tmp_path) as floor:
        busy, idle = join(floor, "n1", there("b10068")), join(floor, "n2", (), session=2)
        await floor.obey(busy)
        await last(idle)
        await edit(floor, NEW)
        asked, other = await last(busy), await last(idle)
        assert (asked.engines, asked.engines_kept) == ((NEW, OLD), (OLD,))
        assert (other.engines, other.engines_kept) == ((NEW,), (OLD,))
        assert asked.shards[0].profile.engine_version == "b10068"


async def test_every_node_is_sent_the_build_before_while_replicas_fail_on_the_one_in_effect(tmp_path: Path) -> None:
    async with a_floor(tmp_path) as floor:
        node = join(floor, "n1", there("b10068"))
        await floor.settled()
        (replica,) = floor.plane.cluster.replicas.values()
        await edit(floor, NEW)
        assert (await last(node)).engines == (NEW, OLD)
        newcomer = join(floor, "n2", (), session=2)
        await floor.settled()
        assert (await last(newcomer)).engines == (NEW,)

        async def fail() -> None:
            await floor.plane.carry_out((PutReplica(replace(replica, failures=FAILURES_GIVEN_UP)),))

        await floor.plane.ask(fail)
        await floor.settled()
        assert (await last(newcomer)).engines == (NEW, OLD)


async def test_nodes_are_not_sent_again_what_they_have(tmp_path: Path) -> None:
    async with a_floor(tmp_path) as floor:
        idle = join(floor, "n1", ())
        await floor.settled()
        await last(idle)
        await edit(floor, OLD)
        reports(floor, idle, there("b10068", state=EngineState.DOWNLOADING, words="42 %"))
        await floor.settled()
        assert not len(idle.outbox)


async def test_nodes_learn_where_gateways_are_that_are_not_here(tmp_path: Path) -> None:
    async with a_floor(tmp_path) as floor:
        node = join(floor, "n1", ())
        await floor.settled()
        assert (await last(node)).gateways == ()
        gateway = floor.join_gateway("gw1")
        await floor.settled()
        address = gateway.address.rpartition(":")[0]
        assert (await last(node)).gateways == (address,)
        floor.desk.on_closed(gateway, "the connection broke")
        await floor.settled()
        assert not len(node.outbox), "it serves on by the table that it has"
        other = dialled_in(Hello(role="gateway", id="gw2", version="1"), 9)
        beside = Peer(replace(other.entry, address="127.0.0.1:5555"), other.hello, other.identity, 0.0)
        floor.desk.on_welcomed(beside)
        await floor.settled()
        assert not len(node.outbox), "loopback is nobody else's address"


async def test_what_was_in_effect_survives_a_restart(tmp_path: Path) -> None:
    store = MemoryStore()
    async with a_floor(tmp_path, store=store) as floor:
        await floor.obey(join(floor, "n1", there("b10068")))
        await edit(floor, NEW)
        async with floor.admin() as client:
            assert (await client.post("/api/v1/engines/llamacpp/rollback")).status_code == 200
    async with a_floor(tmp_path, engines=(NEW,), store=store) as floor:
        history = floor.plane.cluster.engines["llamacpp"]
        assert (history.in_effect, history.spec, history.rolled_back) == (OLD, NEW, "an operator asked for it")
        assert floor.plane.cluster.catalog.models[0].profiles[0].engine_version == "b10068"


async def test_a_file_that_changed_while_nobody_led_is_an_upgrade_too(tmp_path: Path) -> None:
    store = MemoryStore()
    async with a_floor(tmp_path, store=store) as floor:
        await floor.obey(join(floor, "n1", there("b10068")))
    async with a_floor(tmp_path, engines=(NEW,), store=store) as floor:
        await floor.settled()
        assert floor.plane.cluster.engines["llamacpp"].previous == OLD
        assert (await words(floor, "engine.changed"))[0].startswith(
            "llamacpp b10068 -> b10991: nodes install it beside"
        )
    assert [each.previous for each in (await store.load()).engines] == [OLD]


async def test_the_api_rolls_back_and_forth_and_refuses_in_words(tmp_path: Path) -> None:
    async with a_floor(tmp_path) as floor, floor.admin() as client:
        url = "/api/v1/engines/llamacpp/rollback"
        refused = await client.post(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_rollback")
        assert "no version of llamacpp before b10068" in refused.json()["error"]["message"]
        unknown = await client.post("/api/v1/engines/lamacpp/rollback")
        assert (unknown.status_code, unknown.json()["error"]["hint"]) == (404, "known: llamacpp")
        assert (await client.post(url, json={"resets": True})).status_code == 422
        await edit(floor, NEW)
        rolled = (await client.post(url)).json()
        assert [(each["version"], each["standing"]) for each in rolled] == [
            ("b10068", "in effect"),
            ("b10991", "rolled back"),
        ]
        assert (await client.post(url)).status_code == 409
        back = (await client.post(url, json={"reset": True})).json()
        assert [(each["version"], each["standing"]) for each in back] == [
            ("b10991", "in effect"),
            ("b10068", "previous"),
        ]
        assert (await client.post(url, json={"reset": True})).status_code == 409
        assert len(await words(floor, "engine.rolled-back")) == 1


async def test_an_engine_that_appears_qualifies_its_node_and_the_waiting_model_is_placed(tmp_path: Path) -> None:
    async with a_floor(tmp_path) as floor:
        node = join(floor, "n1", there("b10068", state=EngineState.DOWNLOADING, words="downloading l (16 MB, 42 %)"))
        await floor.settled()
        (waiting,) = floor.plane.cluster.replicas.values()
        assert (waiting.state, waiting.why) == (
            ReplicaState.UNPLACED,
            "n1: installing: downloading l (16 MB, 42 %)",
        )
        reports(floor, node, there("b10068"))
        await floor.settled()
        (placed,) = floor.plane.cluster.replicas.values()
        assert placed.state is ReplicaState.PLACING
        assert "engine llamacpp b10068 downloading -> installed" in await words(floor, "node.engine")
        assert await words(floor, "node.qualifies") == ["node n1 now qualifies for chat"]


async def test_memory_that_is_added_qualifies_the_node_and_the_waiting_model_is_placed(tmp_path: Path) -> None:
    """By a heartbeat alone, without any restart."""
    async with a_floor(tmp_path, LARGE) as floor:
        node = join(floor, "n1", there("b10068"))
        await floor.settled()
        (waiting,) = floor.plane.cluster.replicas.values()
        assert waiting.why == "n1: 15.5 GiB of memory free, 20 GiB needed"
        more: Vitals = replace(VITALS, memory_bytes=32 * GIB)
        beat = Heartbeat(epoch=floor.plane.epoch, session=node.session, sent_at=0.0, vitals=more)
        floor.desk.on_heartbeat(node, beat)
        await floor.settled()
        (placed,) = floor.plane.cluster.replicas.values()
        assert placed.state is ReplicaState.PLACING
        assert "node n1: memory 16 GiB -> 32 GiB" in await words(floor, "node.changed")
        assert await words(floor, "node.qualifies") == ["node n1 now qualifies for large"]
