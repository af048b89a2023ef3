"""What is likely wrong when TLS fails, and what to do: pure functions from facts to words.

In TLS 1.3 a client that the server refuses sees a successful handshake and then the end of the connection, most
often without any alert. What it can still say is what its own certificate and clock make likely.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from datetime import datetime

from llmgw.pki.certificate import CertificateFacts, in_words
from llmgw.pki.contexts import Identity, authority_of, issuer_of

# Of OpenSSL's x509_vfy.h: `ssl` gives the number, and its text differs between versions.
NOT_YET_VALID = 9
EXPIRED = 10
HOSTNAME_MISMATCH = 62
ADDRESS_MISMATCH = 64
SELF_SIGNED = 18
UNKNOWN_ROOT = 19
UNKNOWN_ISSUER = frozenset({2, 7, SELF_SIGNED, UNKNOWN_ROOT, 20, 21, 30})
SHOWED_NONE = "showed no certificate: agents and gateways need one (`llmgw ctl cert issue-client NODE`)"
WRONG_PURPOSE = frozenset({24, 26, 79})

_PLAIN_TEXT = frozenset(
    {"HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"}
)


def own_certificate(identity: Identity, now: datetime) -> str | None:
    """What is wrong with the own certificate as far as this machine can see; None: nothing."""
    own, cert = identity.own, identity.files.cert
    if identity.lacks_issuer(identity.chain):
        return (
            f"the certificate {cert} was issued by {issuer_of(own)}, whose own certificate is not in that file: "
            f"nothing leads from it to the authority in {identity.files.ca} ({authority_of(identity.authority)}). "
            "The file must hold the certificate followed by its issuer's: append issuer.pem, which lies beside the "
            f"control plane's ca.pem, or have {own.common_name!r} issued anew "
            f"(`llmgw ctl cert issue-client {own.common_name} --force`)"
        )
    if not identity.issued_here:
        return (
            f"the certificate {cert} was issued by {issuer_of(own)}, not by the authority in "
            f"{identity.files.ca} ({authority_of(identity.authority)}): "
            f"have {own.common_name!r} issued by the cluster's own authority (`llmgw ctl cert issue-client`)"
        )
    if own.not_after <= now:
        return (
            f"the certificate {cert} expired on {in_words(own.not_after)} (this machine's clock says {in_words(now)}): "
            f"issue a new one with `llmgw ctl cert issue-client {own.common_name} --force`"
        )
    if own.not_before > now:
        return (
            f"the certificate {cert} is not valid before {in_words(own.not_before)}, and this machine's clock says "
            f"{in_words(now)}: correct the clock (`timedatectl`), or issue the certificate anew"
        )
    return None


def early_end(server: str, identity: Identity, now: datetime, error: BaseException | None = None) -> str:
    """The server ended the connection after the handshake and before a welcome: why it probably did."""
    alert = _alert(error)
    problem = own_certificate(identity, now)
    if problem is not None:
        return f"{server} closed the connection: {problem}"
    own = identity.own
    said = f" (it said: {alert})" if alert else ""
    return (
        f"{server} closed the connection before a welcome{said}. The certificate {identity.files.cert} "
        f"({own.common_name}, valid {in_words(own.not_before)} to {in_words(own.not_after)}) looks right by this "
        f"machine's clock ({in_words(now)}): compare the server's clock, see whether it uses the same authority "
        f"(ours is {authority_of(identity.authority)}), "
        "and read the control plane's log, which says why"
    )


def not_for(server: str, wanted: str, shown: Sequence[CertificateFacts]) -> str:
    """A server's certificate does not have the name or the address that was dialled."""
    offered = ", ".join(shown[0].names if shown else ()) or "none that could be read"
    return (
        f"the certificate of {server} is not for {wanted!r}; it is for: {offered}. Dial one of those names, or "
        f"issue the server's certificate with `llmgw ctl cert issue-server --san {wanted} …`"
    )


def server_certificate(
    server: str,
    wanted: str,
    error: ssl.SSLCertVerificationError,
    shown: Sequence[CertificateFacts],
    identity: Identity,
    now: datetime,
) -> str:
    """Why a server's certificate was not accepted. ``shown``: it and what came with it; empty: nobody could look."""
    code = error.verify_code
    presented = shown[0] if shown else None
    clock = f"this machine's clock says {in_words(now)}"
    if code in (HOSTNAME_MISMATCH, ADDRESS_MISMATCH):
        return not_for(server, wanted, shown)
    if code == EXPIRED:
        when = f" on {in_words(presented.not_after)}" if presented else ""
        return (
            f"the certificate of {server} expired{when} ({clock}): renew it on the control plane with "
            "`llmgw ctl cert issue-server --force`, or correct this machine's clock"
        )
    if code == NOT_YET_VALID:
        when = f" before {in_words(presented.not_before)}" if presented else ""
        return f"the certificate of {server} is not valid{when or ' yet'}, and {clock}: one of the two clocks is wrong"
    if code in UNKNOWN_ISSUER:
        return _unknown_issuer(server, shown, identity)
    if code in WRONG_PURPOSE:
        name = f" ({presented.common_name!r})" if presented else ""
        return f"the certificate of {server}{name} is not a server's: it was made for a client; use issue-server"
    return f"the certificate of {server} was not accepted: {error.verify_message or error}"


