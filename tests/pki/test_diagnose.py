"""Words for what can't be brought about over a socket here, or only with another OpenSSL."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llmgw.pki.authority import Authority
from llmgw.pki.contexts import Identity, TlsFiles, read_identity
from llmgw.pki.diagnose import client_failure, early_end, own_certificate, plain_text_server, server_certificate

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    issued = Authority.create(tmp_path / "pki", "lab", now=NOW).issue_client("a", tmp_path, 86400.0, now=NOW)
    return read_identity(TlsFiles(issued.ca, issued.cert, issued.key))


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] something")
    error.reason = reason
    return error


def verify_error(code: int, message: str = "") -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = code
    error.verify_message = message
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (tls_error("UNSUPPORTED_PROTOCOL"), "it speaks only a TLS version older than 1.2"),
        (tls_error("SOMETHING_ELSE"), "its TLS handshake failed: something else"),
        (
            tls_error("TLSV1_ALERT_UNKNOWN_CA"),
            "it does not accept this server's certificate, which is for no address at all (tlsv1 alert unknown ca); "
            "its own log says why",
        ),
        (
            verify_error(26),
            "its certificate is not made for clients: issue one with `llmgw ctl cert issue-client NODE`",
        ),
        (verify_error(23, "certificate revoked"), "its certificate was not accepted: certificate revoked"),
        (TimeoutError(), "it did not finish the TLS handshake in time"),
        (
            ConnectionAbortedError("SSL handshake is taking longer than 10 seconds"),
            "it did not finish the TLS handshake in time",
        ),
    ],
)
def test_clients_that_failed(identity: Identity, error: BaseException, words: str):
    assert client_failure(error, identity, NOW) == words


def test_an_alert_is_told_even_where_it_is_the_cause_of_another_error(identity: Identity):
    error = ConnectionError("lost")
    error.__cause__ = tls_error("SSLV3_ALERT_CERTIFICATE_REVOKED")
    words = early_end("https://cp:7443", identity, NOW, error)
    assert words.startswith("https://cp:7443 closed the connection before a welcome (it said: certificate revoked). ")


def test_the_own_certificate_over_time(identity: Identity):
    assert own_certificate(identity, NOW) is None
    late = own_certificate(identity, NOW + timedelta(days=2))
    assert late is not None
    assert "expired on 2026-11-30 12:00:00 UTC (this machine's clock says 2026-12-01 12:00:00 UTC)" in late
    early = own_certificate(identity, NOW - timedelta(hours=1))
    assert early is not None
    assert "is not valid before 2026-11-29 11:55:00 UTC, and this machine's clock says 2026-11-29 11:00:00 UTC" in early


def test_a_server_whose_certificate_could_not_be_looked_at(identity: Identity):
    for code, part in {
        10: "expired (this machine's clock says",
        9: "is not valid yet, and this machine's clock says",
        62: "it is for: none that could be read",
        23: "was not accepted: revoked",
    }.items():
        words = server_certificate("https://cp:7443", "cp", verify_error(code, "revoked"), (), identity, NOW)
        assert part in words


def test_an_issuer_that_is_not_known_of_a_certificate_that_could_not_be_looked_at(identity: Identity):
    words = server_certificate("https://cp:7443", "cp", verify_error(20), (), identity, NOW)
    assert words == (
        f"nothing leads from the certificate of https://cp:7443 to the authority in {identity.files.ca} ('llmgw lab "
        f"authority', key {identity.authority.key_id}), and it could not be looked at: this is another cluster's "
        "server, or the authority was made anew (copy the right ca.pem here), or the server does not send the "
        "certificate of its issuer (the file of its `tls.cert` must hold both)"
    )


def test_what_is_not_plain_text(identity: Identity):
    assert plain_text_server("https://cp:7443", tls_error("TLSV1_ALERT_INTERNAL_ERROR")) is None
    assert plain_text_server("https://cp:7443", tls_error("WRONG_VERSION_NUMBER")) is not None


def test_warnings_before_anything_fails(identity: Identity):
    assert identity.warnings(NOW - timedelta(days=60)) == []
    assert identity.warnings(NOW) == [], "it lives for a day, and is renewed half way through"
    (words,) = identity.warnings(NOW + timedelta(hours=20))
    assert words == f"the certificate {identity.files.cert} expires on 2026-11-30 12:00:00 UTC: renew it before"
    identity.files.key.chmod(0o640)
    assert "is open to others (mode 0640): whoever reads it can be 'a'" in identity.warnings(NOW)[0]
