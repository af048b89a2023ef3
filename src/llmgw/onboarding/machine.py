"""What a virtual machine is to be: the options of provisioning, checked before anything is touched."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

LOWEST_VMID, HIGHEST_VMID = 100, 999_999_999
LOWEST_MEMORY_MIB = 512
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_STORAGE = re.compile(r"[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]")
_BRIDGE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,14}")
_CPU = re.compile(r"(?:custom-)?[A-Za-z0-9._-]+(?:,flags=[+-][A-Za-z0-9_.;+-]+)?")
_PCI = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}):([01][0-9a-f])(?:\.([0-7]))?", re.IGNORECASE)
_KEY = re.compile(
    r"(?:ssh-(?:ed25519|rsa|dss)|ecdsa-sha2-\S+|sk-\S+@openssh\.com)(?:-cert-v01@openssh\.com)? +[A-Za-z0-9+/=]{32,}.*"
)


class BadOption(ValueError):
    """An option can't be used; the message says what was expected."""

    def __init__(self, option: str, words: str) -> None:
        super().__init__(f"{option}: {words}")
        self.option = option
        self.words = words


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A virtual machine to be. One string is its VM's name, its host name, its node id and its common name."""

    name: str
    vmid: int
    address: ipaddress.IPv4Interface
    gateway: ipaddress.IPv4Address
    dns: tuple[str, ...] = ()
    """Empty: as the hypervisor itself."""
    cores: int = 4
    memory_mib: int = 8192
    disk_gib: int = 40
    storage: str = "local-lvm"
    bridge: str = "vmbr0"
    vlan: int | None = None
    cpu: str = "host"
    ssh_user: str = "llmgw"
    gpus: tuple[str, ...] = ()
    """PCI addresses, ``0000:41:00.0`` or ``0000:41:00`` (all functions of the device)."""

    @property
    def host(self) -> str:
        """The address alone, as ssh takes it."""
        return str(self.address.ip)


def machine(
    *,
    name: str,
    ip: str,
    vmid: int | None = None,
    gateway: str | None = None,
    dns: str | None = None,
    cores: int = 4,
    memory_mib: int = 8192,
    disk_gib: int = 40,
    storage: str = "local-lvm",
    bridge: str = "vmbr0",
    vlan: int | None = None,
    cpu: str = "host",
    ssh_user: str = "llmgw",
    gpus: tuple[str, ...] = (),
) -> Machine:
    """The machine that the options describe. Raises BadOption, named by the option, where one can't be meant so."""
    address = _address(ip)
    _matching("--name", name, _NAME, "letters, digits and `-`, at most 63 of them: it is a host name and a node id")
    if name.lower() in ("ca", "ca-key", "localhost"):
        raise BadOption("--name", f"{name!r} is taken by something else: name the node otherwise")
    _matching("--ssh-user", ssh_user, _USER, "a user's name: lower-case letters, digits, `_` and `-`")
    if ssh_user == "root":
        raise BadOption("--ssh-user", "root is not let in by ssh; a user with sudo is made: leave it out for `llmgw`")
    _matching("--storage", storage, _STORAGE, "the name of a storage, as `pvesm status` shows it")
    _matching("--bridge", bridge, _BRIDGE, "the name of a bridge, such as vmbr0")
    _matching("--cpu", cpu, _CPU, "a CPU type of Proxmox, such as host or x86-64-v3")
    _between("--cores", cores, 1, 8192)
    _between("--memory", memory_mib, LOWEST_MEMORY_MIB, 64 << 20)
    _between("--disk", disk_gib, 4, 1 << 20)
    if vlan is not None:
        _between("--vlan", vlan, 1, 4094)
    return Machine(
        name=name,
        vmid=_vmid(vmid, address),
        address=address,
        gateway=_gateway(gateway, address),
        dns=_servers(dns),
        cores=cores,
        memory_mib=memory_mib,
        disk_gib=disk_gib,
        storage=storage,
        bridge=bridge,
        vlan=vlan,
        cpu=cpu,
        ssh_user=ssh_user,
        gpus=tuple(dict.fromkeys(pci_address(gpu) for part in gpus for gpu in re.split(r"[,\s]+", part) if gpu)),
    )


