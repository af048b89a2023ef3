"""Lists of what was revoked, for third parties that check the cluster's certificates. llmgw goes by its store."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.pki.signing import BACKDATED_S, DAY_S, Signer

VALID_S = 7 * DAY_S


def revocation_list(signer: Signer, revoked: Iterable[tuple[str, float]], number: int, now: datetime) -> bytes:
    """PEM. ``revoked``: serials (hex) of certificates that ``signer`` signed, and when each was revoked (Unix time)."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(signer.certificate.subject)
        .last_update(now - timedelta(seconds=BACKDATED_S))
        .next_update(now + timedelta(seconds=VALID_S))
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_signed_by(signer), critical=False)
    )
    for serial, at in sorted(set(revoked)):
        entry = x509.RevokedCertificateBuilder().serial_number(int(serial, 16))
        builder = builder.add_revoked_certificate(entry.revocation_date(datetime.fromtimestamp(at, UTC)).build())
    return builder.sign(signer.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _signed_by(signer: Signer) -> x509.AuthorityKeyIdentifier:
    own = signer.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
