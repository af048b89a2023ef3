"""Which ports the packet filter guards, from whom, and what is said where it can't."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from llmgw.agent import exposure as exposure_module
from llmgw.agent.exposure import GATEWAY_KEPT_S, Exposure, Opening, openings, ruleset
from llmgw.cluster.catalog import Profile
from llmgw.cluster.model import DesiredShard, Placement, ShardPeer
from tests.engines.shards import shard

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it sets packet filters")


def wide(rank: int, port: int) -> DesiredShard:
    peers = (ShardPeer(node="n1", address="10.0.0.11"), ShardPeer(node="n2", address="10.0.0.12"))
    one = shard(Profile(name="p", engine="sim"))
    return replace(one, id=f"m-aaaaa/{rank}", rank=rank, peers=peers, placement=Placement(node="n", port=port))


def test_a_shards_block_is_open_to_gateways_and_to_the_other_ranks_alone() -> None:
    single = replace(wide(0, 20_100), id="b-aaaaa/0", peers=())
    assert openings([wide(1, 20_000), single], ["10.0.0.1", "127.0.0.1", "not an address", "::1", "fe80::1%eth0"]) == (
        Opening("b-aaaaa/0", 20_100, 20_199, ("10.0.0.1", "fe80::1")),
        Opening("m-aaaaa/1", 20_000, 20_099, ("10.0.0.1", "10.0.0.11", "10.0.0.12", "fe80::1")),
    )


def test_an_ipv4_address_that_is_written_as_ipv6_is_let_in_as_ipv4() -> None:
    single = replace(wide(0, 20_000), peers=())
    assert openings([single], ["::ffff:10.0.0.1", "::ffff:127.0.0.1"])[0].addresses == ("10.0.0.1",)


def test_only_attempts_to_connect_to_these_ports_are_judged() -> None:
    script = ruleset("llmgw-n", [Opening("a/0", 20_000, 20_099, ("10.0.0.1",)), Opening("b/0", 20_100, 20_199, ())])
    rules = [line.strip() for line in script.splitlines() if "dport" in line]
    assert [rule for rule in rules if "20100-20199" in rule and "saddr" in rule] == []
    assert all("20000-20099" in rule or "20100-20199" in rule for rule in rules)
    assert all("fin | syn | rst | ack) == syn" in rule for rule in rules if "reject" in rule)
    assert "conntrack" not in script
    assert "ct state" not in script


def test_without_shards_the_table_goes() -> None:
    assert ruleset("llmgw-n", []).splitlines() == ["add table inet llmgw-n", "delete table inet llmgw-n"]


async def applied(exposure: Exposure) -> None:
    running = asyncio.create_task(exposure.run())
    try:
        await exposure.settled()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_gateways_are_remembered_over_a_restart_and_forgotten_after_a_day(tmp_path: Path) -> None:
    now = [1_000_000.0]
    memory = tmp_path / "gateways.json"

    def make() -> Exposure:
        return Exposure(node_id="t", memory=memory, changed=lambda: None, nft=lambda: None, clock=lambda: now[0])

    first = make()
    first.name(["10.0.0.1"])
    first.want([wide(0, 20_000)], "10.0.0.11")
    await applied(first)
    assert json.loads(memory.read_text()) == {"10.0.0.1": now[0]}
    second = make()
    second.want([wide(0, 20_000)], "10.0.0.11")
    assert "10.0.0.1" in second.openings()[0].addresses
    now[0] += GATEWAY_KEPT_S + 1
    assert "10.0.0.1" not in second.openings()[0].addresses
    memory.write_text("[1]")
    third = make()
    third.want([replace(wide(0, 20_000), peers=())], "10.0.0.11")
    assert third.openings()[0].addresses == ()


async def test_without_nftables_it_is_said_and_nothing_waits(tmp_path: Path) -> None:
    said: list[str] = []
    exposure = Exposure(
        node_id="t", memory=tmp_path / "g.json", changed=lambda: said.append("changed"), nft=lambda: None
    )
    exposure.want([wide(0, 20_000)], "10.0.0.11")
    await applied(exposure)
    assert exposure.warnings() == (
        "engines on this node are open to the network: nftables is not installed here (`apt-get install nftables`)",
    )
    assert said == ["changed"]
    exposure.want([wide(0, 20_000)], "127.0.0.1")
    await applied(exposure)
    assert exposure.warnings() == ()


@needs_root
async def test_the_kernel_takes_the_rules_and_they_come_back_after_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposure_module, "LOOK_AGAIN_S", 0.1)
    name = f"t{os.getpid()}"
    exposure = Exposure(node_id=name, memory=tmp_path / "g.json", changed=lambda: None)

    async def nft(verb: str) -> str:
        command = ["nft", verb, "table", "inet", f"llmgw-{name}"]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        return ended.stdout if ended.returncode == 0 else ""

    running = asyncio.create_task(exposure.run())
    try:
        exposure.name(["10.99.99.1"])
        exposure.want([replace(wide(0, 29_900), peers=())], "10.99.99.2")
        await exposure.settled()
        assert exposure.warnings() == ()
        assert "ip saddr 10.99.99.1 tcp dport 29900-29999 accept" in await nft("list")
        await nft("delete")
        async with asyncio.timeout(20):
            while "29900-29999" not in await nft("list"):  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.05)
        exposure.want([], "10.99.99.2")
        await exposure.settled()
        assert await nft("list") == ""
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await nft("delete")
