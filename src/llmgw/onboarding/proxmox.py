"""Proxmox as provisioning needs it: what is read is the same whether ``qm`` runs here or the REST API answers."""

from __future__ import annotations

import abc
import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmgw.onboarding.image import Image
from llmgw.onboarding.pci import PciDevice

Kind = Literal["busy", "exists", "missing", "denied", "unreachable", "failed"]
Say = Callable[[str], None]

_BUSY = re.compile(
    r"can't lock file|can't acquire lock|unable to acquire .*lock|got lock request timeout|got lock timeout"
    r"|VM is locked|CT is locked|is already locked|lock-\d+\.conf' - got timeout|cfs-lock .* error"
    r"|cfs_lock .* error|failed: got timeout$",
    re.MULTILINE,
)
_EXISTS = re.compile(r"already exists|config file already exists")
_MISSING = re.compile(r"does not exist")


class ProxmoxError(Exception):
    """What Proxmox said, or that it said nothing. ``look`` is a command that shows more."""

    def __init__(self, words: str, kind: Kind = "failed", *, look: str = "") -> None:
        super().__init__(words)
        self.kind = kind
        self.look = look


@dataclass(frozen=True, slots=True)
class Guest:
    """A virtual machine or container anywhere in the cluster."""

    vmid: int
    name: str
    node: str


@dataclass(frozen=True, slots=True)
class Storage:
    name: str
    content: frozenset[str]
    active: bool
    available_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How often what is locked by somebody else is tried, and how long is waited before the second time (then more)."""

    tries: int = 8
    pause_s: float = 2.0
    longest_pause_s: float = 15.0


class Proxmox(abc.ABC):
    """One node of Proxmox. An async context manager; every method may raise ProxmoxError."""

    patience: Patience
    node: str
    """As the API names it."""

    async def __aenter__(self) -> Proxmox:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    # -- what there is

    @abc.abstractmethod
    async def read(self, path: str, **parameters: str) -> Any:
        """``data`` of GET ``path``."""

    async def guests(self) -> Sequence[Guest]:
        """All of the cluster that may be seen: numbers are shared by all its nodes, by machines and containers."""
        rows = await self.read("/cluster/resources", type="vm")
        return [Guest(int(row["vmid"]), str(row.get("name", "")), str(row.get("node", ""))) for row in rows]

    async def config(self, vmid: int) -> Mapping[str, str]:
        """The configuration of a machine of this node."""
        read = await self.read(f"/nodes/{self.node}/qemu/{vmid}/config")
        return {str(key): str(value) for key, value in read.items()}

    async def running(self, vmid: int) -> bool:
        state = await self.read(f"/nodes/{self.node}/qemu/{vmid}/status/current")
        return bool(state["status"] == "running")

    async def name_servers(self) -> Sequence[str]:
        """Those of the node itself."""
        known = await self.read(f"/nodes/{self.node}/dns")
        return [str(known[key]) for key in ("dns1", "dns2", "dns3") if known.get(key)]

    async def storages(self) -> Sequence[Storage]:
        rows = await self.read(f"/nodes/{self.node}/storage", enabled="1")
        return [
            Storage(
                str(row["storage"]),
                frozenset(str(row.get("content", "")).split(",")),
                bool(int(row.get("active", 0))),
                int(row["avail"]) if row.get("avail") is not None else None,
            )
            for row in rows
        ]

    async def bridges(self) -> Sequence[str] | None:
        """None where one may not see them."""
        try:
            rows = await self.read(f"/nodes/{self.node}/network", type="any_bridge")
        except ProxmoxError as error:
            if error.kind == "denied":
                return None
            raise
        return [str(row["iface"]) for row in rows]

    @abc.abstractmethod
    async def pci_devices(self) -> Sequence[PciDevice]: ...

    @abc.abstractmethod
    async def pass_through(self, devices: Sequence[str]) -> Mapping[str, str]:
        """The ``hostpciN`` options for these devices."""

    # -- what is done

    @abc.abstractmethod
    async def bring(self, image: Image, say: Say) -> str:
        """Has the image where the node can import it, checked; returns what ``import-from`` calls it."""

    @abc.abstractmethod
    async def put_seed(self, name: str, data: bytes) -> str:
        """Puts a CD image where a machine can have it; returns its volume."""

    @abc.abstractmethod
    async def drop_seed(self, volume: str) -> None:
        """Deletes it. One that is not there is none to delete."""

    @abc.abstractmethod
    async def create(self, vmid: int, options: Mapping[str, str], keys: Sequence[str]) -> None:
        """A machine with these options, whose cloud-init settings name ``keys``. Kind `exists`: there is one."""

    @abc.abstractmethod
    async def change(self, vmid: int, options: Mapping[str, str]) -> None: ...

    @abc.abstractmethod
    async def resize(self, vmid: int, disk: str, size: str) -> None: ...

    @abc.abstractmethod
    async def start(self, vmid: int) -> None: ...

    @abc.abstractmethod
    async def stop(self, vmid: int) -> None: ...

    @abc.abstractmethod
    async def unlock(self, vmid: int) -> None:
        """Takes away a lock whose holder is gone. A token may not."""

    @abc.abstractmethod
    async def destroy(self, vmid: int) -> None:
        """With its disks, and out of every job of backup and replication."""

    @abc.abstractmethod
    def command(self, *words: str) -> str:
        """The command that a reader would use for ``qm WORDS…``."""

    async def iso_storage(self) -> str:
        """A storage for the CD image."""
        return await self.storage_for("iso", "CD images (content type iso), and the data of the first boot is one")

    async def storage_for(self, content: str, what: str, otherwise: str = "") -> str:
        """A storage that takes ``content``: `local` where it can be, since that is what all installations have."""
        usable = [each.name for each in await self.storages() if content in each.content and each.active]
        if not usable:
            raise ProxmoxError(
                f"no storage of {self.node} takes {what}: `pvesm set local --content …,{content}` allows it on one "
                f"of yours{otherwise}",
                look=f"pvesm status --content {content}",
            )
        return "local" if "local" in usable else usable[0]


async def patiently(what: Callable[[], Awaitable[None]], patience: Patience, say: Say) -> None:
    """Does it, again and again while somebody else holds a lock that it needs."""
    pause_s = patience.pause_s
    for number in range(1, patience.tries + 1):
        try:
            return await what()
        except ProxmoxError as error:
            if error.kind != "busy" or number == patience.tries:
                raise
            say(f"locked by somebody else ({error}): trying again in {pause_s:g} s")
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.5, patience.longest_pause_s)
    return None


def kind_of(words: str) -> Kind:
    """What an error is, by the words that Proxmox has for it."""
    if _EXISTS.search(words):
        return "exists"
    if _BUSY.search(words):
        return "busy"
    if _MISSING.search(words):
        return "missing"
    return "failed"


def seed_name(name: str) -> str:
    return f"llmgw-{name}-cidata.iso"
