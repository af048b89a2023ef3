"""Keys that stay where they are made, and the requests to sign them (PKCS #10)."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llmgw.pki.names import PkiError


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
