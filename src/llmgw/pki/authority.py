"""The cluster's own certificate authority: made once, then issues certificates for servers and nodes.

P-256 keys throughout. Certificates begin five minutes early, so that a node whose clock runs a little behind
is not refused.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.pki.certificate import facts_of, in_words, read_certificate, unreadable
from llmgw.pki.files import CERT_MODE, KEY_MODE, private_directory, replace, write_new
from llmgw.pki.names import PkiError, RoleUri, authority_uri, check_cluster, check_id, parse_san

DAY_S = 86_400.0
AUTHORITY_LIFETIME_S = 3650 * DAY_S
SERVER_LIFETIME_S = 825 * DAY_S
CLIENT_LIFETIME_S = 365 * DAY_S
BACKDATED_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """The three files of an identity that was just written, and what the certificate says."""

    cert: Path
    key: Path
    ca: Path
    common_name: str
    serial: str
    not_after: datetime


class Authority:
    """``ca.pem`` and ``ca-key.pem`` of a directory. Whoever reads the key can be any node."""

    def __init__(self, directory: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.directory = directory
        self.certificate = certificate
        self._key = key
        facts = facts_of(certificate)
        self.cluster = facts.cluster
        self.not_after = facts.not_after

    @classmethod
    def create(cls, directory: Path, cluster: str = "llmgw", *, now: datetime | None = None) -> Authority:
        """Make a new authority in ``directory`` (0700). Raises PkiError where there is one already."""
        check_cluster(cluster)
        private_directory(directory)
        cert_path, key_path = directory / "ca.pem", directory / "ca-key.pem"
        for path in (key_path, cert_path):
            if path.exists() or path.is_symlink():
                raise PkiError(_authority_exists(path))
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _authority_certificate(key, cluster, now or datetime.now(UTC))
        try:
            write_new(key_path, _pem_of_key(key), KEY_MODE)
            write_new(cert_path, _pem_of(certificate), CERT_MODE)
        except FileExistsError as error:
            raise PkiError(_authority_exists(Path(str(error.filename2 or cert_path)))) from error
        return cls(directory, certificate, key)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        """The authority of ``directory``. Raises PkiError in words where a file is missing, unreadable or foreign."""
        cert_path, key_path = directory / "ca.pem", directory / "ca-key.pem"
        if not cert_path.exists() and not key_path.exists():
            raise PkiError(
                f"there is no authority in {directory}: `llmgw ctl cert init-ca --dir {directory}` makes one"
            )
        certificate = read_certificate(cert_path, "the authority's certificate")
        key = _read_key(key_path)
        if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
            raise PkiError(f"{key_path} is not the key of {cert_path}: one of the two was replaced")
        facts = facts_of(certificate)
        if not facts.is_authority:
            raise PkiError(f"{cert_path} is not an authority's certificate (it names {facts.common_name!r})")
        if not facts.cluster:
            raise PkiError(f"{cert_path} was not made by `llmgw ctl cert init-ca`: it names no cluster")
        return cls(directory, certificate, key)

    def issue_server(
        self,
        sans: Sequence[str],
        out: Path,
        name: str | None = None,
        *,
        lifetime_s: float = SERVER_LIFETIME_S,
        renew: bool = False,
        now: datetime | None = None,
    ) -> Issued:
        """Write ``server.pem``, ``server-key.pem`` and ``ca.pem`` into ``out``.

        ``sans`` are the host names and addresses that nodes dial; ``name`` (this machine's host name by default) is
        the control plane's id and that of the gateway beside it. ``renew`` replaces a pair of the same name.
        """
        name = check_id(name or socket.gethostname(), "server name")
        if not sans:
            raise PkiError("a server certificate needs at least one --san: each host name and address that nodes dial")
        names = list(dict.fromkeys(parse_san(san) for san in sans))
        uris = [RoleUri(self.cluster, role, name) for role in ("server", "gateway")]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        request = _Request(name, (*names, *_uri_names(uris)), usages, lifetime_s, now or datetime.now(UTC))
        return self._issue(request, out, "server", renew)

    def issue_client(
        self,
        node: str,
        out: Path,
        lifetime_s: float = CLIENT_LIFETIME_S,
        *,
        renew: bool = False,
        now: datetime | None = None,
    ) -> Issued:
        """Write ``NODE.pem``, ``NODE-key.pem`` and ``ca.pem`` into ``out``. ``renew`` replaces the node's own pair."""
        check_id(node)
        if node in ("server", "server-key"):
            raise PkiError(f"node id {node!r} can't be used: {node}.pem is the control plane's file; choose another")
        uris = _uri_names([RoleUri(self.cluster, "node", node)])
        request = _Request(node, uris, [ExtendedKeyUsageOID.CLIENT_AUTH], lifetime_s, now or datetime.now(UTC))
        return self._issue(request, out, node, renew)

    def _issue(self, request: _Request, out: Path, stem: str, renew: bool) -> Issued:
        paths = (out / f"{stem}.pem", out / f"{stem}-key.pem", out / "ca.pem")
        self._check_target(*paths, request.common_name, renew)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(request, key)
        self._write(*paths, certificate, key, renew)
        facts = facts_of(certificate)
        return Issued(
            cert=paths[0],
            key=paths[1],
            ca=paths[2],
            common_name=facts.common_name,
            serial=facts.serial,
            not_after=facts.not_after,
        )

    def _check_target(self, cert: Path, key: Path, ca: Path, common_name: str, renew: bool) -> None:
        try:
            cert.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PkiError(f"{cert.parent} can't be made: {error.strerror or error}") from error
        if ca.exists() and read_certificate(ca, "the authority's certificate") != self.certificate:
            raise PkiError(f"{ca} belongs to another authority than {self.directory}: name another --out")
        there = [path for path in (cert, key) if path.exists() or path.is_symlink()]
        if not there:
            return
        if not renew:
            raise PkiError(f"{there[0]} exists already; nothing was changed: name another --out, or renew with --force")
        if cert not in there:
            raise PkiError(f"{key} exists but {cert} does not: it can't be seen whose key it is; move it away first")
        was = facts_of(read_certificate(cert, "the certificate to be renewed")).common_name
        if was != common_name:
            raise PkiError(f"{cert} is the certificate of {was!r}, not of {common_name!r}; nothing was changed")

    def _sign(self, request: _Request, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
        if request.lifetime_s < 60:
            raise PkiError(f"a lifetime of {request.lifetime_s:g} s is too short: at least a minute was expected")
        if request.now >= self.not_after:
            raise PkiError(
                f"the authority in {self.directory} expired on {in_words(self.not_after)}: make a new one with "
                "`llmgw ctl cert init-ca` and issue every certificate anew"
            )
        # A certificate that outlives its authority would be refused before the day it states.
        not_after = min(request.now + timedelta(seconds=min(request.lifetime_s, AUTHORITY_LIFETIME_S)), self.not_after)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(request.common_name))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(request.now - timedelta(seconds=BACKDATED_S))
            .not_valid_after(not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(request.usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(request.names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        return builder.sign(self._key, hashes.SHA256())

    def _write(
        self,
        cert: Path,
        key: Path,
        ca: Path,
        certificate: x509.Certificate,
        private: ec.EllipticCurvePrivateKey,
        renew: bool,
    ) -> None:
        write = replace if renew else write_new
        written: list[Path] = []
        try:
            for path, data, mode in (
                (key, _pem_of_key(private), KEY_MODE),
                (cert, _pem_of(certificate), CERT_MODE),
            ):
                write(path, data, mode)
                written.append(path)
            if not ca.exists():
                write_new(ca, _pem_of(self.certificate), CERT_MODE)
        except OSError as error:
            if not renew:
                for path in written:
                    path.unlink(missing_ok=True)
            raise PkiError(f"{cert.parent} can't be written to: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class _Request:
    common_name: str
    names: tuple[x509.GeneralName, ...]
    usages: list[x509.ObjectIdentifier]
    lifetime_s: float
    now: datetime


def _authority_certificate(key: ec.EllipticCurvePrivateKey, cluster: str, now: datetime) -> x509.Certificate:
    name = _name(f"llmgw {cluster} authority")
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=BACKDATED_S))
        .not_valid_after(now + timedelta(seconds=AUTHORITY_LIFETIME_S))
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(authority_uri(cluster))]), False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
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


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _uri_names(uris: Iterable[RoleUri]) -> tuple[x509.GeneralName, ...]:
    return tuple(x509.UniformResourceIdentifier(str(uri)) for uri in uris)


def _pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public_bytes(key: object) -> bytes:
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise PkiError(
            f"{path} does not exist: only where the authority's key is can certificates be issued"
        ) from error
    except OSError as error:
        raise PkiError(unreadable(path, "the authority's key", error)) from error
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise PkiError(f"{path} is not an unencrypted private key in PEM form") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PkiError(f"{path} is no elliptic-curve key; this is not the key of an llmgw authority")
    return key


def _authority_exists(path: Path) -> str:
    return (
        f"{path} exists: there is an authority already, and a new one would lock out every node that has a "
        "certificate of it. Nothing was changed; name another --dir"
    )
