"""Why a server could not be reached, in words that say what to do: from the exception that aiohttp raised."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from llmgw.link.course import ServerAddress
from llmgw.pki.certificate import CertificateFacts, facts_of
from llmgw.pki.contexts import ClientIdentity, Identity, probe_context
from llmgw.pki.diagnose import early_end, plain_text_server, server_certificate

PROBE_S = 5.0
_ODD = (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)
"""How a certificate that anybody may have made can fail to be read."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``key`` is the same for the same cause, whatever times or counts stand in ``words``."""

    key: str
    words: str


async def explain(
    server: ServerAddress, error: BaseException, identity: Identity, files: ClientIdentity, *, greeted: bool
) -> Failure:
    """Why a connection failed. ``greeted``: TLS and the upgrade had succeeded."""
    now = datetime.now(UTC)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return await _certificate(server, error.certificate_error, identity, files, now)
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return _tls(server, error, identity, now)
    if isinstance(error, aiohttp.ClientConnectorError):
        return _unreachable(server, error.os_error)
    if isinstance(error, aiohttp.WSServerHandshakeError):
        return _no_stream(server, error.status)
    if isinstance(error, TimeoutError):
        return Failure(
            "timeout", f"{server.url} did not answer in time: is it reachable from here, and not overloaded?"
        )
    if greeted and not isinstance(error, ssl.SSLError):
        return Failure("broke", f"the connection to {server.url} broke: {error or type(error).__name__}")
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | OSError):
        return Failure(f"early-end-{identity.issued_here}", early_end(server.url, identity, now, error))
    return Failure(type(error).__name__, f"{server.url} can't be dialled: {error or type(error).__name__}")


def unreachable(server: ServerAddress, error: BaseException) -> str:
    """The same, where there is no identity yet that would explain more."""
    if isinstance(error, aiohttp.ClientConnectorSSLError) and isinstance(error.os_error, ssl.SSLError):
        return plain_text_server(server.url, error.os_error) or f"the TLS handshake with {server.url} failed: {error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return _unreachable(server, error.os_error).words
    if isinstance(error, TimeoutError):
        return f"{server.url} did not answer in time: is it reachable from here, and not overloaded?"
    return f"the connection to {server.url} broke: {error or type(error).__name__}"


async def _certificate(
    server: ServerAddress, error: Exception, identity: Identity, files: ClientIdentity, now: datetime
) -> Failure:
    if not isinstance(error, ssl.SSLCertVerificationError):
        return Failure("certificate", f"the certificate of {server.url} was not accepted: {error}")
    shown = await look_at(server, probe_context(files))
    words = server_certificate(server.url, server.host, error, shown, identity, now)
    return Failure(f"certificate-{error.verify_code}-of-{len(shown)}", words)


async def look_at(server: ServerAddress, context: ssl.SSLContext) -> tuple[CertificateFacts, ...]:
    """The certificate that was not accepted and those sent along, so that the words can name what they say.

    Nothing is sent. Empty where it can't be done.
    """
    with suppress(OSError, TimeoutError, *_ODD):
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(
                server.host, server.port, ssl=context, server_hostname=server.host
            )
            try:
                return _shown(writer.get_extra_info("ssl_object"))
            finally:
                writer.transport.abort()
    return ()


def _shown(tls: Any) -> tuple[CertificateFacts, ...]:
    # Public from Python 3.13 on. There is no other way: OpenSSL has one code for an authority that it does not know
    # and for an issuer that was not sent along.
    chain = tls._sslobj.get_unverified_chain() or ()
    return tuple(facts_of(x509.load_pem_x509_certificate(each.public_bytes().encode())) for each in chain)


def _tls(server: ServerAddress, error: aiohttp.ClientConnectorSSLError, identity: Identity, now: datetime) -> Failure:
    cause = error.os_error
    if isinstance(cause, ssl.SSLError):
        plain = plain_text_server(server.url, cause)
        if plain is not None:
            return Failure("plain-text", plain)
        if cause.reason and "ALERT" in cause.reason:
            return Failure(f"early-end-{identity.issued_here}", early_end(server.url, identity, now, cause))
    return Failure("tls", f"the TLS handshake with {server.url} failed: {cause}")


def _unreachable(server: ServerAddress, error: OSError) -> Failure:
    where, host = server.url, server.host
    if isinstance(error, socket.gaierror):
        why = f"the name {host!r} can't be resolved ({error.strerror})"
        return Failure("name", f"{where}: {why}: correct the name or the resolver, or write the IP address")
    if isinstance(error, ConnectionRefusedError):
        return Failure(
            "refused", f"{where}: connection refused: nothing listens on port {server.port} of {host}; is it running?"
        )
    if isinstance(error, ConnectionResetError):
        return Failure("reset", f"{where} closed the connection in the middle of the TLS handshake")
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return Failure("unreachable", f"{where}: {host} can't be reached from here (no route): check the network")
    return Failure(f"errno-{error.errno}", f"{where} can't be reached: {error.strerror or error}")


def _no_stream(server: ServerAddress, status: int) -> Failure:
    return Failure(
        f"http-{status}",
        f"{server.url} answered HTTP {status} instead of opening the stream: this is not the port for agents "
        "(`listen.agents`), or not llmgw's control plane",
    )
