"""What goes wrong with the network, in words that say where and what to do."""

from __future__ import annotations

import errno
import socket
import ssl
from urllib.parse import urlsplit

import aiohttp

from llmgw.agent.fetch.artifact import FetchFailed

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


def explain(error: Exception, url: str, proxy: str | None = None) -> Broken | FetchFailed:
    """The error to raise for a request of ``url`` that got no answer, or lost it."""
    host = host_of(url)
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError | ssl.SSLError):
        return FetchFailed(_tls(error, host))
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


def _tls(error: Exception, host: str) -> str:
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {host} is not trusted here ({inner.verify_message}): name the authority that "
            "signed it in SSL_CERT_FILE, or for a package index in pip's configuration (cert)"
        )
    reason = getattr(inner, "reason", None) or str(inner)
    return f"no TLS with {host} ({reason}): is it an https:// address?"


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
