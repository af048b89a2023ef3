"""What a certificate says: whom it names, who issued it, and for how long."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtensionOID, NameOID

from llmgw.pki.names import IdentityError, RoleUri, parse_authority_uri, parse_role_uri


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """A certificate as people talk about it. Times are UTC."""

    common_name: str
    issuer: str
    serial: str
    """Lower-case hex, without leading zeros."""
    not_before: datetime
    not_after: datetime
    names: tuple[str, ...]
    """The host names and addresses it is valid for."""
    uris: tuple[RoleUri, ...]
    cluster: str
    """The cluster that its ``llmgw://`` URIs name; empty where it has none."""
    is_authority: bool
    fingerprint: str
    """SHA-256 of the DER, hex."""
    key_id: str
    """Short id of its own key, by which two authorities of the same name are told apart; empty: not stated."""
    issuer_key_id: str
    """Short id of the issuer's key."""
    spki: str = ""
    """SHA-256 of its public key (SubjectPublicKeyInfo), hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """Who a peer is, by its verified certificate. ``roles`` maps every role the certificate carries to its id."""

    common_name: str
    role: str
    """The first role it carries; empty where it carries none."""
    id: str
    cluster: str
    serial: str
    not_after: datetime
    roles: dict[str, str]
    not_before: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    key_hash: str = ""
    """SHA-256 of its public key, hex."""
    issuer_key_id: str = ""
    """Short id of the key that signed it: the authority's own, or an issuing key."""


def facts_of(certificate: x509.Certificate) -> CertificateFacts:
    alternative = _alternative_names(certificate)
    names: list[str] = []
    uris: list[RoleUri] = []
    cluster = ""
    if alternative is not None:
        names += alternative.get_values_for_type(x509.DNSName)
        names += [str(address) for address in alternative.get_values_for_type(x509.IPAddress)]
        texts = alternative.get_values_for_type(x509.UniformResourceIdentifier)
        uris += [uri for uri in map(parse_role_uri, texts) if uri is not None]
        authorities = [name for name in map(parse_authority_uri, texts) if name is not None]
        cluster = uris[0].cluster if uris else next(iter(authorities), "")
    return CertificateFacts(
        common_name=_common_name(certificate.subject),
        issuer=_common_name(certificate.issuer),
        serial=f"{certificate.serial_number:x}",
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        names=tuple(names),
        uris=tuple(uris),
        cluster=cluster,
        is_authority=_is_authority(certificate),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
        key_id=_key_id(certificate, x509.SubjectKeyIdentifier),
        issuer_key_id=_key_id(certificate, x509.AuthorityKeyIdentifier),
        spki=hashlib.sha256(_spki(certificate)).hexdigest(),
    )


def facts_of_der(der: bytes) -> CertificateFacts:
    return facts_of(x509.load_der_x509_certificate(der))


def peer_identity(der: bytes) -> PeerIdentity:
    """The identity in a peer's certificate (DER, already verified by TLS)."""
    facts = facts_of_der(der)
    roles: dict[str, str] = {}
    for uri in facts.uris:
        if uri.cluster == facts.cluster:
            roles.setdefault(uri.role, uri.id)
    first = facts.uris[0] if facts.uris else RoleUri("", "", "")
    return PeerIdentity(
        common_name=facts.common_name,
        role=first.role,
        id=first.id,
        cluster=facts.cluster,
        serial=facts.serial,
        not_after=facts.not_after,
        roles=roles,
        not_before=facts.not_before,
        key_hash=facts.spki,
        issuer_key_id=facts.issuer_key_id,
    )


def read_certificate(path: Path, what: str) -> x509.Certificate:
    """The first certificate of a PEM file; raises IdentityError in words. ``what`` names it: "the authority"."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IdentityError(unreadable(path, what, error), path) from error
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError as error:
        kind = "a private key" if b"PRIVATE KEY" in data else "not a certificate in PEM form"
        raise IdentityError(f"{what} {path} is {kind}: a file with BEGIN CERTIFICATE was expected", path) from error


def unreadable(path: Path, what: str, error: OSError) -> str:
    """Why a file of the identity can't be read, and what to do."""
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return (
            f"{what} {path} leads to {os.path.realpath(path)}, which does not exist: put it back there, or correct the "
            "path in the file's `tls:` section"
        )
    if isinstance(error, FileNotFoundError):
        return f"{what} {path} does not exist: copy it there, or correct the path in the file's `tls:` section"
    if isinstance(error, PermissionError):
        return f"{what} {path} can't be read by this user (permission denied): correct its owner or mode"
    return f"{what} {path} can't be read: {error.strerror or error}"


def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """True where ``authority``'s key signed ``certificate`` (dates are not looked at)."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def in_words(moment: datetime) -> str:
    """A time as messages show it: ``2026-11-29 19:00:28 UTC``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        extension = certificate.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME)
    except (x509.ExtensionNotFound, ValueError):
        return None
    value = extension.value
    return value if isinstance(value, x509.SubjectAlternativeName) else None


def _key_id(
    certificate: x509.Certificate, kind: type[x509.SubjectKeyIdentifier] | type[x509.AuthorityKeyIdentifier]
) -> str:
    try:
        value = certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, ValueError):
        return ""
    digest = value.digest if isinstance(value, x509.SubjectKeyIdentifier) else value.key_identifier
    return (digest or b"").hex()[:12]


def _spki(certificate: x509.Certificate) -> bytes:
    der, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return certificate.public_key().public_bytes(der, form)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _common_name(name: x509.Name) -> str:
    attributes = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(attributes[0].value) if attributes else name.rfc4514_string()
