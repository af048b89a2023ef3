"""Names that go into certificates: ids, cluster names, subject alternative names, and ``llmgw://`` URIs."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

ROLES = ("node", "gateway", "server")
RESERVED_IDS = frozenset({"ca", "ca-key"})
"""Ids whose files would be the authority's own."""

_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_HOSTNAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,62})(?:\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
_URI = re.compile(r"llmgw://([^/]+)/([a-z]+)/([^/]+)")
_AUTHORITY_URI = re.compile(r"llmgw://([^/]+)/authority")


class PkiError(Exception):
    """A certificate, key or authority can't be made or used; the message says why and what to do."""


class IdentityError(PkiError):
    """The TLS files of this process can't be used as they are."""

    def __init__(self, words: str, path: Path | None = None) -> None:
        super().__init__(words)
        self.path = path


@dataclass(frozen=True, slots=True)
class RoleUri:
    """``llmgw://CLUSTER/ROLE/ID``, as it stands in a certificate's subject alternative names."""

    cluster: str
    role: str
    id: str

    def __str__(self) -> str:
        return f"llmgw://{self.cluster}/{self.role}/{self.id}"


def parse_role_uri(uri: str) -> RoleUri | None:
    """The parts of a ``llmgw://`` URI; None for any other URI and for roles that this build does not know."""
    match = _URI.fullmatch(uri)
    if match is None or match[2] not in ROLES:
        return None
    return RoleUri(match[1], match[2], match[3])


def authority_uri(cluster: str) -> str:
    """The URI by which an authority's own certificate names its cluster."""
    return f"llmgw://{cluster}/authority"


def parse_authority_uri(uri: str) -> str | None:
    """The cluster of an authority's URI; None for any other URI."""
    match = _AUTHORITY_URI.fullmatch(uri)
    return match[1] if match else None


def check_id(name: str, what: str = "node id") -> str:
    """``name`` if it can be a common name and a file name at once; raises PkiError otherwise."""
    if _ID.fullmatch(name) is None:
        raise PkiError(
            f"{what} {name!r} can't be used: it must be 1 to 64 letters, digits, '.', '_' or '-', "
            "and begin and end with a letter or a digit (it becomes the certificate's common name and a file name)"
        )
    if name.lower() in RESERVED_IDS:
        raise PkiError(f"{what} {name!r} can't be used: {name}.pem would be the authority's own file; choose another")
    return name


def check_cluster(name: str) -> str:
    """``name`` if it can stand in certificates' URIs; raises PkiError otherwise."""
    if len(name) > 40 or _ID.fullmatch(name) is None:
        raise PkiError(
            f"cluster name {name!r} can't be used: it must be 1 to 40 letters, digits, '.', '_' or '-', "
            "and begin and end with a letter or a digit (it stands in every certificate)"
        )
    return name


def parse_san(text: str) -> x509.GeneralName:
    """A host name or an IP address (IPv6 with or without brackets) as a subject alternative name."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return x509.IPAddress(ipaddress.ip_address(bare))
    except ValueError:
        pass
    if "://" in text or "/" in text:
        raise PkiError(f"--san {text!r}: give the host name or IP address alone, without scheme, port or path")
    if re.fullmatch(r".+:\d+", text):
        raise PkiError(f"--san {text!r}: give the host name or IP address alone, without the port")
    if _HOSTNAME.fullmatch(text) is None or re.fullmatch(r"[\d.]+", text):
        raise PkiError(f"--san {text!r} is neither a host name nor an IP address")
    return x509.DNSName(text)
