"""The authority: what it writes, what it refuses, and what stands in its certificates."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of, peer_identity
from llmgw.pki.names import PkiError, check_id, parse_san

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "pki", "lab", now=NOW)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_files_and_modes(authority: Authority, tmp_path: Path):
    issued = authority.issue_client("a", tmp_path / "out", now=NOW)
    assert mode(tmp_path / "pki") == 0o700
    assert sorted(path.name for path in (tmp_path / "pki").iterdir()) == ["ca-key.pem", "ca.pem"]
    assert mode(tmp_path / "pki" / "ca-key.pem") == 0o600
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a-key.pem", "a.pem", "ca.pem"]
    assert mode(issued.key) == 0o600
    assert mode(issued.cert) == 0o644
    assert issued.ca.read_bytes() == (tmp_path / "pki" / "ca.pem").read_bytes()


def test_the_umask_changes_nothing(tmp_path: Path):
    old = os.umask(0)
    try:
        authority = Authority.create(tmp_path / "pki", now=NOW)
        issued = authority.issue_client("a", tmp_path / "out", now=NOW)
    finally:
        os.umask(old)
    assert (mode(tmp_path / "pki"), mode(tmp_path / "pki" / "ca-key.pem"), mode(issued.key)) == (0o700, 0o600, 0o600)


def test_the_authority_certificate(authority: Authority, tmp_path: Path):
    certificate = load(tmp_path / "pki" / "ca.pem")
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert certificate.public_key().curve.name == "secp256r1"
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.ca) == (True, True)
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert (usage.critical, usage.value.key_cert_sign, usage.value.digital_signature) == (True, True, False)
    facts = facts_of(certificate)
    assert (facts.cluster, facts.common_name, facts.is_authority) == ("lab", "llmgw lab authority", True)
    assert facts.not_after - NOW == timedelta(days=3650)
    assert Authority.load(tmp_path / "pki").cluster == "lab"


def test_a_nodes_certificate(authority: Authority, tmp_path: Path):
    issued = authority.issue_client("gpu-a-01", tmp_path, now=NOW)
    certificate = load(issued.cert)
    facts = facts_of(certificate)
    assert facts.common_name == "gpu-a-01"
    assert [str(uri) for uri in facts.uris] == ["llmgw://lab/node/gpu-a-01"]
    assert facts.not_before == NOW - timedelta(minutes=5)
    assert facts.not_after == NOW + timedelta(days=365)
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.ca) == (True, False)
    own = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    theirs = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    assert own == theirs
    certificate.verify_directly_issued_by(authority.certificate)


def test_a_servers_certificate(authority: Authority, tmp_path: Path):
    sans = ["10.0.0.140", "cp.example", "[fd00::1]", "cp.example"]
    issued = authority.issue_server(sans, tmp_path, "cp-1", now=NOW)
    certificate = load(issued.cert)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["cp.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("10.0.0.140"), ip_address("fd00::1")]
    usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    assert issued.not_after == NOW + timedelta(days=825)
    assert {path.name for path in (issued.cert, issued.key, issued.ca)} == {"server.pem", "server-key.pem", "ca.pem"}


def test_the_identity_that_a_peer_shows(authority: Authority, tmp_path: Path):
    from cryptography.hazmat.primitives.serialization import Encoding

    server = authority.issue_server(["h"], tmp_path, "cp-1", now=NOW)
    identity = peer_identity(load(server.cert).public_bytes(Encoding.DER))
    assert identity.roles == {"server": "cp-1", "gateway": "cp-1"}
    assert (identity.common_name, identity.role, identity.id, identity.cluster) == ("cp-1", "server", "cp-1", "lab")
    assert identity.serial == server.serial
    node = authority.issue_client("a", tmp_path, now=NOW)
    assert peer_identity(load(node.cert).public_bytes(Encoding.DER)).roles == {"node": "a"}


def test_serials_and_keys_are_never_the_same(authority: Authority, tmp_path: Path):
    issued = [authority.issue_client("a", tmp_path / str(number), now=NOW) for number in range(5)]
    assert len({one.serial for one in issued}) == 5
    assert len({one.key.read_bytes() for one in issued}) == 5


def test_an_authority_is_never_overwritten(authority: Authority, tmp_path: Path):
    before = everything(tmp_path)
    with pytest.raises(PkiError, match=r"ca-key\.pem exists: there is an authority already"):
        Authority.create(tmp_path / "pki")
    (tmp_path / "pki" / "ca-key.pem").rename(tmp_path / "elsewhere.pem")
    with pytest.raises(PkiError, match=r"ca\.pem exists"):
        Authority.create(tmp_path / "pki")
    assert sorted(everything(tmp_path).values()) == sorted(before.values())


def test_of_two_that_make_one_at_once_one_is_refused(tmp_path: Path):
    barrier = threading.Barrier(8)
    made: list[int] = []

    def make() -> None:
        barrier.wait()
        with suppress(PkiError):
            made.append(Authority.create(tmp_path / "pki", "lab").certificate.serial_number)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert [Authority.load(tmp_path / "pki").certificate.serial_number] == made
    assert sorted(path.name for path in (tmp_path / "pki").iterdir()) == ["ca-key.pem", "ca.pem"]


def test_a_directory_that_is_open_to_others_is_refused(tmp_path: Path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PkiError, match=r"is open to others \(mode 0755\).*`chmod 700"):
        Authority.create(tmp_path / "open")
    assert list((tmp_path / "open").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(PkiError, match="is not a directory"):
        Authority.create(tmp_path / "file")


@pytest.mark.parametrize(
    ("id", "why"),
    [
        ("../evil", "can't be used: it must be 1 to 64"),
        ("a/b", "can't be used: it must be 1 to 64"),
        ("", "can't be used: it must be 1 to 64"),
        (".", "can't be used: it must be 1 to 64"),
        ("-rf", "can't be used: it must be 1 to 64"),
        ("a\n", "can't be used: it must be 1 to 64"),
        ("x" * 65, "can't be used: it must be 1 to 64"),
        ("a\x00b", "can't be used: it must be 1 to 64"),
        ("ca", r"ca\.pem would be the authority's own file"),
        ("server", r"server\.pem is the control plane's file"),
    ],
)
def test_node_ids_that_can_not_be_files(authority: Authority, tmp_path: Path, id: str, why: str):
    before = everything(tmp_path)
    with pytest.raises(PkiError, match=why):
        authority.issue_client(id, tmp_path / "pki")
    assert everything(tmp_path) == before


@given(st.text(max_size=70))
def test_an_id_that_is_taken_is_one_plain_file_name(id: str):
    try:
        check_id(id)
    except PkiError:
        return
    assert Path(id).name == id
    assert id not in (".", "..")
    assert id.isascii()
    assert 1 <= len(id) <= 64


def test_an_existing_key_is_not_overwritten(authority: Authority, tmp_path: Path):
    authority.issue_client("a", tmp_path, now=NOW)
    before = everything(tmp_path)
    with pytest.raises(PkiError, match="exists already; nothing was changed"):
        authority.issue_client("a", tmp_path, now=NOW)
    assert everything(tmp_path) == before


def test_renewing_replaces_the_pair_of_the_same_name_only(authority: Authority, tmp_path: Path):
    first = authority.issue_client("a", tmp_path, now=NOW)
    again = authority.issue_client("a", tmp_path, renew=True, now=NOW + timedelta(days=300))
    assert again.serial != first.serial
    assert facts_of(load(again.cert)).serial == again.serial
    assert mode(again.key) == 0o600
    (tmp_path / "a.pem").rename(tmp_path / "b.pem")
    (tmp_path / "a-key.pem").rename(tmp_path / "b-key.pem")
    before = everything(tmp_path)
    with pytest.raises(PkiError, match="is the certificate of 'a', not of 'b'"):
        authority.issue_client("b", tmp_path, renew=True)
    (tmp_path / "c-key.pem").write_text("somebody's")
    with pytest.raises(PkiError, match="can't be seen whose key it is"):
        authority.issue_client("c", tmp_path, renew=True)
    (tmp_path / "c-key.pem").unlink()
    assert everything(tmp_path) == before


def test_files_of_two_authorities_are_not_mixed(authority: Authority, tmp_path: Path):
    authority.issue_client("a", tmp_path / "out", now=NOW)
    other = Authority.create(tmp_path / "other", "lab")
    with pytest.raises(PkiError, match="belongs to another authority"):
        other.issue_client("b", tmp_path / "out")
    assert not (tmp_path / "out" / "b.pem").exists()


def test_a_directory_that_can_not_be_written_to_is_left_as_it_was(authority: Authority, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(PkiError, match="can't be made"):
        authority.issue_client("a", tmp_path / "file" / "out", now=NOW)
    # The key is written first; where the certificate then can't be, no half of a pair is left.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ca.pem").symlink_to(tmp_path / "nowhere" / "ca.pem")
    with pytest.raises(PkiError, match="can't be written to"):
        authority.issue_client("a", tmp_path / "out", now=NOW)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ca.pem"]


@pytest.mark.parametrize(
    ("san", "why"),
    [
        ("https://cp:7443", "without scheme, port or path"),
        ("cp:7443", "without the port"),
        ("10.0.0.1:7443", "without the port"),
        ("10.0.0.300", "neither a host name nor an IP address"),
        ("a b", "neither a host name nor an IP address"),
        ("", "neither a host name nor an IP address"),
        ("*.example", "neither a host name nor an IP address"),
        ("bad..name", "neither a host name nor an IP address"),
    ],
)
def test_names_that_no_node_can_dial(authority: Authority, tmp_path: Path, san: str, why: str):
    with pytest.raises(PkiError, match=why):
        authority.issue_server(["good.example", san], tmp_path / "out", "cp-1")
    assert not list((tmp_path / "out").glob("server*"))


def test_a_server_needs_a_name(authority: Authority, tmp_path: Path):
    with pytest.raises(PkiError, match="at least one --san"):
        authority.issue_server([], tmp_path, "cp-1")


@given(st.ip_addresses())
def test_any_address_is_a_name(address):
    assert parse_san(str(address)) == x509.IPAddress(address)
    assert parse_san(f"[{address}]") == x509.IPAddress(address)


@pytest.mark.parametrize("cluster", ["", "a b", "a/b", "x" * 41, "ü"])
def test_cluster_names_that_can_not_stand_in_a_uri(tmp_path: Path, cluster: str):
    with pytest.raises(PkiError, match="cluster name"):
        Authority.create(tmp_path / "pki", cluster)
    assert not (tmp_path / "pki").exists()


def test_no_certificate_outlives_its_authority(authority: Authority, tmp_path: Path):
    late = NOW + timedelta(days=3600)
    issued = authority.issue_client("a", tmp_path, now=late)
    assert issued.not_after == authority.not_after
    with pytest.raises(PkiError, match=r"expired on 2036-11-26 12:00:00 UTC: make a new one"):
        authority.issue_client("b", tmp_path, now=NOW + timedelta(days=3651))
    with pytest.raises(PkiError, match="too short"):
        authority.issue_client("b", tmp_path, 5.0)
    assert not list(tmp_path.glob("b*"))


@given(seconds=st.floats(60, 1e12))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_lifetime_lies_within_the_authoritys(authority: Authority, tmp_path: Path, seconds: float):
    again = (tmp_path / "a.pem").exists()
    issued = authority.issue_client("a", tmp_path, seconds, renew=again, now=NOW)
    assert NOW < issued.not_after <= authority.not_after


def test_loading_what_is_no_authority(authority: Authority, tmp_path: Path):
    with pytest.raises(PkiError, match="there is no authority in"):
        Authority.load(tmp_path / "none")
    other = Authority.create(tmp_path / "other", "lab")
    key = tmp_path / "pki" / "ca-key.pem"
    kept = key.read_bytes()
    key.write_bytes((other.directory / "ca-key.pem").read_bytes())
    with pytest.raises(PkiError, match="is not the key of"):
        Authority.load(tmp_path / "pki")
    key.write_text("nonsense")
    with pytest.raises(PkiError, match="is not an unencrypted private key"):
        Authority.load(tmp_path / "pki")
    key.unlink()
    with pytest.raises(PkiError, match="only where the authority's key is"):
        Authority.load(tmp_path / "pki")
    key.write_bytes(kept)
    issued = authority.issue_client("a", tmp_path, now=NOW)
    (tmp_path / "pki" / "ca.pem").write_bytes(issued.cert.read_bytes())
    key.write_bytes(issued.key.read_bytes())
    with pytest.raises(PkiError, match="is not an authority's certificate"):
        Authority.load(tmp_path / "pki")
