"""The admin API over a socket: what it never shows, what it makes of garbage, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from llmgw.cluster.naming import replica_key
from llmgw.control.api import BODY_LIMIT_BYTES
from llmgw.control.keys import digest
from llmgw.link.messages import LogLines, LogsCancel, LogsRequest
from llmgw.store.sqlite import SqliteStore
from tests.control.floor import TOKEN, ControlFloor, open_floor


def shape(answer: httpx2.Response) -> dict[str, str]:
    """The one shape of every error."""
    document = answer.json()
    assert set(document) == {"error"}
    error: dict[str, str] = document["error"]
    assert set(error) == {"message", "type", "code", "hint"}
    assert error["message"]
    assert error["type"] == ("invalid_request_error" if answer.status_code < 500 else "server_error")
    return error


def routes(floor: ControlFloor) -> dict[str, dict[str, object]]:
    """Every path, and its methods."""
    found: dict[str, dict[str, object]] = floor.app.openapi()["paths"]
    assert len(found) > 12
    return found


async def serve_a_replica(floor: ControlFloor) -> None:
    peer = floor.join("n1")
    await floor.settled()
    floor.observed(peer, await floor.desired(peer))
    await floor.settled()
    assert [replica.state.value for replica in floor.plane.cluster.replicas.values()] == ["ready", "ready"]


# -- what is never shown


async def test_no_secret_is_ever_answered(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await serve_a_replica(floor)
        made = (await client.post("/api/v1/keys", json={"name": "alice"})).json()
        assert (await client.post("/api/v1/nodes/n1/drain", json={"wait": True})).json()["state"] == "waiting"
        cluster = floor.plane.cluster
        secrets = {
            cluster.secret,
            TOKEN,
            digest(TOKEN),
            made["key"],
            digest(made["key"]),
            *(replica_key(cluster.secret, id) for id in cluster.replicas),
        }
        (first, _) = sorted(cluster.replicas)
        names = {"/api/v1/nodes/{name}": "n1", "/api/v1/nodes/{name}/drain": "n1", "/api/v1/models/{name}/why": "m"}
        asked = 0
        for template, methods in routes(floor).items():
            if "get" not in methods or template.endswith(("/backup", "/logs")):
                continue
            path = template.replace("{name}", names.get(template, first))
            answer = await client.get(path)
            assert answer.status_code == 200, path
            asked += 1
            for secret in secrets:
                assert secret not in answer.text, path
        assert asked >= 12
        assert not any(secret in repr((cluster, floor.plane.keys)) for secret in secrets - {digest(made["key"])})


async def test_every_route_but_the_public_ones_asks_for_the_token(tmp_path: Path) -> None:
    public = {"/healthz", "/readyz", "/metrics"}
    async with open_floor(tmp_path) as floor, floor.admin(token=None) as client:
        assert set(routes(floor)) > public
        for template, methods in routes(floor).items():
            for method in sorted(methods):
                path = template.replace("{name}", "x").replace("{shard}", "x/0")
                answer = await client.request(method, path)
                if template in public:
                    assert answer.status_code == 200
                    continue
                assert (answer.status_code, shape(answer)["code"]) == (401, "no_token"), path
                for wrong in ("Bearer wrong", f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x", "Bearer \xe4\xff"):
                    answer = await client.request(method, path, headers=[(b"authorization", wrong.encode("latin-1"))])
                    assert answer.status_code == 401, (path, wrong)
                    assert shape(answer)["code"] in ("no_token", "wrong_token")
        assert floor.plane.keys == {}
        assert not floor.plane.cluster.halting


# -- garbage

JSON = {"content-type": "application/json"}


GARBAGE: list[tuple[str, str, bytes | None, int, str]] = [
    ("GET", "/nope", None, 404, "GET /nope: Not Found"),
    ("GET", "/api/v1/nope", None, 404, "Not Found"),
    ("GET", "/api/v1/nodes/", None, 404, "Not Found"),
    ("POST", "/api/v1/nodes", None, 405, "Method Not Allowed"),
    ("DELETE", "/api/v1/status", None, 405, "Method Not Allowed"),
    ("GET", "/api/v1/nodes/" + "x" * 5000, None, 404, "no node is called"),
    ("GET", "/api/v1/shards/x/0/logs", None, 404, "no shard is called 'x/0'"),
    ("GET", "/api/v1/shards/REPLICA/%C2%B2/logs", None, 404, "no shard is called"),
    ("GET", "/api/v1/shards/REPLICA/" + "9" * 5000 + "/logs", None, 404, "no shard is called"),
    ("GET", "/api/v1/shards/REPLICA/7/logs", None, 404, "has no rank 7: its ranks are 0 to 0"),
    ("GET", "/api/v1/shards/REPLICA/-1/logs", None, 404, "no shard is called"),
    ("GET", "/api/v1/events?limit=0", None, 422, "limit: "),
    ("GET", "/api/v1/events?limit=1e9", None, 422, "limit: "),
    ("GET", "/api/v1/events?wait_s=nan", None, 422, "wait_s: "),
    ("GET", "/api/v1/events?wait_s=-1", None, 422, "wait_s: "),
    ("PUT", "/api/v1/models/org/m/scale", b"", 422, "the body: Field required"),
    ("PUT", "/api/v1/models/org/m/scale", b"{", 422, "the body is no JSON: "),
    ("PUT", "/api/v1/models/org/m/scale", b"\xff\xfe", 422, "the body is no JSON: "),
    ("PUT", "/api/v1/models/org/m/scale", b"[" * 100_000, 400, "body"),
    ("PUT", "/api/v1/models/org/m/scale", b"[1]", 422, "the body: "),
    ("PUT", "/api/v1/models/org/m/scale", b'{"replicas": "x"}', 422, "replicas: "),
    ("PUT", "/api/v1/models/org/m/scale", b'{"replicas": 1.5}', 422, "replicas: "),
    ("PUT", "/api/v1/models/org/m/scale", b'{"replicas": -1}', 422, "replicas: "),
    ("PUT", "/api/v1/models/org/m/scale", b'{"replicas": 99999999999999999999}', 422, "replicas: "),
    ("PUT", "/api/v1/models/org/m/scale", b'{"replicas": NaN}', 422, "replicas: "),
    ("PUT", "/api/v1/models/org/m/scale", b'{"replicas": 1, "extra": 1}', 422, "extra: "),
    ("PUT", "/api/v1/models/nobody/scale", b'{"replicas": 1}', 404, "no model is called 'nobody'"),
    ("POST", "/api/v1/keys", b'{"name": "\\ud800"}', 422, "name: "),
    ("POST", "/api/v1/keys", b'{"name": ""}', 422, "name: "),
    ("POST", "/api/v1/keys", b'{"name": "x", "models": 7}', 422, "models: "),
    ("DELETE", "/api/v1/keys/%2E%2E", None, 404, "no key is called"),
    ("POST", "/api/v1/nodes/nobody/drain", None, 404, "no node is called 'nobody'"),
    ("POST", "/api/v1/nodes/nobody/drain", b'{"plan": true}', 404, "no node is called 'nobody'"),
    ("POST", "/api/v1/nodes/n1/drain", b"{", 422, "the body is no JSON: "),
    ("POST", "/api/v1/nodes/n1/drain", b'{"deadline": 5}', 422, "deadline: "),
    ("POST", "/api/v1/nodes/n1/drain", b'{"in_flight_s": -1}', 422, "in_flight_s: "),
    ("POST", "/api/v1/nodes/n1/drain", b'{"in_flight_s": NaN}', 422, "in_flight_s: "),
    ("POST", "/api/v1/nodes/n1/drain", b'{"in_flight_s": 1e9}', 422, "in_flight_s: "),
    ("POST", "/api/v1/nodes/n1/drain", b'{"force": 7}', 422, "force: "),
    ("POST", "/api/v1/nodes/n1/drain", b'{"allow_downtime": ["who"]}', 404, "no model is called 'who'"),
    ("POST", "/api/v1/nodes/n1/drain", b"{}", 409, "n1 can't be drained now, and nothing was changed"),
    ("GET", "/api/v1/nodes/n1/drain", None, 404, "n1 is not being drained"),
    ("DELETE", "/api/v1/nodes/n1/drain", None, 404, "n1 is not being drained"),
    ("DELETE", "/api/v1/nodes/n1", None, 409, "n1 is connected: only a node that is lost can be forgotten"),
    ("DELETE", "/api/v1/nodes/nobody", None, 404, "no node is called 'nobody'"),
    ("POST", "/api/v1/models/nobody/restart", None, 404, "no model is called 'nobody'"),
    ("POST", "/api/v1/models/m/restart", b'{"force": true}', 422, "force: "),
    ("POST", "/api/v1/brake/release", None, 409, "the brake is not on"),
]


async def test_garbage_is_answered_in_one_shape_and_changes_nothing(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await serve_a_replica(floor)
        before = floor.plane.cluster.replicas, dict(floor.plane.cluster.scale), dict(floor.plane.keys)
        name = sorted(floor.plane.cluster.replicas)[0]
        for method, path, body, status, words in GARBAGE:
            answer = await client.request(method, path.replace("REPLICA", name), content=body, headers=JSON)
            assert answer.status_code == status, (method, path, body, answer.text)
            error = shape(answer)
            assert words in error["message"], (method, path, body)
            assert len(error["message"]) < 6000
        assert (floor.plane.cluster.replicas, floor.plane.cluster.scale, floor.plane.keys) == before


@pytest.mark.parametrize("token", [TOKEN, None])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_huge_body_is_not_taken_in(tmp_path: Path, token: str | None, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    async with open_floor(tmp_path) as floor, floor.admin(token) as client:
        content = pieces() if chunked else b"x" * (BODY_LIMIT_BYTES + 1)
        answer = await client.post("/api/v1/keys", content=content, headers=JSON)
        assert answer.status_code == 413
        assert f"larger than {BODY_LIMIT_BYTES} bytes" in shape(answer)["message"]
        assert floor.plane.keys == {}


async def test_a_fault_of_our_own_is_answered_in_the_same_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:

        async def bug() -> None:
            raise RuntimeError("the secret is in here")

        monkeypatch.setattr(floor.reloader, "reload", bug)
        answer = await client.post("/api/v1/reload")
        assert answer.status_code == 500
        assert shape(answer)["message"] == "a fault of llmgw's own: RuntimeError"


async def test_names_with_slashes(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await serve_a_replica(floor)
        assert (await client.get("/api/v1/models/org/m/why")).json()["ready"] == 2
        answer = await client.put("/api/v1/models/org/m/scale", json={"replicas": 1})
        assert (answer.json()["name"], answer.json()["replicas"]) == ("m", 1)
        assert (await client.delete("/api/v1/models/org/m/scale")).json()["scaled"] is False


# -- waiting for events


async def test_who_waits_for_events_is_told_at_once(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await floor.settled()
        newest = (await client.get("/api/v1/events")).json()
        after = newest[-1]["id"] if newest else "0"
        waiting = asyncio.ensure_future(client.get(f"/api/v1/events?after={after}&wait_s=30"))
        await client.get("/api/v1/status")
        await client.post("/api/v1/keys", json={"name": "x"})
        async with asyncio.timeout(10):
            assert [event["kind"] for event in (await waiting).json()] == ["key.created"]


async def test_an_event_about_something_else_ends_no_wait(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        floor.plane.tell(lambda: floor.plane.note("x", "mine", "first"))
        await floor.settled()
        (first,) = (await client.get("/api/v1/events?subject=mine")).json()
        path = f"/api/v1/events?subject=mine&after={first['id']}&wait_s=30"
        waiting = asyncio.ensure_future(client.get(path))
        await client.get("/api/v1/status")
        floor.plane.tell(lambda: floor.plane.note("x", "another", "noise"))
        await floor.settled()
        await client.get("/api/v1/status")
        floor.plane.tell(lambda: floor.plane.note("x", "mine", "second"))
        async with asyncio.timeout(10):
            assert [event["words"] for event in (await waiting).json()] == ["second"]


async def test_who_leaves_while_waiting_holds_up_no_stop(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor:
        async with asyncio.timeout(10):
            async with floor.listening() as url:
                headers = {"authorization": f"Bearer {TOKEN}"}
                async with httpx2.AsyncClient(base_url=url, headers=headers) as client:
                    newest = (await client.get("/api/v1/events")).json()
                    after = newest[-1]["id"] if newest else "0"
                    with pytest.raises(httpx2.ReadTimeout):
                        await client.get(f"/api/v1/events?after={after}&wait_s=60", timeout=0.2)


# -- a shard's output


async def test_who_leaves_while_following_is_followed_no_more(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        peer = floor.join("n1")
        await floor.settled()
        frame = await floor.desired(peer)
        floor.observed(peer, frame)
        await floor.settled()
        while len(peer.outbox):
            await peer.outbox.get()
        path = f"/api/v1/shards/{frame.shards[0].id}/logs?follow=true"
        for _ in range(3):
            following = asyncio.ensure_future(first_line(client, path))
            async with asyncio.timeout(10):
                request = await peer.outbox.get()
                assert isinstance(request, LogsRequest)
                floor.desk.on_frame(peer, LogLines(id=request.id, lines=("one",)))
                assert await following == "one"
                assert await peer.outbox.get() == LogsCancel(id=request.id)


async def first_line(client: httpx2.AsyncClient, path: str) -> str:
    async with client.stream("GET", path) as answer:
        async for line in answer.aiter_lines():
            return line
    raise AssertionError("no line")


async def test_the_output_of_a_node_that_goes_ends_in_words(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        peer = floor.join("n1")
        await floor.settled()
        frame = await floor.desired(peer)
        floor.observed(peer, frame)
        await floor.settled()
        path = f"/api/v1/shards/{frame.shards[0].id}/logs"
        asking = asyncio.ensure_future(client.get(path))
        async with asyncio.timeout(10):
            while not isinstance(await peer.outbox.get(), LogsRequest):
                pass
            floor.desk.on_closed(peer, "the connection broke")
            answer = await asking
        assert (answer.status_code, shape(answer)["code"]) == (502, "logs_unavailable")
        assert "n1 is disconnected" in shape(answer)["message"]
        answer = await client.get(path)
        assert (answer.status_code, shape(answer)["code"]) == (503, "node_disconnected")


# -- a backup


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def test_a_backup_while_it_is_written_is_whole(tmp_path: Path, temporary: Path) -> None:
    store = await SqliteStore.open(tmp_path / "state" / "llmgw.db")
    try:
        async with open_floor(tmp_path, store) as floor, floor.admin() as client:
            stop = asyncio.Event()

            async def write() -> int:
                number = 0
                while not stop.is_set():
                    number += 1
                    answer = await client.post("/api/v1/keys", json={"name": f"k{number}"})
                    assert answer.status_code == 201
                return number

            writing = asyncio.ensure_future(write())
            counts = []
            for number in range(5):
                answer = await client.get("/api/v1/backup")
                assert answer.status_code == 200
                path = tmp_path / f"{number}.db"
                path.write_bytes(answer.content)
                db = sqlite3.connect(path)
                assert db.execute("pragma integrity_check").fetchone() == ("ok",)
                counts.append(db.execute("select count(*) from api_keys").fetchone()[0])
                db.close()
            stop.set()
            written = await writing
            assert counts == sorted(counts)
            assert counts[-1] <= written
        assert list(temporary.iterdir()) == []
    finally:
        await store.close()


async def test_a_backup_that_can_not_be_made_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        answer = await client.get("/api/v1/backup")
        assert (answer.status_code, shape(answer)["code"]) == (503, "store_unavailable")
        assert "in memory" in shape(answer)["message"]
        assert list(temporary.iterdir()) == []


# -- reload


async def test_a_file_that_is_not_sound_changes_nothing_and_an_event_says_so(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        sound = floor.file.read_text()
        for spoilt, status, words in [
            (sound.replace("replicas: 2", "replica: 2"), 422, "replica"),
            (sound + "\x00", 422, ""),
            ("", 422, ""),
            (sound.replace("cluster: c", "cluster: d"), 409, "needs a restart"),
        ]:
            floor.file.write_text(spoilt)
            answer = await client.post("/api/v1/reload")
            assert answer.status_code == status, answer.text
            assert words in shape(answer)["message"]
        floor.file.unlink()
        answer = await client.post("/api/v1/reload")
        assert answer.status_code == 422
        await floor.settled()
        refused = [event for event in await floor.store.events() if event.kind == "config.refused"]
        assert len(refused) == 5
        floor.file.write_text(sound.replace("replicas: 2", "replicas: 3"))
        answer = await client.post("/api/v1/reload")
        assert answer.json() == {"changed": ["model m changed"]}
        assert json.loads((await client.get("/api/v1/models")).text)[0]["replicas"] == 3
