"""The doors of the agents' port by which nodes get certificates: HTTP in, one JSON object out, whatever happens.

What is decided, and by which rules, is the control plane's (``Joining``). Here is read what somebody sent, of whom
nothing is known yet but that they reached this port.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from aiohttp import web

from llmgw.link.enrolment import AUTHORITY, JOIN, NONCE, RECOVER, RENEW
from llmgw.link.listener import host_port
from llmgw.pki.certificate import PeerIdentity, peer_identity

READ_S = 10.0
"""A request that is not whole by then is given up: nobody may keep a connection open by being slow."""

log = structlog.get_logger("llmgw.link")


class JoinRefused(Exception):
    """What was asked for is not given: ``message`` says why, ``hint`` what to do; ``code`` is stable, for scripts."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.hint = hint

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "code": self.code, "hint": self.hint}}


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """``time`` is the asking machine's clock, RFC 3339; ``csr`` a signing request, PEM. All of it is unproven."""

    id: str
    secret: str = field(repr=False)
    node: str
    csr: str
    time: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewRequest:
    csr: str
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverRequest:
    """``signature``: base64, by the key of ``certificate`` over the nonce and the request's DER."""

    certificate: str
    csr: str
    nonce: str
    signature: str
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A certificate with its issuer's, and the authority: both PEM."""

    certificate: str
    ca: str
    node: str
    cluster: str
    servers: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


class Joining(Protocol):
    """Who decides. ``address`` is host:port of whoever asks. Each may raise JoinRefused."""

    def authority(self) -> Mapping[str, str]:
        """``ca`` (PEM) and ``time``."""

    async def join(self, request: JoinRequest, address: str) -> Given: ...

    async def renew(self, peer: PeerIdentity, request: RenewRequest, address: str) -> Given: ...

    def nonce(self, serial: str) -> str: ...

    async def recover(self, request: RecoverRequest, address: str) -> Given: ...


def add_joining(app: web.Application, joining: Joining) -> None:
    doors = _Doors(joining)
    app.router.add_get(AUTHORITY, _answered(doors.authority))
    app.router.add_post(JOIN, _answered(doors.join))
    app.router.add_post(RENEW, _answered(doors.renew))
    app.router.add_post(NONCE, _answered(doors.nonce))
    app.router.add_post(RECOVER, _answered(doors.recover))


class _Doors:
    def __init__(self, joining: Joining) -> None:
        self._joining = joining

    async def authority(self, _: web.Request) -> Mapping[str, Any]:
        return self._joining.authority()

    async def join(self, request: web.Request) -> Mapping[str, Any]:
        texts = await _texts(request, "id", "secret", "node", "csr", "time", optional=("fingerprint",))
        return _shown(await self._joining.join(JoinRequest(**texts), _address(request)))

    async def renew(self, request: web.Request) -> Mapping[str, Any]:
        peer = _peer(request)
        texts = await _texts(request, "csr", "time")
        return _shown(await self._joining.renew(peer, RenewRequest(**texts), _address(request)))

    async def nonce(self, request: web.Request) -> Mapping[str, Any]:
        texts = await _texts(request, "serial")
        return {"nonce": self._joining.nonce(texts["serial"])}

    async def recover(self, request: web.Request) -> Mapping[str, Any]:
        texts = await _texts(request, "certificate", "csr", "nonce", "signature", "time")
        return _shown(await self._joining.recover(RecoverRequest(**texts), _address(request)))


Door = Callable[[web.Request], Awaitable[Mapping[str, Any]]]


def _answered(door: Door) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            answer = web.json_response(await door(request))
        except JoinRefused as refusal:
            answer = web.json_response(refusal.body(), status=refusal.status)
        except Exception:
            log.exception("a request for a certificate failed", path=request.path)
            words = "a fault of llmgw's own: the control plane's log says which"
            answer = web.json_response(JoinRefused(500, "fault", words).body(), status=500)
        # Each is asked once in a long while: nobody holds a connection, and a descriptor with it.
        answer.force_close()
        return answer

    return handle


async def _texts(request: web.Request, *names: str, optional: tuple[str, ...] = ()) -> dict[str, str]:
    """The named texts of a JSON object; more of them are ignored, so that a newer node can say more."""
    try:
        async with asyncio.timeout(READ_S):
            content = json.loads(await request.read())
    except TimeoutError as error:
        raise JoinRefused(408, "slow", f"the request was not whole within {READ_S:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise JoinRefused(413, "malformed", "the request is larger than any request here needs to be") from error
    except ValueError as error:
        raise JoinRefused(400, "malformed", "the body is no JSON") from error
    if not isinstance(content, dict):
        raise JoinRefused(400, "malformed", "the body is no JSON object")
    texts = {name: content[name] for name in (*names, *optional) if name in content}
    for name in names:
        if not isinstance(texts.get(name), str) or not texts[name]:
            raise JoinRefused(400, "malformed", f"`{name}` is missing, or no text")
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _peer(request: web.Request) -> PeerIdentity:
    tls = request.transport.get_extra_info("ssl_object") if request.transport else None
    certificate = tls.getpeercert(True) if tls is not None else None
    if certificate is None:
        hint = "a certificate that expired is renewed by /v1/recover, a node without one joins with a token"
        raise JoinRefused(401, "no_certificate", "renewing needs the certificate in use, and none was shown", hint)
    if tls is not None and tls.session_reused:
        # What was revoked or has expired since would be passed over.
        raise JoinRefused(403, "resumed", "resumed TLS sessions are not taken; connect anew")
    return peer_identity(certificate)


def _address(request: web.Request) -> str:
    return host_port(request.transport.get_extra_info("peername")) if request.transport else ""


def _shown(given: Given) -> Mapping[str, Any]:
    return {
        "certificate": given.certificate,
        "ca": given.ca,
        "node": given.node,
        "cluster": given.cluster,
        "servers": list(given.servers),
        "labels": dict(given.labels),
    }
