"""What a machine takes for its management address while its network changes. Run by test_network.py in a network
namespace of its own; prints one JSON object a step."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path

from llmgw.agent.discovery import DiscoverySettings, discover, links_changed
from llmgw.cluster.model import Inventory


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def card(name: str, address: str = "") -> None:
    """A network card whose cable is in."""
    ip(f"link add {name} type veth peer name at-{name}")
    ip(f"link set at-{name} up")
    ip(f"link set {name} up")
    if address:
        ip(f"addr add {address} dev {name}")


async def main() -> None:
    settings = DiscoverySettings(
        servers=("https://10.77.9.1:7443",), ib_root=Path("/nowhere"), nvidia_smi="/nowhere", prefer_nvml=False
    )
    known: Inventory | None = None

    async def look(step: str, settings: DiscoverySettings = settings) -> None:
        nonlocal known
        changed = None if known is None else await links_changed(settings, known)
        known = await discover(settings, known)
        of_address = [words for words in known.warnings if "management address" in words]
        print(
            json.dumps([step, changed, known.mgmt_addr, known.mgmt_interface, of_address]),
            flush=True,
        )

    ip("link set lo up")
    card("one", "10.77.9.11/24")
    await look("up")
    await look("still up")
    ip("link set one down")
    await look("down")
    ip("link set one up")
    await look("up again")
    ip("addr flush dev one")
    ip("addr add 10.77.9.12/24 dev one")
    await look("moved")
    ip("link del one")
    known = None
    # The bridge first, and with a container at it: an agent that took the first address would take this one.
    ip("link add docker0 type bridge")
    ip("addr add 172.17.0.1/16 dev docker0")
    ip("link set docker0 up")
    card("container")
    ip("link set container master docker0")
    card("two", "10.88.0.11/24")
    card("three", "10.99.0.11/24")
    ip("route add default via 10.88.0.1 dev two")
    ip("route add 10.66.0.0/24 via 10.99.0.1 dev three")
    behind_the_third = replace(settings, servers=("https://10.66.0.1:7443",))
    await look("three cards", behind_the_third)
    ip("route replace 10.66.0.0/24 via 10.88.0.1 dev two")
    await look("by the second", behind_the_third)
    ip("route del 10.66.0.0/24")
    ip("route replace default via 10.99.0.1 dev three")
    await look("by the third again", behind_the_third)


asyncio.run(main())
