"""TLS contexts of both ends, made from the three files of an identity.

Every way in which the files can be wrong has words of its own: ``ssl`` itself says "[SSL] PEM lib".
"""

from __future__ import annotations

import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509

from llmgw.pki.certificate import CertificateFacts, facts_of, in_words, unreadable
from llmgw.pki.join_token import authority_hash
from llmgw.pki.names import IdentityError
from llmgw.pki.roots import read_certificates, root_of

EXPIRES_SOON = timedelta(days=30)
SHORT_LIVED = timedelta(days=3)
"""A certificate that lives no longer is renewed by a program, half way through: its last quarter is the news."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the authority's certificate, the own certificate and its key, all PEM."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class ServerIdentity(TlsFiles):
    """The files of a control plane."""


@dataclass(frozen=True, slots=True)
class ClientIdentity(TlsFiles):
    """The files of a node or a gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the three files say."""

    files: TlsFiles
    own: CertificateFacts
    chain: tuple[CertificateFacts, ...]
    """All that the file of the own certificate holds, in its order: what TLS shows to the other side."""
    authority: CertificateFacts
    """The one that the own certificate is of; of several the first where it is of none."""
    issued_here: bool
    """The own certificate is of an authority in the file: signed by it, or by an issuing key of it."""
    roots: tuple[x509.Certificate, ...] = ()
    """All authorities in the file: two while one takes over from the other."""
    authority_hash: str = ""
    """SHA-256 of ``authority``'s public key, hex."""

    def lacks_issuer(self, chain: Sequence[CertificateFacts]) -> bool:
        """``chain``, the leaf first, is by its names of this cluster's issuing key, and has no certificate of that key.

        Names are all there is to go by: another cluster of the same name looks alike.
        """
        leaf = chain[0]
        return (
            leaf.cluster == self.authority.cluster
            and leaf.issuer not in {facts_of(root).common_name for root in self.roots}
            and issuer_of(leaf) not in map(authority_of, chain)
        )

    def warnings(self, now: datetime) -> list[str]:
        """What an operator should mend, though TLS works."""
        words = []
        try:
            mode = stat.S_IMODE(self.files.key.stat().st_mode)
        except OSError:
            mode = 0
        if mode & 0o077:
            words.append(
                f"the key {self.files.key} is open to others (mode {mode:04o}): whoever reads it can be "
                f"{self.own.common_name!r}; `chmod 600 {self.files.key}`"
            )
        for what, path, facts in (
            ("certificate", self.files.cert, self.own),
            ("authority", self.files.ca, self.authority),
        ):
            if now < facts.not_after < now + expires_soon(facts):
                words.append(f"the {what} {path} expires on {in_words(facts.not_after)}: renew it before")
            if facts.not_after <= now:
                words.append(f"the {what} {path} expired on {in_words(facts.not_after)}")
        return words


def expires_soon(facts: CertificateFacts) -> timedelta:
    """How long before its end people are told."""
    life = facts.not_after - facts.not_before
    return EXPIRES_SOON if life > SHORT_LIVED else life / 4


def read_identity(files: TlsFiles) -> Identity:
    """Read and check the three files. Raises IdentityError in words; validity in time is not judged here."""
    roots = read_certificates(files.ca, "the authority's certificate")
    own, *between = read_certificates(files.cert, "the certificate")
    for each in roots:
        if not (facts := facts_of(each)).is_authority:
            raise IdentityError(
                f"{files.ca} is not an authority's certificate (it names {facts.common_name!r}): "
                "the cluster's ca.pem was expected",
                files.ca,
            )
    _check_key(files)
    root = root_of(own, between, roots)
    return Identity(
        files=files,
        own=facts_of(own),
        chain=tuple(map(facts_of, (own, *between))),
        authority=facts_of(root or roots[0]),
        issued_here=root is not None,
        roots=roots,
        authority_hash=authority_hash(root or roots[0]),
    )


