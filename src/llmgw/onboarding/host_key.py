"""A new machine's SSH host key, made before the machine: whoever knows it has nothing to trust on first use."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True, slots=True)
class HostKey:
    """``public`` is ``ssh-ed25519 AAAA…`` without a comment; ``private`` the file that sshd reads."""

    public: str
    private: str = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """As ssh-keygen -l shows it: ``SHA256:…``."""
        return fingerprint_of(self.public)


def new_host_key() -> HostKey:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return HostKey(public.decode(), private.decode())


def fingerprint_of(public: str) -> str:
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
