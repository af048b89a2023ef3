"""The string with which a node joins: where to dial, which authority to expect there, and a secret used once."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from llmgw.pki.names import PkiError, check_id

PREFIX = "llmgw-join-1."
MAX_TOKEN_BYTES = 8192

_HASH = re.compile(r"[0-9a-f]{64}")
_EXPECTED = f"a join token was expected, as `llmgw ctl node token NODE` prints it: {PREFIX}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """``str`` gives the token as it is handed over."""

    authority_hash: str
    """Of the root under which the control plane's own certificate was issued: ``authority_hash`` of it."""
    id: str
    secret: str = field(repr=False)
    node: str
    """The node's id: nobody else can use the token."""
    addresses: tuple[str, ...]
    """``https://HOST:PORT`` of the control planes, in the order in which they are dialled."""

    def __str__(self) -> str:
        content = {
            "h": self.authority_hash,
            "i": self.id,
            "s": self.secret,
            "n": self.node,
            "a": list(self.addresses),
        }
        data = json.dumps(content, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def parse_join_token(text: str) -> JoinToken:
    """The parts of a token; blanks around it don't matter. Raises PkiError, whose words never quote the token."""
    text = text.strip()
    if not text:
        raise PkiError(f"the token is empty: {_EXPECTED}")
    if not text.startswith(PREFIX):
        if re.match(r"llmgw-join-[0-9]+\.", text):
            raise PkiError("the token is of another version of llmgw: install the version of the control plane here")
        raise PkiError(f"this is no token: {_EXPECTED}")
    if len(text) > MAX_TOKEN_BYTES:
        raise PkiError(f"the token is longer than {MAX_TOKEN_BYTES} bytes: {_EXPECTED}")
    body = text.removeprefix(PREFIX)
    try:
        content = json.loads(base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, UnicodeDecodeError) as error:
        raise PkiError("the token is not whole: a part of it was lost on the way; copy it again") from error
    return _token(content)


def authority_hash(certificate: x509.Certificate) -> str:
    """By which a token names an authority: SHA-256 of its public key (SubjectPublicKeyInfo, DER), in hex."""
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key).hexdigest()


def _token(content: object) -> JoinToken:
    fields = content if isinstance(content, dict) else {}
    texts = [fields.get(key) for key in ("h", "i", "s", "n")]
    addresses = fields.get("a")
    if (
        not all(isinstance(text, str) and text for text in texts)
        or not isinstance(addresses, list)
        or not addresses
        or not all(isinstance(address, str) for address in addresses)
        or _HASH.fullmatch(fields["h"]) is None
    ):
        raise PkiError("the token can't be read: it was changed on the way, or made by another version of llmgw")
    return JoinToken(
        authority_hash=fields["h"],
        id=fields["i"],
        secret=fields["s"],
        node=check_id(fields["n"]),
        addresses=tuple(addresses),
    )
