"""The issuing key, chains that it makes, one authority that takes over from another, and lists of what was revoked."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.pki import rotation
from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of
from llmgw.pki.chain import certificates_of
from llmgw.pki.contexts import ClientIdentity, ServerIdentity, client_context, listener_context, read_identity
from llmgw.pki.crl import revocation_list
from llmgw.pki.issuer import Issuer, issue_issuer
from llmgw.pki.names import PkiError
from llmgw.pki.roots import read_certificates, root_of
from llmgw.pki.signing_request import new_key, pem_of_key, pem_of_request, read_request, signing_request

NOW = datetime.now(UTC).replace(microsecond=0)
DAY_S = 86_400.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "pki", "lab")


@pytest.fixture
def issuer(authority: Authority) -> Issuer:
    return issue_issuer(authority, authority.directory)


def node_files(issuer: Issuer, authority: Authority, folder: Path, node: str = "gpu-1") -> ClientIdentity:
    key = new_key()
    signed = issuer.sign_node(node, key.public_key(), DAY_S, NOW)
    folder.mkdir(parents=True, exist_ok=True)
    files = ClientIdentity(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")
    files.ca.write_bytes(authority.roots_pem())
    files.cert.write_text(signed.chain)
    files.key.write_bytes(pem_of_key(key))
    return files


def shake_hands(server: ServerIdentity, client: ClientIdentity, version: ssl.TLSVersion) -> dict[str, object]:
    """The certificate that the server saw, as ``ssl`` tells it."""
    listening, _ = listener_context(server, datetime.now(UTC))
    dialling, _ = client_context(client)
    dialling.maximum_version = dialling.minimum_version = version
    ours, theirs = socket.socketpair()
    seen: list[object] = []

    def serve() -> None:
        with theirs, listening.wrap_socket(theirs, server_side=True) as tls:
            seen.append(tls.getpeercert())
            tls.sendall(b"x")

    thread = threading.Thread(target=serve)
    thread.start()
    with ours, dialling.wrap_socket(ours, server_hostname="127.0.0.1") as tls:
        assert tls.recv(1) == b"x"
    thread.join()
    assert isinstance(seen[0], dict)
    return seen[0]


def test_what_an_issuing_key_may_do(authority: Authority, issuer: Issuer) -> None:
    facts = facts_of(issuer.certificate)
    constraints = issuer.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = issuer.certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert (facts.common_name, facts.cluster, facts.is_authority) == ("llmgw lab issuer", "lab", True)
    assert (constraints.critical, constraints.value.path_length) == (True, 0)
    assert (usage.value.key_cert_sign, usage.value.crl_sign, usage.value.digital_signature) == (True, True, False)
    assert facts.issuer_key_id == facts_of(authority.certificate).key_id
    assert (authority.directory / "issuer-key.pem").stat().st_mode & 0o777 == 0o600
    assert (authority.directory / "issuer.pem").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_ends_trust_what_it_signs_by_the_authority_alone(
    authority: Authority, issuer: Issuer, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    issued = authority.issue_server(["127.0.0.1"], tmp_path / "server", "cp")
    server = ServerIdentity(issued.ca, issued.cert, issued.key)
    client = node_files(issuer, authority, tmp_path / "node")
    subject = shake_hands(server, client, version)["subject"]
    assert subject == ((("commonName", "gpu-1"),),)
    signed, key = issuer.issue_server("cp", ["127.0.0.1"], DAY_S, NOW)
    server.cert.write_text(signed.chain)
    server.key.write_bytes(key)
    assert read_identity(server).issued_here
    assert shake_hands(server, client, version)["subject"] == subject


def test_a_chain_without_its_issuer_leads_nowhere(authority: Authority, issuer: Issuer) -> None:
    signed = issuer.sign_node("gpu-1", new_key().public_key(), DAY_S, NOW)
    leaf, between = certificates_of(signed.chain, "it")
    assert root_of(leaf, [between], authority.roots) == authority.certificate
    assert root_of(leaf, [], authority.roots) is None
    assert root_of(leaf, [leaf], authority.roots) is None


def test_nothing_outlives_the_key_that_signed_it(authority: Authority) -> None:
    short = issue_issuer(authority, authority.directory, 3600.0, now=NOW)
    assert short.sign_node("a", new_key().public_key(), DAY_S, NOW).not_after == NOW + timedelta(hours=1)
    with pytest.raises(PkiError, match=r"the issuing key in \S+ expired on .*issue-issuer --force"):
        short.sign_node("a", new_key().public_key(), DAY_S, NOW + timedelta(hours=2))
    assert issue_issuer(authority, authority.directory, 1e12, renew=True).not_after == authority.not_after


def test_issuing_keys_that_can_not_be_used(authority: Authority, issuer: Issuer, tmp_path: Path) -> None:
    assert Issuer.load(tmp_path, authority.roots) is None
    other = Authority.create(tmp_path / "other", "lab")
    with pytest.raises(PkiError, match=r"issuer\.pem is not of the authority in"):
        Issuer.load(authority.directory, other.roots)
    (authority.directory / "issuer-key.pem").write_bytes(pem_of_key(new_key()))
    with pytest.raises(PkiError, match="is not the key of"):
        Issuer.load(authority.directory, authority.roots)
    (authority.directory / "issuer-key.pem").unlink()
    with pytest.raises(PkiError, match=r"issuer-key\.pem does not exist"):
        Issuer.load(authority.directory, authority.roots)


# -- signing requests


def test_the_authority_signs_a_key_that_it_never_had(authority: Authority) -> None:
    key = new_key()
    pem = authority.sign_request(pem_of_request(signing_request(key, "somebody-else")), "gpu-1", DAY_S)
    facts = facts_of(x509.load_pem_x509_certificate(pem))
    assert (facts.common_name, [uri.id for uri in facts.uris]) == ("gpu-1", ["gpu-1"])
    with pytest.raises(PkiError, match=r"node id '\.\./x' can't be used"):
        authority.sign_request(pem_of_request(signing_request(key, "x")), "../x")


def test_requests_that_are_none(authority: Authority) -> None:
    key = new_key()
    whole = signing_request(key, "x")
    der = bytearray(whole.public_bytes(Encoding.DER))
    der[-1] ^= 1
    forged = x509.load_der_x509_csr(bytes(der)) if _parses(bytes(der)) else None
    cases = {
        pem_of_key(key).decode(): "must not leave its machine",
        "x": "no signing request",
        "": "no signing request",
    }
    if forged is not None:
        cases[pem_of_request(forged)] = "is not signed by the key that it states"
    for pem, words in cases.items():
        with pytest.raises(PkiError, match=words):
            read_request(pem)
    weak = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    for other in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP256K1())):
        with pytest.raises(PkiError, match="a key of another kind"):
            read_request(pem_of_request(weak.sign(other, hashes.SHA256())))


def _parses(der: bytes) -> bool:
    try:
        x509.load_der_x509_csr(der)
    except ValueError:
        return False
    return True


# -- one authority after another


def test_both_are_trusted_until_the_older_one_is_dropped(authority: Authority, issuer: Issuer, tmp_path: Path) -> None:
    before = node_files(issuer, authority, tmp_path / "before")
    issued = authority.issue_server(["127.0.0.1"], tmp_path / "server", "cp")
    server = ServerIdentity(authority.directory / "ca.pem", issued.cert, issued.key)
    newer, new_issuer = rotation.begin(authority.directory)
    assert new_issuer is not None
    assert newer.certificate != authority.certificate
    assert newer.roots == (newer.certificate, authority.certificate)
    after = node_files(new_issuer, newer, tmp_path / "after")
    for client in (before, after):
        shake_hands(server, client, ssl.TLSVersion.TLSv1_3)
    with pytest.raises(PkiError, match="has two authorities already"):
        rotation.begin(authority.directory)
    alone = rotation.finish(authority.directory)
    assert alone.roots == (newer.certificate,)
    assert not (authority.directory / "ca-old-key.pem").exists()
    assert not read_identity(server).issued_here
    with pytest.raises(PkiError, match="has one authority only"):
        rotation.finish(authority.directory)


@pytest.mark.parametrize("step", range(9))
def test_a_rotation_that_was_cut_off_is_taken_up_again(
    authority: Authority, issuer: Issuer, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file that it writes may be the last one."""
    written = 0
    real, rename = rotation.replace, Path.rename

    def counted(path: Path, data: bytes, mode: int) -> None:
        nonlocal written
        if written == step:
            raise KeyboardInterrupt
        written += 1
        real(path, data, mode)

    def renamed(self: Path, target: Path) -> Path:
        nonlocal written
        if written == step:
            raise KeyboardInterrupt
        written += 1
        return rename(self, target)

    with monkeypatch.context() as cut:
        cut.setattr(rotation, "replace", counted)
        cut.setattr("llmgw.pki.issuer.replace", counted)
        cut.setattr(Path, "rename", renamed)
        try:
            rotation.begin(authority.directory)
        except KeyboardInterrupt:
            assert authority.certificate in Authority.load(authority.directory).roots, "usable all the time"
            cut.undo()
            rotation.begin(authority.directory)
    newer = Authority.load(authority.directory)
    assert newer.roots == (newer.certificate, authority.certificate)
    assert Issuer.load(authority.directory, (newer.certificate,)) is not None
    kept = rotation.older_issuer(authority.directory, newer.roots)
    assert kept is not None
    assert kept.certificate == issuer.certificate
    assert not (authority.directory / "ca-next-key.pem").exists()


def test_files_of_nodes_get_both_authorities(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue_client("gpu-1", tmp_path / "node")
    newer, _ = rotation.begin(authority.directory, issuer=False)
    newer.issue_client("gpu-1", tmp_path / "node", renew=True)
    assert read_certificates(issued.ca, "ca") == newer.roots
    assert read_identity(ClientIdentity(issued.ca, issued.cert, issued.key)).authority.key_id == (
        facts_of(newer.certificate).key_id
    )


# -- lists


def test_a_list_of_what_was_revoked(issuer: Issuer) -> None:
    signed = issuer.sign_node("gpu-1", new_key().public_key(), DAY_S, NOW)
    pem = revocation_list(issuer.signer, [(signed.serial, NOW.timestamp())], 7, NOW)
    found = x509.load_pem_x509_crl(pem)
    assert found.is_signature_valid(issuer.certificate.public_key())
    assert found.next_update_utc == NOW + timedelta(days=7)
    (entry,) = found
    assert (f"{entry.serial_number:x}", entry.revocation_date_utc) == (signed.serial, NOW)
    assert found.get_revoked_certificate_by_serial_number(1) is None