def slow_cpu(cpu: str) -> str | None:
    """What to say of a CPU type other than the host's own; None for that."""
    if cpu.split(",")[0] == "host":
        return None
    return (
        f"--cpu {cpu}: the machine may not show its processor's AVX2 and AVX-512. Inference is then about five times "
        "slower with nothing that looks wrong, and some engines end with `Illegal instruction`; `host` has all there is"
    )


def authorized_keys(text: str, origin: str) -> tuple[str, ...]:
    """The public keys of an authorized_keys file, without those lines that restrict what a key may do.

    A line with options (``command=…``, ``from=…``) lets in to a part of the host only; it is left out. Raises BadOption
    where none is left.
    """
    keys = []
    for line in (line.strip() for line in text.splitlines()):
        if "PRIVATE KEY" in line:
            raise BadOption("--ssh-keys", f"{origin} holds a private key: name the file with the public ones (.pub)")
        if _KEY.fullmatch(line):
            keys.append(line)
    if not keys:
        raise BadOption("--ssh-keys", f"{origin} holds no public key: nobody could get into the machine by ssh")
    return tuple(dict.fromkeys(keys))


def pci_address(text: str) -> str:
    """``0000:41:00.0`` (or without the function), however it was shortened."""
    found = _PCI.fullmatch(text)
    if found is None:
        raise BadOption("--gpu", f"{text!r} is no PCI address; such as 0000:41:00.0 (`lspci -D` shows them)")
    domain, bus, slot, function = found.groups()
    whole = f"{domain or '0000'}:{bus}:{slot}".lower()
    return whole if function is None else f"{whole}.{function}"


def _address(ip: str) -> ipaddress.IPv4Interface:
    expected = f"{ip!r} is no address with the length of its network, such as 10.0.0.144/24"
    if "/" not in ip:
        raise BadOption("--ip", expected)
    try:
        address = ipaddress.IPv4Interface(ip)
    except ValueError:
        raise BadOption("--ip", expected) from None
    network = address.network
    if network.prefixlen > 30 or network.prefixlen < 8:
        raise BadOption("--ip", f"a network of /{network.prefixlen} can't be: /8 to /30 are expected")
    if address.ip in (network.network_address, network.broadcast_address):
        raise BadOption("--ip", f"{address.ip} is no host's address in {network}")
    if address.ip.is_loopback or address.ip.is_multicast or address.ip.is_unspecified:
        raise BadOption("--ip", f"{address.ip} is no address that a machine can have")
    return address


def _vmid(vmid: int | None, address: ipaddress.IPv4Interface) -> int:
    if vmid is not None:
        _between("--vmid", vmid, LOWEST_VMID, HIGHEST_VMID)
        return vmid
    last = address.ip.packed[-1]
    if last < LOWEST_VMID:
        raise BadOption(
            "--vmid", f"the last octet of {address.ip} is {last}, and Proxmox counts from {LOWEST_VMID}: name a number"
        )
    return last


def _gateway(gateway: str | None, address: ipaddress.IPv4Interface) -> ipaddress.IPv4Address:
    network = address.network
    try:
        chosen = network.network_address + 1 if gateway is None else ipaddress.IPv4Address(gateway)
    except ValueError:
        raise BadOption("--gateway", f"{gateway!r} is no address, such as {network.network_address + 1}") from None
    if chosen == address.ip:
        if gateway is None:
            raise BadOption("--gateway", f"{chosen} would be the gateway, and is the machine's own: name another")
        raise BadOption("--gateway", f"{chosen} is the machine's own address")
    if chosen not in network:
        raise BadOption("--gateway", f"{chosen} is not in {network}, where the machine is: it could not reach it")
    return chosen


def _servers(dns: str | None) -> tuple[str, ...]:
    servers = [part for part in re.split(r"[,\s]+", dns or "") if part]
    for server in servers:
        try:
            ipaddress.ip_address(server)
        except ValueError:
            raise BadOption("--dns", f"{server!r} is no address of a name server, such as 10.0.0.1") from None
    return tuple(servers)


def _matching(option: str, text: str, pattern: re.Pattern[str], expected: str) -> None:
    if not pattern.fullmatch(text):
        raise BadOption(option, f"{text!r} is not {expected}")


def _between(option: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise BadOption(option, f"{number} is not between {least} and {most}")
