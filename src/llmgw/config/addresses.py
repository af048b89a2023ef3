"""Listen addresses, the control planes' addresses, and ranges of ports."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from llmgw.cluster.model import PORT_BLOCK, PortRange
from llmgw.config.faults import Refused

AGENTS_PORT = 7443
"""Where control planes listen for nodes, and what an address without a port means."""

HOST_PORT = "HOST:PORT, such as 0.0.0.0:8080 or [::1]:8080"
SERVER_URL = "an address of a control plane, such as https://10.0.0.140:7443"
IP_ADDRESS = "an IP address, such as 10.0.0.11"
PORT_RANGE = "a range of ports, such as 20000-29999"
LOWEST_PORT, HIGHEST_PORT = 1024, 65535

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?:{_LABEL}\.)*(?=[^.]*[A-Za-z-]){_LABEL}")
_HOST_PORT = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*):([0-9]{1,5})")
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>\[[^\[\]]*\]|[^:/?#@\[\]]*)(?::(?P<port>[0-9]{1,5}))?/?"
)
_PORT_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class HostPort:
    """Where something listens. ``host`` is a name or an address, IPv6 without its brackets; port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def clashes(self, other: HostPort) -> bool:
        """Whether one machine could not listen at both."""
        if self.port != other.port or self.port == 0:
            return False
        ours, theirs = _bound(self.host), _bound(other.host)
        if isinstance(ours, str) or isinstance(theirs, str):
            return ours == theirs
        return ours.version == theirs.version and (ours == theirs or ours.is_unspecified or theirs.is_unspecified)


def _bound(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | str:
    try:
        return ipaddress.ip_address("127.0.0.1" if host.lower() == "localhost" else host)
    except ValueError:
        return host.lower()


def parse_host_port(text: str) -> HostPort:
    """``0.0.0.0:8080``, ``localhost:8080``, ``[::1]:8080``. Raises Refused."""
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise Refused(HOST_PORT, _host_port_hint(text))
    if not match[1]:
        raise Refused(HOST_PORT, f"for every address of this machine write 0.0.0.0:{match[2]}")
    return HostPort(_host(match[1], HOST_PORT), _port(match[2], HOST_PORT))


def _host_port_hint(text: str) -> str:
    if text.isdecimal():
        return (
            f"the host is missing: 0.0.0.0:{text} for every address of this machine, 127.0.0.1:{text} for itself alone"
        )
    if "://" in text:
        return "without a scheme: this is where to listen, not a URL"
    address, _, port = text.rpartition(":")
    if _is_ipv6(address) and port.isdecimal():
        return f"IPv6 addresses stand in brackets: [{address}]:{port}"
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return "IPv6 addresses stand in brackets: [::1]:8080" if text.count(":") > 1 else "the port is missing"
    return f"the port is missing: {HostPort(text.strip('[]'), 8080)}"


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _host(text: str, expected: str) -> str:
    host = text[1:-1] if text.startswith("[") else text
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if not text.startswith("[") and len(host) <= 253 and _HOST_NAME.fullmatch(host):
            return host
        raise Refused(expected, f"`{host}` is neither an IP address nor a host's name") from None
    if (address.version == 6) != text.startswith("["):
        raise Refused(expected, "IPv6 addresses stand in brackets, and only they")
    return host


def _port(text: str, expected: str) -> int:
    if int(text) > HIGHEST_PORT:
        raise Refused(expected, f"ports go up to {HIGHEST_PORT}")
    return int(text)


def parse_ip(text: str) -> str:
    """An IPv4 or IPv6 address, as written. Raises Refused."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise Refused(IP_ADDRESS, "names are not resolved here") from None
    return text


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A control plane's address. ``encrypted`` is False for http://, which nothing answers."""

    where: HostPort
    encrypted: bool

    def __str__(self) -> str:
        return f"https://{self.where}"


def parse_server_url(text: str) -> ServerUrl:
    """``https://HOST[:PORT]``, port 7443 where none is given. Raises Refused."""
    match = _URL.fullmatch(text)
    if match is None:
        raise Refused(SERVER_URL, _server_url_hint(text))
    scheme = match["scheme"].lower()
    if scheme not in ("https", "http"):
        raise Refused(SERVER_URL, f"https://, not {scheme}://")
    port = _port(match["port"], SERVER_URL) if match["port"] else AGENTS_PORT
    if port == 0:
        raise Refused(SERVER_URL, "nothing can be reached at port 0")
    return ServerUrl(HostPort(_host(match["host"], SERVER_URL), port), scheme == "https")


def _server_url_hint(text: str) -> str:
    if "://" not in text:
        return f"with its scheme: https://{text}" if _URL.fullmatch(f"https://{text}") else ""
    return "scheme, host and port, and nothing else"


def parse_advertised(text: str) -> str:
    """A control plane's address as nodes are told it: https alone. Raises Refused."""
    url = parse_server_url(text)
    if not url.encrypted:
        raise Refused(SERVER_URL, f"there is no plaintext mode: write {url}")
    return str(url)


def parse_port_range(text: str) -> PortRange:
    """``20000-29999``, both ends in it, room for at least one shard's block. Raises Refused."""
    match = _PORT_RANGE.fullmatch(text)
    if match is None:
        raise Refused(PORT_RANGE, "FIRST-LAST, without blanks")
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise Refused(PORT_RANGE, f"the lower one first: {last}-{first}")
    if first < LOWEST_PORT or last > HIGHEST_PORT:
        raise Refused(PORT_RANGE, f"between {LOWEST_PORT} and {HIGHEST_PORT}")
    if last - first + 1 < PORT_BLOCK:
        raise Refused(PORT_RANGE, f"each shard takes {PORT_BLOCK} ports: give at least so many")
    return PortRange(first, last)
