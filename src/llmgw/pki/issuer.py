"""The issuing key: an intermediate of the authority, by which a control plane signs joins and renewals.

It lies where the control plane is, and the authority's own key need not. What it signed is trusted by whoever trusts
the authority, as long as the issuer's certificate comes along: files and answers hold both, the own certificate first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of, in_words, read_certificate
from llmgw.pki.files import CERT_MODE, KEY_MODE, replace, write_new
from llmgw.pki.names import PkiError, parse_san
from llmgw.pki.roots import root_of
from llmgw.pki.signing import (
    DAY_S,
    SHORTEST_S,
    Signer,
    check_in_life,
    check_lifetime,
    is_key_of,
    node_request,
    pem_of,
    read_signing_key,
    server_request,
)
from llmgw.pki.signing_request import PublicKey, new_key, pem_of_key

ISSUER_LIFETIME_S = 1825 * DAY_S
ISSUER_FILES = ("issuer.pem", "issuer-key.pem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A certificate that was just signed. ``chain`` (PEM) has the issuer's certificate after it."""

    certificate: x509.Certificate
    chain: str
    serial: str
    not_before: datetime
    not_after: datetime


class Issuer:
    """``issuer.pem`` and ``issuer-key.pem`` of a directory."""

    def __init__(self, directory: Path, signer: Signer) -> None:
        self.directory = directory
        self.signer = signer
        self.certificate = signer.certificate
        facts = facts_of(signer.certificate)
        self.cluster = facts.cluster
        self.key_id = facts.key_id
        self.not_after = facts.not_after

    @classmethod
    def load(
        cls, directory: Path, roots: Sequence[x509.Certificate], files: tuple[str, str] = ISSUER_FILES
    ) -> Issuer | None:
        """The issuing key of a directory; None where there is none. Raises PkiError where it can't be used.

        ``roots``: of whom it must be an intermediate.
        """
        cert_path, key_path = (directory / name for name in files)
        if not cert_path.exists() and not key_path.exists():
            return None
        certificate = read_certificate(cert_path, "the issuer's certificate")
        key = read_signing_key(key_path, "the issuing key")
        if not is_key_of(key, certificate):
            raise PkiError(f"{key_path} is not the key of {cert_path}: one of the two was replaced")
        facts = facts_of(certificate)
        if not facts.is_authority or not facts.cluster:
            raise PkiError(f"{cert_path} was not made by `llmgw ctl cert issue-issuer`: it may not sign for a cluster")
        if root_of(certificate, (), roots) is None:
            raise PkiError(
                f"{cert_path} is not of the authority in {directory / 'ca.pem'}: what it signs, every peer would "
                "refuse. Make it with `llmgw ctl cert issue-issuer` where that authority's key is"
            )
        return cls(directory, Signer(certificate, key))

    def sign_node(self, node: str, key: PublicKey, lifetime_s: float, now: datetime) -> Signed:
        """Raises PkiError where this issuer is past its own life."""
        self._check(lifetime_s, now)
        return self._signed(self.signer.sign(node_request(self.cluster, node, lifetime_s, now), key))

    def issue_server(self, name: str, sans: Sequence[str], lifetime_s: float, now: datetime) -> tuple[Signed, bytes]:
        """A control plane's certificate, and its new key (PEM). Raises PkiError."""
        self._check(lifetime_s, now)
        key = new_key()
        names = [parse_san(san) for san in sans]
        request = server_request(self.cluster, name, names, lifetime_s, now)
        return self._signed(self.signer.sign(request, key.public_key())), pem_of_key(key)

    def _signed(self, certificate: x509.Certificate) -> Signed:
        facts = facts_of(certificate)
        return Signed(
            certificate=certificate,
            chain=pem_of(certificate, self.certificate).decode(),
            serial=facts.serial,
            not_before=facts.not_before,
            not_after=facts.not_after,
        )

    def _check(self, lifetime_s: float, now: datetime) -> None:
        check_lifetime(lifetime_s, SHORTEST_S)
        do = "make another with `llmgw ctl cert issue-issuer --force` where the authority's key is"
        check_in_life(self.signer, f"the issuing key in {self.directory}", do, now)


def issue_issuer(
    authority: Authority,
    out: Path,
    lifetime_s: float = ISSUER_LIFETIME_S,
    *,
    renew: bool = False,
    now: datetime | None = None,
) -> Issuer:
    """Write ``issuer.pem`` and ``issuer-key.pem`` into ``out``; ``renew`` replaces those that are there."""
    now = now or datetime.now(UTC)
    check_lifetime(lifetime_s)
    check_in_life(authority.signer, f"the authority in {authority.directory}", "make a new one", now)
    cert_path, key_path = (out / name for name in ISSUER_FILES)
    there = next((path for path in (cert_path, key_path) if path.exists() or path.is_symlink()), None)
    if there is not None and not renew:
        raise PkiError(f"{there} exists already; nothing was changed: name another --out, or renew with --force")
    key = new_key()
    certificate = authority.signer.sign_issuer(authority.cluster, key.public_key(), lifetime_s, now)
    write = replace if renew else write_new
    try:
        out.mkdir(parents=True, exist_ok=True)
        write(key_path, pem_of_key(key), KEY_MODE)
        write(cert_path, pem_of(certificate), CERT_MODE)
    except OSError as error:
        raise PkiError(f"{out} can't be written to: {error.strerror or error}") from error
    return Issuer(out, Signer(certificate, key))


def expiry_words(issuer: Issuer) -> str:
    return f"the issuing key in {issuer.directory} expires on {in_words(issuer.not_after)}"
