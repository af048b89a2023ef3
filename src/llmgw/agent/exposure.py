"""Who may reach the ports of this node's shards: gateways, and the other ranks of the same replica.

An nftables table of this agent's own, replaced as a whole. It looks at attempts to connect to ports of shards that are
wanted here, and at nothing else: what is connected stays so, and no other port of the machine is touched. It stays in
the kernel when the agent ends. The replica's key is the second wall.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from llmgw.agent.fetch.child import ending, run
from llmgw.agent.fetch.disk import write_durably
from llmgw.cluster.model import PORT_BLOCK, DesiredShard

log = structlog.get_logger()

GATEWAY_KEPT_S = 86_400.0
"""How long an address stays open after it was last named: a gateway goes on serving while no control plane knows it."""
_NAMED_ANEW_S = 3600.0
LOOK_AGAIN_S = 60.0
_NFT_LIMIT_S = 20.0
_WAIT_S = 30.0
"""How long a start waits for its rules at most."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Ports ``first`` to ``last`` of one shard, and from where they may be reached."""

    shard: str
    first: int
    last: int
    addresses: tuple[str, ...]


def openings(shards: Iterable[DesiredShard], gateways: Iterable[str]) -> tuple[Opening, ...]:
    """What each shard's ports are open to, in the order of ids."""
    known = set(_proper(gateways))
    return tuple(
        Opening(
            shard.id,
            shard.placement.port,
            shard.placement.port + PORT_BLOCK - 1,
            tuple(sorted(known | set(_proper(peer.address for peer in shard.peers)))),
        )
        for shard in sorted(shards, key=lambda shard: shard.id)
    )


def ruleset(table: str, openings: Sequence[Opening]) -> str:
    """The script that replaces the table by these rules, for ``nft -f -``; without openings it is removed.

    Only a first packet (SYN) is judged, so that no connection tracking is needed, and a gateway that is no longer named
    finishes what it has begun.
    """
    lines = [f"add table inet {table}", f"delete table inet {table}"]
    if openings:
        lines += [f"table inet {table} {{", "  chain input {", "    type filter hook input priority filter;"]
        lines += ['    iifname "lo" accept']
        for each in openings:
            lines += [f"    {rule}" for rule in _rules(each)]
        lines += ["  }", "}"]
    return "\n".join(lines) + "\n"


def _rules(opening: Opening) -> list[str]:
    ports = f"tcp dport {opening.first}-{opening.last}"
    syn = "tcp flags & (fin | syn | rst | ack) == syn"
    rules = []
    for family, version in (("ip", 4), ("ip6", 6)):
        sources = [source for source in opening.addresses if ipaddress.ip_address(source).version == version]
        if sources:
            rules.append(f"{family} saddr {{ {', '.join(sources)} }} {ports} accept")
    rules.append(f'{ports} {syn} counter reject with tcp reset comment "{opening.shard}"')
    rules.append(f"udp dport {opening.first}-{opening.last} counter drop")
    return rules


def _proper(addresses: Iterable[str]) -> list[str]:
    """Those that another machine can send from, as nftables writes them."""
    found = []
    for text in addresses:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            continue
        # A listener on all addresses of both versions names IPv4 peers like this; their packets are IPv4 all the same.
        address = getattr(address, "ipv4_mapped", None) or address
        if not address.is_loopback and not address.is_unspecified:
            found.append(str(address))
    return found


def find_nft() -> str | None:
    """The program that sets packet filters; None where it is not installed."""
    return shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin")


