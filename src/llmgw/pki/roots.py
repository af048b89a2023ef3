"""Whom is trusted: the authority's certificate, or two while one takes over from the other; chains that end there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509

from llmgw.pki.certificate import issued_by, unreadable
from llmgw.pki.names import IdentityError

LONGEST_CHAIN = 4


def read_certificates(path: Path, what: str) -> tuple[x509.Certificate, ...]:
    """All certificates of a PEM file, at least one. Raises IdentityError in words; ``what`` names the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IdentityError(unreadable(path, what, error), path) from error
    try:
        return tuple(x509.load_pem_x509_certificates(data))
    except ValueError as error:
        kind = "a private key" if b"PRIVATE KEY" in data else "not a certificate in PEM form"
        raise IdentityError(f"{what} {path} is {kind}: a file with BEGIN CERTIFICATE was expected", path) from error


def root_of(
    certificate: x509.Certificate, between: Iterable[x509.Certificate], roots: Sequence[x509.Certificate]
) -> x509.Certificate | None:
    """The root that the certificate's chain of signatures ends at; None: at none of them. Dates are not looked at."""
    known = [each for each in between if _may_issue(each)]
    for _ in range(LONGEST_CHAIN):
        for root in roots:
            if issued_by(certificate, root):
                return root
        found = next((each for each in known if each != certificate and issued_by(certificate, each)), None)
        if found is None:
            return None
        certificate = found
    return None


def _may_issue(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False
