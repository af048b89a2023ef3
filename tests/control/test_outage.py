"""A store that can't be written, for a moment or for long: every act of the admin API is answered, and the answer is
true. What is said to be refused leaves nothing behind; what is said to be taken up is carried out, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from llmgw.cluster.actions import PutNode
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import Brake, NodeState
from llmgw.control import plane as plane_module
from llmgw.control.plane import NotWritten
from llmgw.store.base import ApiKey, Change, Saved, StoreError
from llmgw.store.identities import Token
from llmgw.store.memory import MemoryStore
from tests.control.floor import CATALOG, SERVER_FILE
from tests.control.office import Machine, Office, open_office

OLD, NEW = (EngineSpec(name="llamacpp", version=version, source="index") for version in ("b10068", "b10991"))
OUTAGES_S = (1, 4, 60)
"""Within a third of the lease, past that, and past the whole of it."""
BOUNDS: Mapping[str, float] = {"suspect_after_s": 15.0, "lost_after_s": 30.0, "in_flight_s": 600.0}

REFUSED: dict[tuple[str, str], tuple[str, Any]] = {
    ("PUT", "/models/{name}/scale"): ("/models/m/scale", {"replicas": 5}),
    ("DELETE", "/models/{name}/scale"): ("/models/m/scale", None),
    ("POST", "/models/{name}/restart"): ("/models/m/restart", {"allow_downtime": True}),
    ("POST", "/keys"): ("/keys", {"name": "new"}),
    ("DELETE", "/keys/{name}"): ("/keys/key-old", None),
    ("POST", "/nodes/{name}/drain"): ("/nodes/gpu-1/drain", {"wait": True}),
    ("DELETE", "/nodes/{name}/drain"): ("/nodes/gpu-2/drain", None),
    ("DELETE", "/nodes/{name}"): ("/nodes/gpu-3", None),
    ("POST", "/nodes/{name}/token"): ("/nodes/gpu-4/token", None),
    ("POST", "/engines/{name}/rollback"): ("/engines/llamacpp/rollback", None),
    ("POST", "/brake/release"): ("/brake/release", None),
}
TAKEN_UP: dict[tuple[str, str], tuple[str, Any]] = {
    ("POST", "/reload"): ("/reload", None),
    ("POST", "/halt"): ("/halt", None),
    ("POST", "/certificates/{name}/revoke"): ("/certificates/gpu-1/revoke", {"why": "stolen"}),
}
STORES_NOTHING = {("POST", "/what-if"), ("POST", "/certificates/{name}/renew")}


class Outage(MemoryStore):
    """Takes nothing while ``down``."""

    down = False

    async def renew(self, epoch: int, lease_s: float) -> None:
        self._check()
        await super().renew(epoch, lease_s)

    async def commit(self, epoch: int, change: Change) -> None:
        self._check()
        await super().commit(epoch, change)

    async def claim_token(self, epoch: int, token: Token, change: Change) -> bool:
        self._check()
        return await super().claim_token(epoch, token, change)

    async def set_scale(self, epoch: int, model: str, replicas: int | None, base: int) -> None:
        self._check()
        await super().set_scale(epoch, model, replicas, base)

    async def put_key(self, epoch: int, key: ApiKey) -> None:
        self._check()
        await super().put_key(epoch, key)

    def _check(self) -> None:
        if self.down:
            raise StoreError("the disk is full")


@asynccontextmanager
async def an_office(folder: Path, store: Outage) -> AsyncIterator[tuple[Office, Machine]]:
    """At rest: gpu-1 has what it should, gpu-2 is drained, gpu-3 is lost; and the first of them."""
    async with open_office(folder, store=store) as office:
        plane, floor = office.plane, office.floor
        machines = [await office.joined(name) for name in ("gpu-1", "gpu-2", "gpu-3")]

        async def arrange() -> None:
            for spec in (OLD, NEW):
                plane.take_catalog(replace(CATALOG, engines=(spec,)), **BOUNDS)
            await plane.set_scale("m", 3)
            await plane.put_key(ApiKey(id="key-old", name="old", hash="x", created_at=1.0))
            lost = replace(plane.cluster.nodes["gpu-3"], state=NodeState.LOST, session=None)
            await plane.carry_out((PutNode(lost),))

        office.hang_up("gpu-3")
        await plane.ask(arrange)
        await office.token("gpu-3", take_over=True)
        async with office.admin() as client:
            assert (await client.post("/api/v1/nodes/gpu-2/drain", json={"wait": True})).status_code == 200
        await floor.obey(*office.live.values())
        yield office, machines[0]


async def pass_by(office: Office, seconds: int) -> None:
    async def nothing() -> None:
        return None

    for _ in range(seconds):
        office.time.move(1)
        for peer in office.live.values():
            office.floor.beat(peer)
        async with asyncio.timeout(10):
            with suppress(NotWritten):
                await office.plane.ask(nothing)


async def asked(client: httpx2.AsyncClient, acts: dict[tuple[str, str], tuple[str, Any]]) -> set[tuple[int, str, str]]:
    """All of them at once; what they were answered."""
    answers = await asyncio.gather(
        *(client.request(method, f"/api/v1{path}", json=body) for (method, _), (path, body) in acts.items())
    )
    errors = [(answer.status_code, answer.json()["error"]) for answer in answers]
    return {(status, error["code"], error["message"]) for status, error in errors}


def in_force(saved: Saved) -> Saved:
    """A key that nobody was given is kept, revoked."""
    return replace(saved, keys=tuple(key for key in saved.keys if key.revoked_at is None))


async def kinds(store: Outage) -> list[str]:
    return [event.kind for event in await store.events(limit=10_000)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_module, "RETRY_S", 0.0)


async def test_every_act_is_known_here(tmp_path: Path) -> None:
    async with open_office(tmp_path) as office, office.admin():
        paths = office.floor.app.openapi()["paths"]
    acts = {(method.upper(), path) for path, methods in paths.items() for method in methods if method != "get"}
    assert acts == {(method, f"/api/v1{path}") for method, path in {*REFUSED, *TAKEN_UP, *STORES_NOTHING}}


@pytest.mark.parametrize("seconds", OUTAGES_S)
async def test_what_is_refused_in_an_outage_leaves_nothing_behind(tmp_path: Path, seconds: int) -> None:
    store = Outage()
    async with an_office(tmp_path, store) as (office, _), office.admin() as client:
        plane = office.plane
        before, told = await store.load(), await kinds(store)
        store.down = True
        await pass_by(office, seconds)
        brake = Brake(since=1.0, silent=("gpu-3",), words="many are silent")
        plane.cluster = replace(plane.cluster, brake=brake)
        for _ in range(2):
            assert await asked(client, REFUSED) == {(503, "store_unavailable", "nothing was changed: the disk is full")}
        assert plane.cluster.brake == brake
        await pass_by(office, seconds)
        store.down = False
        await pass_by(office, 2)
        assert in_force(await store.load()) == in_force(before)
        assert (await kinds(store))[len(told) :] == ["store.refused", "node.brake"], "the brake comes off by itself"
        assert {plane.cluster.nodes[name].state for name in ("gpu-1", "gpu-2")} == {NodeState.READY, NodeState.DRAINED}


@pytest.mark.parametrize("seconds", OUTAGES_S)
async def test_what_is_taken_up_in_an_outage_is_carried_out_once(tmp_path: Path, seconds: int) -> None:
    store = Outage()
    async with an_office(tmp_path, store) as (office, machine), office.admin() as client:
        told = await kinds(store)
        store.down = True
        await pass_by(office, seconds)
        office.floor.file.write_text(SERVER_FILE.replace("replicas: 2", "replicas: 1"))
        words = "taken up: it is carried out once the store can be written: the disk is full"
        assert await asked(client, TAKEN_UP) == {(503, "not_written", words)}
        assert office.closed[-1][0] == "gpu-1", "whose certificate was stolen is not let in from then on"
        await pass_by(office, seconds)
        assert await kinds(store) == told
        store.down = False
        await pass_by(office, 2)
        new = (await kinds(store))[len(told) :]
        assert [new.count(kind) for kind in ("config.reloaded", "control.halting", "node.revoked")] == [1, 1, 1]
        saved, cluster = await store.load(), office.plane.cluster
        assert (saved.scale, [model.replicas for model in cluster.catalog.models]) == ({}, [1])
        assert (saved.nodes[0].state, cluster.halting) == (NodeState.REVOKED, True)
        assert {each.state for each in saved.certificates if each.serial == machine.serial} == {"revoked"}