class Exposure:
    """Keeps the table as it should be. Call from one event loop only."""

    def __init__(
        self,
        *,
        node_id: str,
        memory: Path,
        changed: Callable[[], None],
        nft: Callable[[], str | None] = find_nft,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = f"llmgw-{node_id}"
        self._memory = memory
        self._changed = changed
        self._nft = nft
        self._clock = clock
        self._named = _remembered(memory)
        self._shards: dict[str, DesiredShard] = {}
        self._local = False
        self._due = asyncio.Event()
        self._applied = asyncio.Event()
        self._applied.set()
        self._script: str | None = None
        """What the kernel was told last; None: not known."""
        self._stands = False
        """There may be a table in the kernel."""
        self.problem = ""
        """Why engines here are open to everybody, in words; empty: they are not."""

    def name(self, gateways: Iterable[str]) -> None:
        """Addresses that gateways send from, as the control plane knows them just now."""
        now = self._clock()
        for address in _proper(gateways):
            if now - self._named.get(address, 0.0) > _NAMED_ANEW_S:
                self._named[address] = now
        self._look()

    def want(self, shards: Iterable[DesiredShard], host: str) -> None:
        """All shards that run here or are about to; ``host`` is the address that they listen on."""
        self._shards = {shard.id: shard for shard in shards}
        self._local = not _proper([host])
        self._look()

    async def settled(self) -> None:
        """Returns once what was wanted is in force, or can't be: before an engine opens its ports.

        A node that can't guard its engines says so and starts them all the same; one whose nft hangs is not waited
        for longer than half a minute.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._applied.wait()
        except TimeoutError:
            log.warning("starting a shard although its ports are not guarded yet", table=self._table)

    def warnings(self) -> tuple[str, ...]:
        return (f"engines on this node are open to the network: {self.problem}",) if self.problem else ()

    async def run(self) -> None:
        """Until cancelled. The table stays."""
        self._due.set()
        while True:
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._due.wait()
            except TimeoutError:
                # Somebody may have flushed it, and addresses may have grown old.
                if self._script is not None and self.openings() and not await self._is_there():
                    log.warning("this node's table of packet filters was removed; it is put back", table=self._table)
                    self._script = None
            self._due.clear()
            await self._apply()

    def _look(self) -> None:
        wanted = self.openings()
        if self._script != ruleset(self._table, wanted) and (wanted or self._stands):
            self._applied.clear()
        if not wanted:
            self._say("")
        self._due.set()

    def openings(self) -> tuple[Opening, ...]:
        """What is open to whom, by all that is known now."""
        if self._local:
            return ()
        oldest = self._clock() - GATEWAY_KEPT_S
        return openings(self._shards.values(), [name for name, at in self._named.items() if at >= oldest])

    async def _apply(self) -> None:
        wanted = self.openings()
        script = ruleset(self._table, wanted)
        if script != self._script:
            self._stands = self._stands or bool(wanted)
            problem = await self._tell(script)
            # Without shards there is nothing to guard, and nothing to try again.
            self._script = script if not (problem and wanted) else None
            self._stands = bool(wanted) or bool(problem and self._stands)
            self._say(problem if wanted else "")
        await asyncio.to_thread(self._remember)
        if script == ruleset(self._table, self.openings()):
            self._applied.set()

    async def _tell(self, script: str) -> str:
        """Empty, or why it could not be done."""
        nft = self._nft()
        if nft is None:
            return "nftables is not installed here (`apt-get install nftables`)"
        file = self._memory.with_suffix(".nft")
        try:
            await asyncio.to_thread(write_durably, file, script.encode())
            ended = await run([nft, "-f", str(file)], env={"LC_ALL": "C"}, limit_s=_NFT_LIMIT_S)
        except OSError as error:
            return f"{nft} can't be run: {error}"
        if ended.status == 0:
            return ""
        lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
        if any("Operation not permitted" in line for line in lines):
            return "only root may set packet filters, and the agent does not run as root"
        return f"nft {ending(ended.status)}" + (f": {lines[0][:200]}" if lines else "")

    async def _is_there(self) -> bool:
        nft = self._nft()
        if nft is None:
            return False
        try:
            ended = await run([nft, "list", "table", "inet", self._table], env={"LC_ALL": "C"}, limit_s=_NFT_LIMIT_S)
        except OSError:
            return False
        return ended.status == 0

    def _say(self, problem: str) -> None:
        if problem == self.problem:
            return
        if problem:
            log.warning("engines on this node are open to the network", reason=problem)
        self.problem = problem
        self._changed()

    def _remember(self) -> None:
        oldest = self._clock() - GATEWAY_KEPT_S
        text = json.dumps({name: at for name, at in sorted(self._named.items()) if at >= oldest})
        try:
            if not self._memory.exists() or self._memory.read_text() != text:
                write_durably(self._memory, text.encode())
        except OSError as error:
            log.warning("known gateways can't be written down", path=str(self._memory), reason=str(error))


def _remembered(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
        return {str(name): float(at) for name, at in found.items()} if isinstance(found, Mapping) else {}
    except (OSError, ValueError, TypeError):
        return {}
