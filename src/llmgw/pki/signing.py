"""How every certificate of a cluster is made: one shape, whoever signs it. P-256 keys are made here, never read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.pki.certificate import in_words, unreadable
from llmgw.pki.names import PkiError, RoleUri, authority_uri
from llmgw.pki.signing_request import PublicKey

DAY_S = 86_400.0
BACKDATED_S = 300.0
"""Certificates begin as much early, so that a node whose clock runs a little behind is not refused."""
AUTHORITY_LIFETIME_S = 3650 * DAY_S
SHORTEST_S = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """What a certificate is to say, but for its key."""

    common_name: str
    names: tuple[x509.GeneralName, ...]
    usages: tuple[x509.ObjectIdentifier, ...]
    lifetime_s: float
    now: datetime


@dataclass(frozen=True, slots=True)
class Signer:
    """A certificate that may sign others, and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def not_after(self) -> datetime:
        return self.certificate.not_valid_after_utc

    def _end(self, now: datetime, lifetime_s: float) -> datetime:
        # What outlives its signer would be refused before the day it states.
        return min(now + timedelta(seconds=min(lifetime_s, AUTHORITY_LIFETIME_S)), self.not_after)

    def sign(self, request: Request, public_key: PublicKey) -> x509.Certificate:
        """Only the key comes from whoever asks; all else is ``request``. Nothing outlives its signer."""
        not_after = self._end(request.now, request.lifetime_s)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name_of(request.common_name))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(request.now - timedelta(seconds=BACKDATED_S))
            .not_valid_after(not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(list(request.usages)), critical=False)
            .add_extension(x509.SubjectAlternativeName(list(request.names)), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(_signed_by(self.certificate), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())

    def sign_issuer(
        self, cluster: str, public_key: ec.EllipticCurvePublicKey, lifetime_s: float, now: datetime
    ) -> x509.Certificate:
        """A certificate by which its holder may sign those of nodes and servers, and no further issuer's."""
        return (
            x509.CertificateBuilder()
            .subject_name(name_of(f"llmgw {cluster} issuer"))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=BACKDATED_S))
            .not_valid_after(self._end(now, lifetime_s))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(authority=True), critical=True)
            .add_extension(cluster_name(cluster), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(_signed_by(self.certificate), critical=False)
            .sign(self.key, hashes.SHA256())
        )


def root_certificate(key: ec.EllipticCurvePrivateKey, cluster: str, now: datetime) -> x509.Certificate:
    name = name_of(f"llmgw {cluster} authority")
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=BACKDATED_S))
        .not_valid_after(now + timedelta(seconds=AUTHORITY_LIFETIME_S))
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(key_usage(authority=True), critical=True)
        .add_extension(cluster_name(cluster), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def node_request(cluster: str, node: str, lifetime_s: float, now: datetime) -> Request:
    uris = uri_names([RoleUri(cluster, "node", node)])
    return Request(node, uris, (ExtendedKeyUsageOID.CLIENT_AUTH,), lifetime_s, now)


def server_request(
    cluster: str, name: str, names: Iterable[x509.GeneralName], lifetime_s: float, now: datetime
) -> Request:
    """A control plane, and the gateway beside it, which dials in with the same certificate."""
    uris = uri_names(RoleUri(cluster, role, name) for role in ("server", "gateway"))
    usages = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    return Request(name, (*names, *uris), usages, lifetime_s, now)


def check_lifetime(lifetime_s: float, least_s: float = 60.0) -> None:
    """Raises PkiError where nobody could use a certificate of that lifetime."""
    if lifetime_s < least_s:
        raise PkiError(f"a lifetime of {lifetime_s:g} s is too short: at least {least_s:g} s was expected")


def check_in_life(signer: Signer, what: str, do: str, now: datetime) -> None:
    """Raises PkiError where what a signer signs would be refused by everybody."""
    if now >= signer.not_after:
        raise PkiError(f"{what} expired on {in_words(signer.not_after)}: {do}")


def key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def name_of(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def uri_names(uris: Iterable[RoleUri]) -> tuple[x509.GeneralName, ...]:
    return tuple(x509.UniformResourceIdentifier(str(uri)) for uri in uris)


def cluster_name(cluster: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(authority_uri(cluster))])


def pem_of(*certificates: x509.Certificate) -> bytes:
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def read_signing_key(path: Path, what: str = "the authority's key") -> ec.EllipticCurvePrivateKey:
    """Raises PkiError in words where the file is no key of ours."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise PkiError(
            f"{path} does not exist: only where the authority's key is can certificates be issued"
        ) from error
    except OSError as error:
        raise PkiError(unreadable(path, what, error)) from error
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise PkiError(f"{path} is not an unencrypted private key in PEM form") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PkiError(f"{path} is no elliptic-curve key; this is not the key of an llmgw authority")
    return key


def is_key_of(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bool:
    return _public_bytes(key.public_key()) == _public_bytes(certificate.public_key())


def _public_bytes(key: object) -> bytes:
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _signed_by(certificate: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    own = certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