def listener_context(files: ServerIdentity, now: datetime) -> tuple[ssl.SSLContext, Identity]:
    """The context of a listener that asks every client for a certificate of its authority.

    One that shows none gets as far as a request: how else could it ask for one? One that can't be trusted does not.
    Raises IdentityError where nodes could not trust this server: expired, not yet valid, of another authority.
    Tickets are off: a resumed session would pass over what has changed since (revocation, expiry).
    """
    identity = read_identity(files)
    _check_server(identity, now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context, identity


def client_context(files: ClientIdentity) -> tuple[ssl.SSLContext, Identity]:
    """The context with which a peer dials in: the server must have a certificate of the authority for that address.

    An own certificate that is expired or foreign is no error here: the server judges, by its clock.
    """
    identity = read_identity(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, files)
    return context, identity


def probe_context(files: ClientIdentity) -> ssl.SSLContext:
    """A context that verifies nothing: only to look at the certificate of a server that was just refused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(files.cert, files.key, password=_no_password)
    return context


def issuer_of(facts: CertificateFacts) -> str:
    """Who issued a certificate, as messages name it."""
    return f"{facts.issuer!r}, key {facts.issuer_key_id}" if facts.issuer_key_id else repr(facts.issuer)


def authority_of(facts: CertificateFacts) -> str:
    """An authority as messages name it: two of the same name differ in their keys."""
    return f"{facts.common_name!r}, key {facts.key_id}" if facts.key_id else repr(facts.common_name)


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.cert, files.key, password=_no_password)


def _check_server(identity: Identity, now: datetime) -> None:
    own, cert = identity.own, identity.files.cert
    clock = f"this machine's clock says {in_words(now)}"
    if own.not_after <= now:
        raise IdentityError(
            f"the server certificate {cert} expired on {in_words(own.not_after)} ({clock}): every node would refuse "
            "it. Renew it with `llmgw ctl cert issue-server --force`",
            cert,
        )
    if own.not_before > now:
        raise IdentityError(
            f"the server certificate {cert} is valid from {in_words(own.not_before)} on, and {clock}: "
            "correct the clock, or issue the certificate anew",
            cert,
        )
    if identity.lacks_issuer(identity.chain):
        raise IdentityError(
            f"the server certificate {cert} was issued by {issuer_of(own)}, whose own certificate is not in that file: "
            "every node would refuse it. The file must hold the certificate followed by its issuer's: append that of "
            "the issuing key, issuer.pem, or issue the certificate anew with `llmgw ctl cert issue-server --force`",
            cert,
        )
    if not identity.issued_here:
        raise IdentityError(
            f"the server certificate {cert} was issued by {issuer_of(own)}, not by the authority in "
            f"{identity.files.ca} ({authority_of(identity.authority)}): every node would refuse it. "
            "Issue it with that authority",
            cert,
        )
    if "server" not in {uri.role for uri in own.uris}:
        raise IdentityError(
            f"{cert} is not a server's certificate (it names {own.common_name!r}): "
            "`llmgw ctl cert issue-server` makes one",
            cert,
        )


def _check_key(files: TlsFiles) -> None:
    try:
        data = files.key.read_bytes()
    except OSError as error:
        raise IdentityError(unreadable(files.key, "the key", error), files.key) from error
    if b"PRIVATE KEY" not in data:
        raise IdentityError(f"{files.key} is not a private key in PEM form", files.key)
    if b"ENCRYPTED" in data:
        raise IdentityError(
            f"the key {files.key} is protected by a passphrase, and nobody is there to type it: "
            f"`openssl pkey -in {files.key}` takes it off",
            files.key,
        )
    probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        probe.load_cert_chain(files.cert, files.key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            words = f"the key {files.key} does not belong to the certificate {files.cert}: one of the two was replaced"
        else:
            words = f"the key {files.key} can't be read: the file is not whole, or no key that TLS takes"
        raise IdentityError(words, files.key) from error


def _no_password() -> str:
    raise IdentityError("the key is protected by a passphrase, and nobody is there to type it")