def _unknown_issuer(server: str, shown: Sequence[CertificateFacts], identity: Identity) -> str:
    ours = f"the authority in {identity.files.ca} ({authority_of(identity.authority)})"
    if not shown:
        return (
            f"nothing leads from the certificate of {server} to {ours}, and it could not be looked at: this is "
            "another cluster's server, or the authority was made anew (copy the right ca.pem here), or the server does "
            "not send the certificate of its issuer (the file of its `tls.cert` must hold both)"
        )
    issuer = issuer_of(shown[0])
    if identity.lacks_issuer(shown):
        return (
            f"the certificate of {server} was issued by {issuer}, and the server does not send that issuer's own "
            f"certificate: nothing leads from it to {ours}. The file of the server's `tls.cert` must hold the "
            "certificate followed by its issuer's: append issuer.pem, which lies beside the control plane's ca.pem, or "
            "issue the certificate anew with `llmgw ctl cert issue-server --force`. Where that issuer is another "
            "cluster's of the same name, copy the right ca.pem here"
        )
    return (
        f"the certificate of {server} was issued by {issuer}, not by {ours}: this is another cluster's server, or the "
        "authority was made anew; copy the right ca.pem here"
    )


def client_failure(error: BaseException, identity: Identity, now: datetime) -> str:
    """Why a client's TLS handshake failed, for the server's log. ``identity`` is the server's."""
    ours = authority_of(identity.authority)
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == EXPIRED:
            return (
                f"its certificate has expired (this machine's clock says {in_words(now)}): "
                "issue a new one with `llmgw ctl cert issue-client NODE --force`"
            )
        if error.verify_code == NOT_YET_VALID:
            return (
                f"its certificate is not valid yet (this machine's clock says {in_words(now)}): "
                "compare this machine's clock with that of the machine which issued it"
            )
        if error.verify_code in (SELF_SIGNED, UNKNOWN_ROOT):
            return (
                f"its certificate is from another authority than ours ({ours}): "
                "issue one with `llmgw ctl cert issue-client NODE`"
            )
        if error.verify_code in UNKNOWN_ISSUER:
            # TLS hands out no certificate that it did not accept: only the client can see which of the two it is.
            return (
                f"nothing leads from its certificate to our authority ({ours}): it is from another one (issue one with "
                "`llmgw ctl cert issue-client NODE`), or the file of its `tls.cert` lacks the certificate of its "
                "issuer after its own; its own log says which"
            )
        if error.verify_code in WRONG_PURPOSE:
            return "its certificate is not made for clients: issue one with `llmgw ctl cert issue-client NODE`"
        return f"its certificate was not accepted: {error.verify_message or error}"
    if isinstance(error, ssl.SSLError):
        return _client_protocol_failure(error, identity)
    if isinstance(error, TimeoutError) or "longer than" in str(error):
        return "it did not finish the TLS handshake in time"
    return (
        "it went away during the TLS handshake: most likely it does not accept this server's certificate, "
        f"{_offered(identity)}; its own log says why"
    )


def _client_protocol_failure(error: ssl.SSLError, identity: Identity) -> str:
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"it {SHOWED_NONE}"
    if reason in _PLAIN_TEXT:
        return "it does not speak TLS: agents must dial https://…; this port is not for clients of the API"
    if reason in ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE"):
        return "it speaks only a TLS version older than 1.2"
    if "ALERT" in reason:
        alert = reason.replace("_", " ").lower()
        return f"it does not accept this server's certificate, {_offered(identity)} ({alert}); its own log says why"
    return f"its TLS handshake failed: {reason.replace('_', ' ').lower()}"


def plain_text_server(server: str, error: ssl.SSLError) -> str | None:
    """Words where what answers on the port does not speak TLS at all; None for any other failure."""
    if error.reason not in _PLAIN_TEXT:
        return None
    return (
        f"{server} does not speak TLS: some other server has that port (the client's or the admin port?); "
        "agents dial the address of `listen.agents`, 7443 by default"
    )


def _alert(error: BaseException | None) -> str:
    """The alert that ended the connection, as OpenSSL names it, in lower case; empty where there was none."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and error.reason and "ALERT" in error.reason:
            return error.reason.split("ALERT_", 1)[-1].replace("_", " ").lower()
        error = error.__cause__ or error.__context__
    return ""


def _offered(identity: Identity) -> str:
    return f"which is for {', '.join(identity.own.names) or 'no address at all'}"
