"""The management address: the one this machine uses towards the control plane, and the interface that has it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from llmgw.agent.discovery.bounded import Gate, StillHanging
from llmgw.agent.discovery.settings import DiscoverySettings
from llmgw.link.addresses import Address, interface_name, read_addresses

DEFAULT_PORT = 7443
_RESOLVE_LIMIT_S = 5.0
# Documentation addresses (RFC 5737, RFC 3849): connecting a UDP socket sends nothing, it only picks the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_gate = Gate("name resolution")


@dataclass(frozen=True, slots=True)
class Management:
    address: str
    interface: str | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Server:
    host: str
    port: int

    @property
    def is_local_by_name(self) -> bool:
        return self.host.lower() in ("localhost", "ip6-localhost", "ip6-loopback")

    @property
    def is_literal(self) -> bool:
        return _ip(self.host) is not None


async def find_management(settings: DiscoverySettings, known: Management | None = None) -> Management:
    """``known``: what it was a moment ago. While no way to a control plane shows, that stays rather than a guess:
    a cable that is out for a moment moves nobody's address, and replicas over several nodes hang on it."""
    addresses = read_addresses()
    if settings.mgmt_addr:
        return _stated_address(settings.mgmt_addr, settings.mgmt_interface, addresses)
    if settings.mgmt_interface:
        return await _stated_interface(settings, settings.mgmt_interface, addresses, known)
    return await _found(settings.servers, addresses, known)


def parse_server(text: str) -> tuple[str, int] | None:
    """(host, port) of a control plane's address; None where it has none."""
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        return (parts.hostname, parts.port or DEFAULT_PORT) if parts.hostname else None
    except ValueError:
        return None


def source_address(host: str, port: int) -> str | None:
    """The address of this machine that the kernel would use towards a numeric ``host``; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, OverflowError):
        return None


async def _found(servers: Sequence[str], addresses: Sequence[Address], known: Management | None) -> Management:
    problems: list[str] = []
    for text in servers:
        parsed = parse_server(text)
        if parsed is None:
            continue
        server = _Server(*parsed)
        address, problem = await _towards(server)
        if address is not None:
            return Management(address, _interface_of(address, addresses), ())
        problems.append(problem)
    if known is not None and problems:
        return replace(known, warnings=(f"{'; '.join(problems)}: the management address {known.address} is kept",))
    fallback = _default_route(addresses)
    interface = _interface_of(fallback, addresses)
    if not servers:
        return Management(fallback, interface)
    return Management(fallback, interface, (f"{'; '.join(problems)}: the management address {fallback} is a guess",))


async def _towards(server: _Server) -> tuple[str | None, str]:
    """(this machine's address towards the server, or None; why there is none)."""
    try:
        numeric = [server.host] if server.is_literal else await _resolve(server)
    except StillHanging:
        return None, f"the name {server.host} could not be resolved in {_RESOLVE_LIMIT_S:g} s"
    except OSError as error:
        return None, f"the name {server.host} can't be resolved ({error.strerror or error})"
    if not (server.is_literal or server.is_local_by_name):
        # Debian's 127.0.1.1 for the machine's own name: an address that no other node can reach.
        numeric = [host for host in numeric if not ipaddress.ip_address(host.partition("%")[0]).is_loopback]
        if not numeric:
            return None, f"the name {server.host} resolves to loopback here (see /etc/hosts)"
    for host in numeric:
        if address := source_address(host, server.port):
            return address, ""
    return None, f"there is no route to {server.host}"


async def _resolve(server: _Server) -> list[str]:
    def ask() -> list[str]:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_DGRAM)
        return [str(entry[4][0]) for entry in found if entry[0] in (socket.AF_INET, socket.AF_INET6)]

    return await _gate.call_async(ask, _RESOLVE_LIMIT_S)


def _default_route(addresses: Sequence[Address]) -> str:
    for anywhere in _ANYWHERE:
        if address := source_address(anywhere, DEFAULT_PORT):
            return address
    return min(addresses, key=lambda address: address.rank).ip if addresses else "127.0.0.1"


def _stated_address(stated: str, interface: str | None, addresses: Sequence[Address]) -> Management:
    if _interface_of(stated, addresses) is None:
        mine = ", ".join(address.ip for address in sorted(addresses, key=lambda address: address.rank)) or "none"
        warning = f"mgmt_addr {stated} is not an address of this machine (it has: {mine}): correct it, or leave it out"
        return Management(stated, interface, (warning, *_warn_about_interface(interface)))
    found = _interface_of(stated, addresses)
    if interface and interface != found and not _warn_about_interface(interface):
        warning = f"mgmt_addr {stated} is on {found}, not on mgmt_interface {interface}: correct one, or leave it out"
        return Management(stated, interface, (warning,))
    return Management(stated, interface or found, _warn_about_interface(interface))


async def _stated_interface(
    settings: DiscoverySettings, stated: str, addresses: Sequence[Address], known: Management | None
) -> Management:
    own = sorted(
        (address for address in addresses if interface_name(address.interface_index) == stated),
        key=lambda address: address.rank,
    )
    if own:
        return Management(own[0].ip, stated)
    if known is not None and known.interface == stated:
        words = f"mgmt_interface {stated} has no address at the moment: the management address {known.address} is kept"
        return replace(known, warnings=(words,))
    found = await _found(settings.servers, addresses, known)
    missing = _warn_about_interface(stated) or (
        f"mgmt_interface {stated} has no address: {found.address} of {found.interface or 'another'} is used instead",
    )
    return Management(found.address, found.interface, (*missing, *found.warnings))


def _warn_about_interface(stated: str | None) -> tuple[str, ...]:
    names = [name for _, name in socket.if_nameindex()]
    if not stated or stated in names:
        return ()
    return (
        f"mgmt_interface {stated} is not an interface of this machine (it has: {', '.join(names)}): "
        "correct it, or leave it out",
    )


def _interface_of(ip: str, addresses: Sequence[Address]) -> str | None:
    wanted = _ip(ip)
    for address in addresses:
        if wanted is not None and _ip(address.ip) == wanted:
            return interface_name(address.interface_index)
    return None


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
