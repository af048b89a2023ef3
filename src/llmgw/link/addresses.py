"""The machine's IP addresses and their interfaces, asked of the kernel over rtnetlink (rtnetlink(7))."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_NLMSG = struct.Struct("=LHHLL")
_IFADDRMSG = struct.Struct("=BBBBL")
_RTATTR = struct.Struct("=HH")
_NLMSG_ERROR, _NLMSG_DONE, _RTM_NEWADDR, _RTM_GETADDR = 2, 3, 20, 22
_REQUEST_DUMP = 0x1 | 0x300
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """``ip`` without prefix length or zone; ``interface_index`` as the kernel counts."""

    ip: str
    interface_index: int

    @property
    def rank(self) -> tuple[bool, bool]:
        """Sorts what other machines can reach first: no loopback, no link-local; IPv4 before IPv6."""
        parsed = ipaddress.ip_address(self.ip)
        return (parsed.is_loopback or parsed.is_link_local, parsed.version == 6)


def parse_addresses(data: bytes) -> tuple[list[Address], bool]:
    """(addresses, whether the dump ends here) of one netlink datagram; what is cut short is left out."""
    found: list[Address] = []
    offset = 0
    while offset + _NLMSG.size <= len(data):
        size, kind, _, _, _ = _NLMSG.unpack_from(data, offset)
        if size < _NLMSG.size:
            break
        if kind in (_NLMSG_DONE, _NLMSG_ERROR):
            return found, True
        if kind == _RTM_NEWADDR:
            found += _parse_address(data[offset + _NLMSG.size : offset + size])
        offset += _aligned(size)
    return found, False


def read_addresses() -> tuple[Address, ...]:
    """All addresses of this network namespace; empty where the kernel does not answer."""
    found: list[Address] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as link:
            link.settimeout(_LIMIT_S)
            body = _IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            link.sendto(_NLMSG.pack(_NLMSG.size + len(body), _RTM_GETADDR, _REQUEST_DUMP, 1, 0) + body, (0, 0))
            done = False
            while not done:
                addresses, done = parse_addresses(link.recv(1 << 16))
                found += addresses
    except OSError:
        pass
    return tuple(found)


def interface_name(index: int) -> str | None:
    try:
        return socket.if_indextoname(index)
    except (OSError, OverflowError):
        return None


def _parse_address(body: bytes) -> list[Address]:
    if len(body) < _IFADDRMSG.size:
        return []
    family, _, _, _, index = _IFADDRMSG.unpack_from(body)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return []
    values = dict(_attributes(body[_IFADDRMSG.size :]))
    # On point-to-point links IFA_ADDRESS is the peer's; IFA_LOCAL, where it is given, is ours.
    raw = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS, b""))
    if len(raw) != (4 if family == socket.AF_INET else 16):
        return []
    return [Address(socket.inet_ntop(family, raw), index)]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _RTATTR.size <= len(data):
        size, kind = _RTATTR.unpack_from(data, offset)
        if size < _RTATTR.size:
            return
        yield kind, data[offset + _RTATTR.size : offset + size]
        offset += _aligned(size)


def _aligned(size: int) -> int:
    return (size + 3) & ~3
