"""A certificate with what connects it to its authority: leaf, issuers, and the roots that are trusted."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.pki.certificate import CertificateFacts, facts_of, issued_by
from llmgw.pki.names import PkiError


@dataclass(frozen=True, slots=True)
class Chain:
    """``issuers`` come in the order in which they sign: the first signed the leaf."""

    leaf: x509.Certificate
    issuers: tuple[x509.Certificate, ...]
    roots: tuple[x509.Certificate, ...]

    @property
    def facts(self) -> CertificateFacts:
        return facts_of(self.leaf)

    @property
    def pem(self) -> bytes:
        """Leaf and issuers, as TLS shows them."""
        return _pem(self.leaf, *self.issuers)

    @property
    def roots_pem(self) -> bytes:
        return _pem(*self.roots)


def certificates_of(text: str | bytes, what: str) -> tuple[x509.Certificate, ...]:
    """All certificates of a PEM text. Raises PkiError where there is none; ``what`` names the text."""
    data = text.encode() if isinstance(text, str) else text
    try:
        return tuple(x509.load_pem_x509_certificates(data))
    except ValueError as error:
        kind = "a private key" if b"PRIVATE KEY" in data else "no certificate in PEM form"
        raise PkiError(f"{what} is {kind}: BEGIN CERTIFICATE was expected") from error


def read_chain(
    certificate: str | bytes, authority: str | bytes, *, node: str, key: ec.EllipticCurvePrivateKey
) -> Chain:
    """What an authority answered to the request for ``key``. Raises PkiError where a node could not use it.

    Checked: the leaf is for this key and this node, and leads to one of the roots. Times are not looked at.
    """
    leaf, *issuers = certificates_of(certificate, "the certificate that came back")
    roots = certificates_of(authority, "the authority's certificate that came back")
    facts = facts_of(leaf)
    if not belongs_to(leaf, key):
        raise PkiError(
            f"the certificate that came back (serial {facts.serial}, for {facts.common_name!r}) is for another key "
            "than the one that was made here: it is the answer to another request"
        )
    if facts.common_name != node or ("node", node) not in {(uri.role, uri.id) for uri in facts.uris}:
        raise PkiError(f"the certificate that came back is for {facts.common_name!r}, not for node {node!r}")
    for root in roots:
        if not facts_of(root).is_authority:
            raise PkiError(f"what came back as the authority names {facts_of(root).common_name!r}: it is no authority")
    chain = Chain(leaf, tuple(issuers), roots)
    if not _leads_to_a_root(chain):
        raise PkiError(
            f"the certificate that came back was issued by {facts.issuer!r} (key {facts.issuer_key_id}), which does "
            f"not lead to the authority that came with it ({', '.join(facts_of(root).key_id for root in roots)})"
        )
    return chain


def belongs_to(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> bool:
    return _public(certificate.public_key()) == _public(key.public_key())


def _leads_to_a_root(chain: Chain) -> bool:
    last = chain.leaf
    for issuer in chain.issuers:
        if any(issued_by(last, root) for root in chain.roots):
            return True
        if not issued_by(last, issuer):
            return False
        last = issuer
    return any(issued_by(last, root) for root in chain.roots)


def _public(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return b""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)
