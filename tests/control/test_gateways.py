"""Gateways as the cluster knows them: what each may send to by the tables it has, and what it has in flight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llmgw.cluster.model import Traffic
from llmgw.control.desk import UNACKNOWLEDGED_KEPT
from llmgw.link.messages import Routes
from llmgw.link.server import Peer
from tests.control.clock import Time
from tests.control.floor import ControlFloor, open_floor


async def serving(floor: ControlFloor, gateway: Peer) -> Routes:
    """The table once both replicas serve."""
    await floor.obey(floor.join("n1"), floor.join("n2"))
    table = await floor.table(gateway)
    assert len(table.routes[0].endpoints) == 2
    return table


async def test_what_a_gateway_may_send_to_is_known_from_the_tables_that_it_has(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor:
        gateway = floor.join_gateway("gw")
        await floor.settled()
        first = await floor.table(gateway)
        assert first.lease_s == floor.plane.cluster.lease_s
        second = await serving(floor, gateway)
        ids = frozenset(endpoint.replica for endpoint in second.routes[0].endpoints)
        floor.ack(gateway, second, {"m-gone1": Traffic(in_flight=2)})
        await floor.settled()
        known = floor.plane.cluster.gateways["gw"]
        assert (known.may_send, known.traffic) == (ids, {"m-gone1": Traffic(in_flight=2)})
        # Late and out of order: what is known gets no older by it.
        floor.ack(gateway, first, {"m-gone1": Traffic(in_flight=9)})
        await floor.settled()
        assert floor.plane.cluster.gateways["gw"] == known
        floor.report(gateway, {})
        await floor.settled()
        assert floor.plane.cluster.gateways["gw"].traffic == {}

        floor.desk.on_closed(gateway, "the connection broke")
        await floor.settled()
        away = floor.plane.cluster.gateways["gw"]
        assert (away.connected, away.may_send) == (False, ids)
        floor.join_gateway("gw")
        await floor.settled()
        back = floor.plane.cluster.gateways["gw"]
        assert (back.connected, back.may_send) == (True, None)


async def test_of_a_session_that_was_taken_over_nothing_counts_any_more(tmp_path: Path) -> None:
    async with open_floor(tmp_path) as floor:
        old = floor.join_gateway("gw")
        table = await serving(floor, old)
        new = floor.join_gateway("gw")
        floor.ack(old, table)
        floor.report(old, {"m-gone1": Traffic(in_flight=1)})
        floor.desk.on_closed(old, "another process of the same machine connected")
        await floor.settled()
        known = floor.plane.cluster.gateways["gw"]
        assert (known.connected, known.may_send, known.traffic) == (True, None, {})
        floor.ack(new, await floor.table(new))
        await floor.settled()
        assert floor.plane.cluster.gateways["gw"].may_send is not None


async def test_a_gateway_that_acknowledges_nothing_for_long_is_still_waited_for(tmp_path: Path) -> None:
    """However many tables it was sent meanwhile: any of them may be the one that it goes by."""
    async with open_floor(tmp_path) as floor:
        gateway = floor.join_gateway("gw")
        table = await serving(floor, gateway)
        first_ids = set(floor.plane.cluster.replicas)
        floor.ack(gateway, table)
        await floor.settled()
        for number in range(UNACKNOWLEDGED_KEPT + 20):
            aliases = (f"alias-{number}",)
            catalog = floor.plane.cluster.catalog
            changed = replace(catalog, models=(replace(catalog.models[0], aliases=aliases),))
            floor.plane.cluster = replace(floor.plane.cluster, catalog=changed)
            floor.desk.send_out()
        assert len(floor.desk.gateways["gw"].unacknowledged) <= UNACKNOWLEDGED_KEPT
        assert first_ids <= (floor.plane.cluster.gateways["gw"].may_send or set())


async def test_a_gateway_that_has_been_away_for_ten_leases_is_forgotten(tmp_path: Path) -> None:
    time = Time()
    async with open_floor(tmp_path, clock=time) as floor:
        gateway = floor.join_gateway("gw")
        await floor.settled()
        floor.desk.on_closed(gateway, "the connection broke")
        await floor.settled()
        time.move(10 * floor.plane.cluster.lease_s - 1)
        await floor.settled()
        assert set(floor.plane.cluster.gateways) == {"gw"}
        time.move(2)
        await floor.settled()
        assert floor.plane.cluster.gateways == {}
