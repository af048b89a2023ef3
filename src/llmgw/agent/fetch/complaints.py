"""What goes wrong with the network, in words that say where and what to do."""

from __future__ import annotations

import errno
import socket
import ssl
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

import aiohttp

from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.pki.certificate import CertificateFacts, in_words
from llmgw.pki.diagnose import (
    ADDRESS_MISMATCH,
    EXPIRED,
    HOSTNAME_MISMATCH,
    NOT_YET_VALID,
    SELF_SIGNED,
    UNKNOWN_ISSUER,
    UNKNOWN_ROOT,
)

_TRUST = "in SSL_CERT_FILE, or for a package index in pip's configuration (cert)"
_ERRNO = {
    errno.ECONNREFUSED: "the connection was refused",
    errno.ENETUNREACH: "the network is unreachable",
    errno.EHOSTUNREACH: "there is no route to it",
    errno.ECONNRESET: "it broke the connection",
    errno.EPIPE: "it broke the connection",
    errno.ETIMEDOUT: "it did not take the connection in time",
}


class Broken(Exception):
    """The network or the server failed, and may do better at the next try; the message says how."""


def shown(url: str) -> str:
    """A URL without what may be secret in it: no user, no password, no query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL that can't be read"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else parts.path


def host_of(url: str) -> str:
    """Who serves ``url``, for people: ``mirror.lab:8443``, or the file's path."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def explain(
    error: Exception, url: str, proxy: str | None = None, chain: Sequence[CertificateFacts] = ()
) -> Broken | FetchFailed:
    """The error to raise for a request of ``url`` that got no answer, or lost it.

    ``chain``: the server's certificate and those it sends along, where it was not accepted and could be looked at.
    """
    host = host_of(url)
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError | ssl.SSLError):
        return FetchFailed(_tls(error, url, chain))
    if isinstance(error, aiohttp.ClientHttpProxyError):
        hint = ": look at the credentials in HTTPS_PROXY" if error.status == 407 else ""
        return FetchFailed(f"the proxy {_proxy(proxy)} answered {error.status} ({error.message}) for {host}{hint}")
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return Broken(f"the proxy {_proxy(proxy)} can't be reached ({_os(error.os_error)}): look at HTTPS_PROXY")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Broken(f"{host} can't be reached: {_os(error.os_error)}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return Broken(f"{host} closed the connection without an answer")
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError):
        return Broken(f"{host} broke the connection")
    if isinstance(error, aiohttp.ClientError):
        return Broken(f"{host} answers with what is not HTTP: {str(error) or type(error).__name__}"[:300])
    if isinstance(error, OSError):
        return Broken(f"{host}: {_os(error)}")
    return FetchFailed(f"{shown(url)} can't be asked: {error}")


def refusal(status: int, reason: str, what: str, url: str) -> Broken | FetchFailed:
    """What an HTTP status that brings nothing means for ``what``."""
    said = f"{host_of(url)} answered {status} ({reason.strip() or 'no reason'}) when asked for {what}"
    if status in (408, 425, 429) or status >= 500:
        return Broken(said)
    if status in (401, 403):
        return FetchFailed(f"{said}: it wants credentials, or others than it was given")
    if status == 407:
        return FetchFailed(f"{said}: the proxy wants credentials (HTTPS_PROXY)")
    if status in (404, 410):
        return FetchFailed(f"{said}: there is no such file at {shown(url)}")
    return FetchFailed(said)


def _tls(error: Exception, url: str, chain: Sequence[CertificateFacts]) -> str:
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return _distrust(inner, url, chain, datetime.now(UTC))
    reason = getattr(inner, "reason", None) or str(inner)
    return f"no TLS with {host_of(url)} ({reason}): is it an https:// address?"


def _distrust(error: ssl.SSLCertVerificationError, url: str, chain: Sequence[CertificateFacts], now: datetime) -> str:
    code, host = error.verify_code, host_of(url)
    clock = f"this machine's clock says {in_words(now)}"
    mend = f"correct the clock (`timedatectl`) if it is wrong, else whoever runs {host} has to renew the certificate"
    if code == EXPIRED:
        # It may be the issuer's, while the server's own is in its life.
        when = next((f" on {in_words(each.not_after)}" for each in chain if each.not_after <= now), "")
        return f"{host} shows a certificate that expired{when}, and {clock}: {mend}"
    if code == NOT_YET_VALID:
        when = next((f" before {in_words(each.not_before)}" for each in chain if each.not_before > now), " yet")
        return f"{host} shows a certificate that is not valid{when}, and {clock}: {mend}"
    if code in (HOSTNAME_MISMATCH, ADDRESS_MISMATCH):
        names = textwrap.shorten(", ".join(chain[0].names), 200, placeholder=" …") if chain else ""
        whose = f"for {names}, not for" if names else "not for"
        return (
            f"the certificate of {host} is {whose} {urlsplit(url).hostname}: correct the address, or see what answers "
            "in its place: a proxy, or a page that wants a login"
        )
    if code in UNKNOWN_ISSUER:
        return _untrusted(code, host, chain)
    return f"the certificate of {host} was not accepted ({error.verify_message}): whoever runs it has to mend that"


def _untrusted(code: int, host: str, chain: Sequence[CertificateFacts]) -> str:
    if code == SELF_SIGNED:
        return (
            f"the certificate of {host} is signed by itself, and not trusted here: if it is the right one, "
            f"name it {_TRUST}"
        )
    last = _last(chain)
    if code == UNKNOWN_ROOT or (last is not None and last is not chain[0]):
        which = f" ({last.issuer!r})" if last is not None else ""
        return (
            f"the certificate of {host} leads to an authority that is not trusted here{which}: if it is the right one, "
            f"name its certificate {_TRUST}"
        )
    # One code for both, and a leaf does not say whether an authority or an intermediate issued it.
    issuer = repr(last.issuer) if last is not None else "somebody"
    return (
        f"the certificate of {host} was issued by {issuer}, not trusted here, and the server sends no certificate of "
        f"that issuer: if it is an authority, name its certificate {_TRUST}; if it is an intermediate of one, whoever "
        f"runs {host} has to have its certificate sent along"
    )


def _last(chain: Sequence[CertificateFacts]) -> CertificateFacts | None:
    """Where the way from the server's certificate, issuer by issuer, ends in what was sent."""
    last = next(iter(chain), None)
    for _ in chain[1:]:
        assert last is not None
        name, key = last.issuer, last.issuer_key_id
        last = next((each for each in chain if each.common_name == name and key in ("", each.key_id)), last)
    return last


def _proxy(proxy: str | None) -> str:
    return shown(proxy) if proxy else "of the configuration"


def _os(error: OSError | None) -> str:
    if isinstance(error, socket.gaierror):
        if error.errno == socket.EAI_AGAIN:
            return "its name can't be resolved: name resolution does not answer"
        return "its name can't be resolved"
    if error is None:
        return "the connection failed"
    return _ERRNO.get(error.errno or 0, (error.strerror or str(error)).lower() or "the connection failed")
