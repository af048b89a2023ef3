"""Keys that stay where they are made, and the requests to sign them (PKCS #10)."""

from __future__ import annotations

import hashlib

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llmgw.pki.names import PkiError

PublicKey = ec.EllipticCurvePublicKey
CURVES = ("secp256r1", "secp384r1")


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_of_pem(data: bytes, name: str) -> ec.EllipticCurvePrivateKey:
    """Raises PkiError where ``data`` is no unencrypted elliptic-curve key; ``name`` is the file's."""
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise PkiError(f"{name} is not an unencrypted private key in PEM form") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PkiError(f"{name} is no elliptic-curve key")
    return key


def signing_request(key: ec.EllipticCurvePrivateKey, node: str) -> x509.CertificateSigningRequest:
    """Whoever signs takes only the public key from it; the name is there for people."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    return x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())


def pem_of_request(request: x509.CertificateSigningRequest) -> str:
    return request.public_bytes(serialization.Encoding.PEM).decode()


def proof_of_key(key: ec.EllipticCurvePrivateKey, nonce: str, request: x509.CertificateSigningRequest) -> bytes:
    """Shows that whoever makes ``request`` still has ``key``: an ECDSA signature over the nonce and the request."""
    data = nonce.encode() + request.public_bytes(serialization.Encoding.DER)
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def read_request(pem: str | bytes) -> PublicKey:
    """The public key of a signing request in PEM form, whose holder has proven to have its private key.

    Raises PkiError in words. The names that it states are not looked at: whoever signs says the name.
    """
    data = pem.encode() if isinstance(pem, str) else pem
    if b"PRIVATE KEY" in data:
        raise PkiError("this is a private key, and it must not leave its machine: a signing request was expected")
    try:
        request = x509.load_pem_x509_csr(data)
        key = request.public_key()
        proven = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise PkiError("this is no signing request in PEM form: BEGIN CERTIFICATE REQUEST was expected") from error
    if not proven:
        raise PkiError("the signing request is not signed by the key that it states: it was changed on its way")
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise PkiError("the signing request is for a key of another kind: one on the curve P-256 was expected")
    return key


def request_der(pem: str | bytes) -> bytes:
    """A signing request as DER: what a proof of an older key is made over. Raises PkiError."""
    data = pem.encode() if isinstance(pem, str) else pem
    try:
        return x509.load_pem_x509_csr(data).public_bytes(serialization.Encoding.DER)
    except ValueError as error:
        raise PkiError("this is no signing request in PEM form: BEGIN CERTIFICATE REQUEST was expected") from error


def key_hash(key: object) -> str:
    """SHA-256 of a public key's SubjectPublicKeyInfo, hex: what a key is known by."""
    data = key.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(data).hexdigest()


def is_proof(certificate: x509.Certificate, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` (ECDSA, SHA-256) was made over ``message`` with the key of ``certificate``."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True
