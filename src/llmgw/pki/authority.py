"""The cluster's own certificate authority: made once, then issues certificates for servers, nodes and issuing keys."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.pki.certificate import facts_of, read_certificate
from llmgw.pki.files import CERT_MODE, KEY_MODE, private_directory, replace, write_new
from llmgw.pki.names import PkiError, check_cluster, check_id, parse_san
from llmgw.pki.roots import read_certificates
from llmgw.pki.signing import (
    DAY_S,
    Request,
    Signer,
    check_in_life,
    check_lifetime,
    is_key_of,
    node_request,
    pem_of,
    read_signing_key,
    root_certificate,
    server_request,
)
from llmgw.pki.signing_request import new_key, pem_of_key, read_request

SERVER_LIFETIME_S = 825 * DAY_S
CLIENT_LIFETIME_S = 365 * DAY_S
SERVER_STEMS = ("server", "server-key")


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
    """``ca.pem`` and ``ca-key.pem`` of a directory. Whoever reads the key can be any node.

    ``roots`` are all certificates of ``ca.pem``: a second one is there while this authority takes over from it.
    """

    def __init__(
        self,
        directory: Path,
        certificate: x509.Certificate,
        key: ec.EllipticCurvePrivateKey,
        roots: Sequence[x509.Certificate] = (),
    ) -> None:
        self.directory = directory
        self.certificate = certificate
        self.roots = tuple(roots) or (certificate,)
        self.signer = Signer(certificate, key)
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
        key = new_key()
        certificate = root_certificate(key, cluster, now or datetime.now(UTC))
        try:
            write_new(key_path, pem_of_key(key), KEY_MODE)
            write_new(cert_path, pem_of(certificate), CERT_MODE)
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
        roots = read_certificates(cert_path, "the authority's certificate")
        key = read_signing_key(key_path)
        certificate = next((root for root in roots if is_key_of(key, root)), None)
        if certificate is None:
            raise PkiError(f"{key_path} is not the key of {cert_path}: one of the two was replaced")
        facts = facts_of(certificate)
        if not facts.is_authority:
            raise PkiError(f"{cert_path} is not an authority's certificate (it names {facts.common_name!r})")
        if not facts.cluster:
            raise PkiError(f"{cert_path} was not made by `llmgw ctl cert init-ca`: it names no cluster")
        return cls(directory, certificate, key, roots)

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
        request = server_request(self.cluster, name, names, lifetime_s, now or datetime.now(UTC))
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
        check_node_id(node)
        request = node_request(self.cluster, node, lifetime_s, now or datetime.now(UTC))
        return self._issue(request, out, node, renew)

    def sign_request(
        self, csr: str | bytes, node: str, lifetime_s: float = CLIENT_LIFETIME_S, *, now: datetime | None = None
    ) -> bytes:
        """The certificate (PEM) of a node that made its key itself. Of the signing request only its key is taken.

        Raises PkiError where it is none, or its holder did not prove to have the key.
        """
        check_node_id(node)
        return pem_of(self._sign(node_request(self.cluster, node, lifetime_s, now or datetime.now(UTC)), csr))

    def roots_pem(self) -> bytes:
        """``ca.pem`` as nodes get it."""
        return pem_of(*self.roots)

    def _issue(self, request: Request, out: Path, stem: str, renew: bool) -> Issued:
        paths = (out / f"{stem}.pem", out / f"{stem}-key.pem", out / "ca.pem")
        self._check_target(*paths, request.common_name, renew)
        key = new_key()
        self._check(request)
        certificate = self.signer.sign(request, key.public_key())
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
        if ca.exists() and not set(read_certificates(ca, "the authority's certificate")) <= set(self.roots):
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

    def _sign(self, request: Request, csr: str | bytes) -> x509.Certificate:
        self._check(request)
        return self.signer.sign(request, read_request(csr))

    def _check(self, request: Request) -> None:
        check_lifetime(request.lifetime_s)
        do = "make a new one with `llmgw ctl cert init-ca` and issue every certificate anew"
        check_in_life(self.signer, f"the authority in {self.directory}", do, request.now)

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
                (key, pem_of_key(private), KEY_MODE),
                (cert, pem_of(certificate), CERT_MODE),
            ):
                write(path, data, mode)
                written.append(path)
            if not ca.exists():
                write_new(ca, self.roots_pem(), CERT_MODE)
            elif ca.read_bytes() != self.roots_pem():
                replace(ca, self.roots_pem(), CERT_MODE)
        except OSError as error:
            if not renew:
                for path in written:
                    path.unlink(missing_ok=True)
            raise PkiError(f"{cert.parent} can't be written to: {error.strerror or error}") from error


def check_node_id(node: str) -> None:
    """Raises PkiError where no node can be called so."""
    check_id(node)
    if node in SERVER_STEMS:
        raise PkiError(f"node id {node!r} can't be used: {node}.pem is the control plane's file; choose another")


def _authority_exists(path: Path) -> str:
    return (
        f"{path} exists: there is an authority already, and a new one would lock out every node that has a "
        "certificate of it. Nothing was changed; name another --dir"
    )
