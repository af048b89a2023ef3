"""One authority takes over from another: both are trusted until every node has a certificate of the newer one.

``ca.pem`` holds the newer one first. Each step can be taken again after it was cut off.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from llmgw.pki.authority import Authority
from llmgw.pki.files import CERT_MODE, KEY_MODE, replace
from llmgw.pki.issuer import ISSUER_FILES, Issuer, issue_issuer
from llmgw.pki.names import PkiError
from llmgw.pki.signing import is_key_of, pem_of, read_signing_key, root_certificate
from llmgw.pki.signing_request import new_key, pem_of_key

NEXT_KEY = "ca-next-key.pem"
OLD_KEY = "ca-old-key.pem"
OLD_ISSUER_FILES = ("issuer-old.pem", "issuer-old-key.pem")
"""The older authority's issuing key: by it control planes renew their own certificates until every node has moved."""


def begin(directory: Path, *, issuer: bool = True, now: datetime | None = None) -> tuple[Authority, Issuer | None]:
    """Make a new authority beside the one in ``directory``, and an issuing key of it. Raises PkiError.

    From then on everything is issued by the new one; certificates of the old one stay good.
    """
    authority, next_key = Authority.load(directory), directory / NEXT_KEY
    if len(authority.roots) > 1 and not next_key.exists():
        if (directory / ISSUER_FILES[0]).exists() and not _has_issuer(authority):
            return authority, _issuer_of(authority, now)
        raise PkiError(
            f"{directory / 'ca.pem'} has two authorities already: "
            f"`llmgw ctl cert rotate-ca --finish --dir {directory}` drops the older one once every node has moved"
        )
    key = read_signing_key(next_key) if next_key.exists() else new_key()
    certificate = next((root for root in authority.roots if is_key_of(key, root)), None)
    try:
        replace(next_key, pem_of_key(key), KEY_MODE)
        if certificate is None:
            certificate = root_certificate(key, authority.cluster, now or datetime.now(UTC))
            replace(directory / "ca.pem", pem_of(certificate, authority.certificate), CERT_MODE)
        if not is_key_of(authority.signer.key, certificate):
            replace(directory / OLD_KEY, pem_of_key(authority.signer.key), KEY_MODE)
        next_key.rename(directory / "ca-key.pem")
    except OSError as error:
        raise PkiError(f"{directory} can't be written to: {error.strerror or error}") from error
    newer = Authority.load(directory)
    return newer, _issuer_of(newer, now) if issuer else None


def finish(directory: Path) -> Authority:
    """Drop the older authority: what it issued is refused from then on. Raises PkiError where there is only one."""
    authority = Authority.load(directory)
    if len(authority.roots) < 2:
        raise PkiError(f"{directory / 'ca.pem'} has one authority only: there is none to be dropped")
    if (directory / NEXT_KEY).exists():
        raise PkiError(
            f"the rotation was cut off: `llmgw ctl cert rotate-ca --dir {directory}` first takes it up again"
        )
    try:
        replace(directory / "ca.pem", pem_of(authority.certificate), CERT_MODE)
        for name in (OLD_KEY, *OLD_ISSUER_FILES):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise PkiError(f"{directory} can't be written to: {error.strerror or error}") from error
    return Authority.load(directory)


def older_issuer(directory: Path, roots: tuple[x509.Certificate, ...]) -> Issuer | None:
    """The issuing key of the authority that is to be dropped; None: there is none. Raises PkiError."""
    return Issuer.load(directory, roots[1:], OLD_ISSUER_FILES) if len(roots) > 1 else None


def _issuer_of(newer: Authority, now: datetime | None) -> Issuer:
    """An issuing key of the newer authority; that of the older one is kept until it is dropped."""
    directory = newer.directory
    with suppress(PkiError):
        if Issuer.load(directory, newer.roots[1:]) is not None:
            for name, kept, mode in zip(ISSUER_FILES, OLD_ISSUER_FILES, (CERT_MODE, KEY_MODE), strict=True):
                replace(directory / kept, (directory / name).read_bytes(), mode)
    return issue_issuer(newer, directory, renew=True, now=now)


def _has_issuer(authority: Authority) -> bool:
    try:
        return Issuer.load(authority.directory, (authority.certificate,)) is not None
    except PkiError:
        return False
