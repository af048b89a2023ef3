"""What a machine takes for its management address while its network changes. Run by test_network.py in a network
namespace of its own; prints one JSON object a step."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

from llmgw.agent.discovery import DiscoverySettings, discover, links_changed
from llmgw.cluster.model import Inventory


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


async def main() -> None:
    settings = DiscoverySettings(
        servers=("https://10.77.9.1:7443",), ib_root=Path("/nowhere"), nvidia_smi="/nowhere", prefer_nvml=False
    )
    known: Inventory | None = None

    async def look(step: str) -> None:
        nonlocal known
        changed = None if known is None else await links_changed(settings, known)
        known = await discover(settings, known)
        of_address = [words for words in known.warnings if "management address" in words]
        print(
            json.dumps([step, changed, known.mgmt_addr, known.mgmt_interface, of_address]),
            flush=True,
        )

    ip("link set lo up")
    ip("link add one type veth peer name other")
    ip("link set other up")
    ip("link set one up")
    ip("addr add 10.77.9.11/24 dev one")
    await look("up")
    await look("still up")
    ip("link set one down")
    await look("down")
    ip("link set one up")
    await look("up again")
    ip("addr flush dev one")
    ip("addr add 10.77.9.12/24 dev one")
    await look("moved")


asyncio.run(main())
