"""The options of a virtual machine as Proxmox takes them, and the mark by which a run knows its own machine."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from llmgw.onboarding.machine import Machine

DISK, CDROM = "scsi0", "scsi1"
EMPTY_CDROM = "none,media=cdrom"

_VENDOR = "BC:24:11"  # Proxmox's own.
_UNFINISHED = re.compile(r"(\S+): being made by llmgw, run ([0-9a-f]{16}), host key (ssh-ed25519 [A-Za-z0-9+/=]+)")


@dataclass(frozen=True, slots=True)
class Mark:
    """What the description of a machine says while it is being made."""

    name: str
    run: str
    host_key: str

    def __str__(self) -> str:
        return f"{self.name}: being made by llmgw, run {self.run}, host key {self.host_key}"


def new_mark(name: str, host_key: str) -> Mark:
    return Mark(name, secrets.token_hex(8), host_key)


def mark_of(description: str) -> Mark | None:
    found = _UNFINISHED.search(description)
    return Mark(*found.groups()) if found is not None else None


def finished(name: str) -> str:
    """The description of a machine that is made."""
    return f"{name}: a node of llmgw"


def new_mac() -> str:
    return ":".join((_VENDOR, *(f"{byte:02X}" for byte in secrets.token_bytes(3))))


def frame(machine: Machine, *, mac: str, dns: tuple[str, ...], description: str) -> Mapping[str, str]:
    """The machine without its disks.

    No guest agent: images have none, and a machine that is said to have one can't be shut down without it. The
    settings of Proxmox's own cloud-init drive say the same as the seed: whoever attaches one later changes nothing.
    """
    network = f"virtio={mac},bridge={machine.bridge}"
    options = {
        "name": machine.name,
        "description": description,
        "tags": "llmgw",
        "ostype": "l26",
        "cpu": machine.cpu,
        "cores": str(machine.cores),
        "memory": str(machine.memory_mib),
        "balloon": "0",
        "onboot": "1",
        "scsihw": "virtio-scsi-pci",
        "net0": network if machine.vlan is None else f"{network},tag={machine.vlan}",
        "serial0": "socket",
        "vga": "serial0",
        "ciuser": machine.ssh_user,
        "ciupgrade": "0",
        "ipconfig0": f"ip={machine.address},gw={machine.gateway}",
        "nameserver": " ".join(dns),
    }
    if machine.gpus:
        options |= {"machine": "q35", "bios": "ovmf"}
    return options


def disks(machine: Machine, *, image: str, passed: Mapping[str, str]) -> Mapping[str, str]:
    """Its disk, made of ``image``, and the devices that are passed through."""
    options = {DISK: f"{machine.storage}:0,import-from={image},discard=on", "boot": f"order={DISK}"}
    if machine.gpus:
        # Drivers that are built on the machine are not signed: its firmware is not to ask for that.
        options["efidisk0"] = f"{machine.storage}:0,efitype=4m,pre-enrolled-keys=0"
    return {**options, **passed}


def cdrom(volume: str) -> Mapping[str, str]:
    """The CD of the first boot: by SCSI, since neither UEFI nor small kernels know the IDE of a q35 machine."""
    return {CDROM: f"{volume},media=cdrom"}
