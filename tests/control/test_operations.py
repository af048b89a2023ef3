"""What operators have done to nodes and models, over the real API: plans, drains, restarts, what-ifs, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from llmgw.cluster.model import Traffic
from llmgw.link.server import Peer
from llmgw.store.base import Store
from llmgw.store.sqlite import SqliteStore
from tests.control.clock import Time
from tests.control.floor import ControlFloor, open_floor

FULL = {"in_flight_s": 60.0}


def states(floor: ControlFloor) -> dict[str, str]:
    return {replica.id: replica.state.value for replica in floor.plane.cluster.replicas.values()}


def nodes_of(floor: ControlFloor) -> dict[str, tuple[str, ...]]:
    return {
        replica.id: tuple(placement.node for placement in replica.placements)
        for replica in floor.plane.cluster.replicas.values()
    }


async def kinds(store: Store) -> list[str]:
    return [event.kind for event in await store.events(limit=1000)]


async def serving(floor: ControlFloor, *nodes: str) -> list[Peer]:
    """Nodes that run both replicas of the model, ready."""
    peers = [floor.join(node) for node in nodes]
    await floor.obey(*peers)
    assert sorted(states(floor).values()) == ["ready", "ready"]
    return peers


def only_move(answer: httpx2.Response) -> Mapping[str, Any]:
    moves = answer.json()["moves"]
    assert len(moves) == 1, moves
    move: Mapping[str, Any] = moves[0]
    return move


# -- plans and refusals


async def test_a_plan_is_shown_and_changes_nothing(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await serving(floor, "n1", "n2")
        before, events = floor.plane.cluster, await floor.store.events()
        answer = await client.post("/api/v1/nodes/n1/drain", json={"plan": True})
        assert answer.status_code == 200
        view = answer.json()
        assert (view["node"], view["planned"], view["refusal"], view["state"]) == ("n1", True, None, "moving")
        move = only_move(answer)
        assert (move["state"], move["targets"], move["downtime"]) == ("pending", ["n2"], False)
        await floor.settled()
        assert floor.plane.cluster.drains == {}
        assert floor.plane.cluster.replicas == before.replicas
        assert await floor.store.events() == events
        assert (await client.get("/api/v1/drains")).json() == []


async def test_a_full_cluster_refuses_to_drain_and_says_the_choices(tmp_path: Path) -> None:
    """Where there is no room beside what runs, nothing hangs half way: it is refused before anything changes."""
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await serving(floor, "n1")
        before = floor.plane.cluster
        answer = await client.post("/api/v1/nodes/n1/drain", json={})
        assert answer.status_code == 409
        error = answer.json()["error"]
        assert error["code"] == "drain_refused"
        for choice in ("nothing was changed", "--wait", "--allow-downtime m", "--force"):
            assert choice in error["message"]
        planned = (await client.post("/api/v1/nodes/n1/drain", json={"plan": True})).json()
        assert planned["refusal"] == error["message"]
        assert planned["counts"] == {"blocked": 2}
        await floor.settled()
        assert floor.plane.cluster.replicas == before.replicas
        assert floor.plane.cluster.drains == {}
        assert "drain.started" not in await kinds(floor.store)


async def test_who_waits_is_served_on_and_moved_once_there_is_room(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        (first,) = await serving(floor, "n1")
        answer = await client.post("/api/v1/nodes/n1/drain", json={"wait": True})
        assert (answer.status_code, answer.json()["state"], answer.json()["wait"]) == (200, "waiting", True)
        await floor.settled()
        assert set(states(floor).values()) == {"ready"}
        status = (await client.get("/api/v1/status")).json()
        assert [drain["node"] for drain in status["drains"]] == ["n1"]
        second = floor.join("n2")
        await floor.obey(first, second)
        moved = (await client.get("/api/v1/nodes/n1/drain")).json()
        assert moved["state"] != "waiting"


# -- a whole drain


async def test_a_drain_moves_replicas_one_by_one_and_breaks_nothing(tmp_path: Path) -> None:
    """A replica is stopped only after every gateway acknowledged a table without it, and its last request ended."""
    clock = Time()
    async with open_floor(tmp_path, clock=clock) as floor, floor.admin() as client:
        clock.move(60)  # No gateway of an earlier control plane can still send by its table.
        gateway = floor.join_gateway("gw")
        peers = await serving(floor, "n1", "n2")
        old = next(id for id, nodes in nodes_of(floor).items() if nodes == ("n1",))
        floor.ack(gateway, await floor.table(gateway), {old: Traffic(in_flight=3)})
        await floor.settled()
        status = (await client.get("/api/v1/status")).json()
        assert status["gateways"][0]["in_flight"] == 0, "no replica leaves yet"
        assert status["lacking"] == {}

        answer = await client.post("/api/v1/nodes/n1/drain", json=FULL)
        assert answer.status_code == 200, answer.text
        assert only_move(answer)["replica"] == old
        assert only_move(answer)["in_flight"] == 0, "what it had open before is not counted down"
        await floor.obey(*peers)
        new = next(replica.id for replica in floor.plane.cluster.replicas.values() if replica.replaces == old)
        assert (states(floor)[old], states(floor)[new]) == ("draining", "ready")
        table = await floor.table(gateway)
        ids = {endpoint.replica for endpoint in table.routes[0].endpoints}
        assert old not in ids
        assert new in ids
        waits = (await client.get(f"/api/v1/replicas/{old}")).json()["waits_for"]
        assert waits == ["gateway gw has not taken up the table without it yet, with 3 requests in flight"]

        floor.ack(gateway, table, {old: Traffic(in_flight=2)})
        await floor.obey(*peers)
        assert states(floor)[old] == "draining"
        move = only_move(await client.get("/api/v1/nodes/n1/drain"))
        assert (move["state"], move["in_flight"]) == ("finishing", 2)
        gateway_view = (await client.get("/api/v1/status")).json()["gateways"][0]
        assert (gateway_view["connected"], gateway_view["in_flight"]) == (True, 2)

        floor.report(gateway, {old: Traffic(in_flight=1, finished=1)})
        await floor.obey(*peers)
        assert states(floor)[old] == "draining"
        floor.report(gateway, {old: Traffic(finished=2)})
        await floor.obey(*peers)
        assert old not in states(floor)
        done = (await client.get("/api/v1/nodes/n1/drain")).json()
        assert (done["state"], done["node_state"], done["counts"]) == ("done", "drained", {"moved": 1})
        assert (done["moves"][0]["finished"], done["moves"][0]["broken"]) == (2, 0)
        assert floor.plane.cluster.nodes["n1"].shards == ()
        assert {"drain.started", "drain.done"} <= set(await kinds(floor.store))
        assert 'llmgw_drains{state="done"} 1.0' in (await client.get("/metrics")).text

        answer = await client.request("DELETE", "/api/v1/nodes/n1/drain")
        assert answer.status_code == 200
        await floor.settled()
        assert floor.plane.cluster.nodes["n1"].state == "ready"
        assert (await floor.store.load()).drains == ()


async def test_a_deadline_that_is_changed_counts_at_once(tmp_path: Path) -> None:
    clock = Time()
    async with open_floor(tmp_path, clock=clock) as floor, floor.admin() as client:
        clock.move(60)
        gateway = floor.join_gateway("gw")
        peers = await serving(floor, "n1", "n2")
        floor.ack(gateway, await floor.table(gateway))
        old = next(id for id, nodes in nodes_of(floor).items() if nodes == ("n1",))
        await client.post("/api/v1/nodes/n1/drain", json={"in_flight_s": 600.0})
        await floor.obey(*peers)
        floor.ack(gateway, await floor.table(gateway), {old: Traffic(in_flight=2)})
        await pass_by(floor, clock, 30, *peers)
        assert only_move(await client.get("/api/v1/nodes/n1/drain"))["state"] == "finishing"
        assert (await client.post("/api/v1/nodes/n1/drain", json={"in_flight_s": 5.0})).status_code == 200
        await pass_by(floor, clock, 3, *peers)
        assert states(floor)[old] == "draining"
        await pass_by(floor, clock, 3, *peers)
        assert old not in states(floor)
        (words,) = [event.words for event in await floor.store.events(limit=1000) if event.kind == "replica.stopping"]
        assert words.endswith("out of time, it does not wait any longer for: 2 requests in flight through gateway gw")


async def test_a_gateway_that_is_away_is_waited_for_as_long_as_its_lease(tmp_path: Path) -> None:
    clock = Time()
    async with open_floor(tmp_path, clock=clock) as floor, floor.admin() as client:
        clock.move(60)
        gateway = floor.join_gateway("gw")
        peers = await serving(floor, "n1", "n2")
        floor.ack(gateway, await floor.table(gateway))
        floor.desk.on_closed(gateway, "the connection broke")
        await floor.settled()
        (view,) = (await client.get("/api/v1/status")).json()["gateways"]
        assert (view["connected"], view["may_send_for_s"]) == (False, 30.0)
        old = next(id for id, nodes in nodes_of(floor).items() if nodes == ("n1",))
        await client.post("/api/v1/nodes/n1/drain", json=FULL)
        await floor.obey(*peers)
        assert states(floor)[old] == "draining"
        (words,) = (await client.get(f"/api/v1/replicas/{old}")).json()["waits_for"]
        assert "gateway gw is not connected" in words
        for _ in range(4):
            clock.move(4)
            for peer in peers:
                floor.beat(peer)
            await floor.obey(*peers)
        assert states(floor)[old] == "draining"
        for _ in range(4):
            clock.move(4)
            for peer in peers:
                floor.beat(peer)
            await floor.obey(*peers)
        assert old not in states(floor)


async def test_a_drain_survives_a_restart_of_the_control_plane(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "state" / "llmgw.db")
    try:
        async with open_floor(tmp_path, store) as floor, floor.admin() as client:
            peers = await serving(floor, "n1", "n2")
            answer = await client.post("/api/v1/nodes/n1/drain", json={"in_flight_s": 5.0})
            assert answer.status_code == 200
            await floor.settled()
            before = floor.plane.cluster.drains["n1"]
            running = {peer.id: floor.plane.cluster.nodes[peer.id].shards for peer in peers}
        async with open_floor(tmp_path, store) as floor, floor.admin() as client:
            assert floor.plane.cluster.drains["n1"] == before
            peers = [floor.join(node, shards) for node, shards in running.items()]
            gateway = floor.join_gateway("gw")
            await floor.obey(*peers)
            # What gateways did before the restart is not known: they get their lease, and this one its say.
            old = before.moves[0].replica
            assert states(floor)[old] == "draining"
            waits = (await client.get(f"/api/v1/replicas/{old}")).json()["waits_for"]
            assert len(waits) == 2
            floor.ack(gateway, await floor.table(gateway))
            await floor.settled()
            assert [drain["node"] for drain in (await client.get("/api/v1/drains")).json()] == ["n1"]
    finally:
        await store.close()


async def test_an_undrain_midway_keeps_the_original(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        peers = await serving(floor, "n1", "n2")
        before = set(states(floor))
        await client.post("/api/v1/nodes/n1/drain", json={})
        await floor.settled()
        assert len(states(floor)) == 3
        answer = await client.request("DELETE", "/api/v1/nodes/n1/drain")
        assert answer.json()["node"] == "n1"
        await floor.obey(*peers)
        assert states(floor) == dict.fromkeys(before, "ready")
        assert floor.plane.cluster.nodes["n1"].state == "ready"
        assert (await client.get("/api/v1/nodes/n1/drain")).status_code == 404


async def test_options_of_a_drain_can_be_changed_while_it_waits(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        (peer,) = await serving(floor, "n1")
        await client.post("/api/v1/nodes/n1/drain", json={"wait": True})
        since = floor.plane.cluster.drains["n1"].since
        answer = await client.post("/api/v1/nodes/n1/drain", json={"wait": True, "allow_downtime": ["org/m"]})
        assert answer.json()["allow_downtime"] == ["m"]
        await floor.obey(peer)
        assert floor.plane.cluster.drains["n1"].since == since
        assert sorted(states(floor).values()) == ["draining", "ready", "unplaced"], "one at a time"
        assert "drain.changed" in await kinds(floor.store)


# -- restarts


async def test_a_restart_replaces_each_replica_once(tmp_path: Path) -> None:
    clock = Time()
    async with open_floor(tmp_path, clock=clock) as floor, floor.admin() as client:
        clock.move(60)
        peers = await serving(floor, "n1", "n2")
        before = set(states(floor))
        answer = await client.post("/api/v1/models/org/m/restart", json={})
        assert answer.status_code == 200, answer.text
        assert set(answer.json()["replicas"]) == before
        again = await client.post("/api/v1/models/m/restart")
        assert again.status_code == 200
        await floor.obey(*peers)
        assert set(states(floor).values()) == {"ready"}
        assert len(states(floor)) == 2
        assert not before & set(states(floor))


async def test_a_model_without_replicas_has_nothing_to_restart(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await floor.settled()
        answer = await client.post("/api/v1/models/m/restart")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "nothing_to_restart")


# -- nodes that are gone


async def test_a_lost_node_is_forgotten_and_its_name_is_free(tmp_path: Path) -> None:
    """Nobody is asked for a certificate here: who is let in by that name, and that what the old node had is refused,
    is ``test_joining``'s. Whoever has been let in is a new node by an old name."""
    clock = Time()
    async with open_floor(tmp_path, clock=clock) as floor, floor.admin() as client:
        first, second = await serving(floor, "n1", "n2")
        floor.desk.on_closed(first, "the connection broke")
        await floor.settled()
        answer = await client.request("DELETE", "/api/v1/nodes/n1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "node_not_lost")
        await pass_by(floor, clock, 90, second)
        assert floor.plane.cluster.nodes["n1"].state == "lost"
        assert (await client.request("DELETE", "/api/v1/nodes/n1")).json()["id"] == "n1"
        await floor.obey(second)
        assert set(floor.plane.cluster.nodes) == {"n2"}
        assert [node.id for node in (await floor.store.load()).nodes] == ["n2"]
        assert set(nodes_of(floor).values()) == {("n2",)}
        assert "node.removed" in await kinds(floor.store)

        new = floor.join("n1")
        await floor.obey(new, second)
        assert floor.plane.cluster.nodes["n1"].state == "ready"


async def pass_by(floor: ControlFloor, clock: Time, seconds: int, *beating: Peer) -> None:
    for _ in range(seconds // 3):
        clock.move(3)
        for peer in beating:
            floor.beat(peer)
        await floor.obey(*beating)


async def test_the_brake_is_shown_and_released(tmp_path: Path) -> None:
    clock = Time()
    async with open_floor(tmp_path, clock=clock) as floor, floor.admin() as client:
        peers = await serving(floor, "n1", "n2", "n3")
        for peer in peers[:2]:
            floor.desk.on_closed(peer, "the connection broke")
        await pass_by(floor, clock, 90, peers[2])
        status = (await client.get("/api/v1/status")).json()
        assert status["brake"]["silent"] == ["n1", "n2"]
        assert not status["brake"]["released"]
        assert "llmgw_brake 1.0" in (await client.get("/metrics")).text
        assert "lost" not in {node.state for node in floor.plane.cluster.nodes.values()}
        answer = await client.post("/api/v1/brake/release")
        assert (answer.status_code, answer.json()["released"]) == (200, True)
        await floor.obey(peers[2])
        assert {node.id for node in floor.plane.cluster.nodes.values() if node.state == "lost"} == {"n1", "n2"}
        assert "llmgw_brake 0.0" in (await client.get("/metrics")).text


# -- what if


async def test_what_if_says_what_would_move_and_what_would_not_fit(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await serving(floor, "n1", "n2")
        before = floor.plane.cluster
        answer = await client.post("/api/v1/what-if", json={"lose": ["n1"]})
        assert answer.status_code == 200, answer.text
        (move,) = answer.json()["moves"]
        assert (move["from_nodes"], move["to_nodes"], move["weights_there"]) == (["n1"], ["n2"], True)
        gone = (await client.post("/api/v1/what-if", json={"lose": ["n1", "n2"]})).json()
        assert [(short["model"], short["replicas"]) for short in gone["unplaced"]] == [("m", 2)]
        more = floor.file.read_text().replace("replicas: 2", "replicas: 4")
        grown = (await client.post("/api/v1/what-if", json={"file": more, "add": [{"nodes": 1, "gpus": 8}]})).json()
        assert len(grown["new"]) == 2
        assert len(grown["supposed"]) == 2
        assert floor.plane.cluster.replicas == before.replicas


async def test_what_can_not_be_supposed_is_said_in_words(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await serving(floor, "n1", "n2")
        file = floor.file.read_text()
        for body, code, words in [
            ({"lose": ["n11"]}, "not_supposable", "n1"),
            ({"lose_fabrics": ["ib-z"]}, "not_supposable", "ib-z"),
            ({}, "not_supposable", ""),
            ({"add": [{"nodes": 0, "gpus": 8}]}, "malformed", "add.0.nodes"),
            ({"file": file.replace("replicas", "replicaz")}, "config_refused", "replicaz"),
            ({"file": "{"}, "config_refused", "the-file-supposed.yaml"),
            ({"file": file.replace("cluster: c", "cluster: d")}, "other_cluster", "'d'"),
        ]:
            answer = await client.post("/api/v1/what-if", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (422, code), body
            assert words in error["message"], body


async def test_the_deadline_of_requests_in_flight_is_reloaded(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor, floor.admin() as client:
        await serving(floor, "n1", "n2")
        floor.file.write_text(floor.file.read_text() + "drain: {in_flight: 90s}\n")
        assert (await client.post("/api/v1/reload")).json() == {"changed": ["drain changed"]}
        planned = (await client.post("/api/v1/nodes/n1/drain", json={"plan": True})).json()
        assert planned["in_flight_s"] == 90.0
