"""What is kept of certificates: which there are and whose, what let them in, and what was taken away.

No secret is in here: of tokens and keys there are hashes alone, and certificates are public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CertificateSource = Literal["token", "renewal", "recovery", "file", "unseen"]
"""``file``: signed by the authority's own key, and brought to its node by hand. ``unseen``: signed by an issuing key,
and not known here (the store is older than it)."""

CertificateState = Literal["next", "current", "retired", "superseded", "revoked"]
"""``next``: issued and not used yet. ``retired``: its successor was used. ``superseded``: it was not used, and another
was issued in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Times are wall-clock Unix seconds."""

    serial: str
    """Lower-case hex."""
    node: str
    role: str = "node"
    source: CertificateSource = "unseen"
    state: CertificateState = "current"
    issued_at: float = 0.0
    not_after: float = 0.0
    """0: not known, since it was entered by an llmgw that did not keep it."""
    chain: str = ""
    """Serial of the first certificate of the line of renewals that it stands in; empty: it is the first."""
    previous: str = ""
    """Serial of the certificate by which it was asked for."""
    key_hash: str = ""
    """SHA-256 of its public key, hex."""
    issuer: str = ""
    """Short id of the key that signed it."""
    recoveries: int = 0
    """How many in a row, itself included, were got by proof of the key of one that had expired."""
    machine: str = ""
    """Fingerprint of the machine that asked for it or used it."""
    first_used_at: float | None = None
    ended_at: float | None = None
    """When it was retired, superseded or revoked."""
    why: str = ""
    """Why it was revoked, for people."""

    @property
    def line(self) -> str:
        """What all certificates that were renewed one from another have in common."""
        return self.chain or self.serial


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A join token. ``hash`` is the SHA-256 of its secret, hex."""

    id: str
    node: str
    hash: str
    created_at: float
    expires_at: float
    labels: Mapping[str, str] = field(default_factory=dict)
    replace: bool = False
    """It may take the name from a machine that has it."""
    used_key: str = ""
    """SHA-256 of the public key that it was used for, hex; empty: it was not used."""
    used_at: float | None = None
    used_from: str = ""
    answer: str = ""
    """The certificate that was given for it, with its issuer's, PEM: the same key gets the same answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """``subject`` is a node, or the serial of a certificate that was never seen: one that was says so itself."""

    kind: Literal["node", "serial"]
    subject: str
    at: float
    why: str = ""
    removed: bool = False
    """The node was forgotten: certificates that it had been issued by then are refused, later ones are not."""

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.subject}"
