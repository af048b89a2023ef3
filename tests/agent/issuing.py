"""A control plane's side of joining, alone: an HTTP server over real TLS that issues by a real issuing key.

It keeps every byte that clients send, as it comes out of TLS, and can lose answers.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509

from llmgw.pki.authority import Authority
from llmgw.pki.certificate import facts_of, facts_of_der
from llmgw.pki.issuer import Issuer, issue_issuer
from llmgw.pki.join_token import JoinToken, authority_hash
from llmgw.pki.signing_request import is_proof, key_hash, read_request, request_der

Handler = Callable[[web.Request], Any]


@dataclass
class Issuing:
    """``lose``: so many answers are cut off before they are sent, though what they say was done."""

    authority: Authority
    issuer: Issuer
    tls: ssl.SSLContext
    lifetime_s: float = 86_400.0
    port: int = 0
    lose: int = 0
    ahead_s: float = 0.0
    """How far its clock is ahead of ours."""
    refuse: tuple[str, str] | None = None
    """Code and message with which everything but the authority is refused."""
    wire: bytearray = field(default_factory=bytearray)
    asked: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    issued: dict[str, str] = field(default_factory=dict)
    """Chains (PEM) by the hash of their key."""
    shown: list[str] = field(default_factory=list)
    """Serials of the certificates that clients showed to /v1/renew."""
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, directory: Path, sans: tuple[str, ...] = ("127.0.0.1", "localhost")) -> Issuing:
        authority = Authority.create(directory / "pki", "lab")
        issuer = issue_issuer(authority, directory / "pki")
        files = authority.issue_server(list(sans), directory / "server", "cp-1")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_OPTIONAL
        return cls(authority, issuer, context)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def roots(self) -> str:
        return self.authority.roots_pem().decode()

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.ahead_s)

    def token(self, node: str = "n1", **changes: Any) -> JoinToken:
        said: dict[str, Any] = {
            "authority_hash": authority_hash(self.authority.certificate),
            "id": "token-1",
            "secret": self.secret,
            "node": node,
            "addresses": (self.url,),
        }
        return JoinToken(**said | changes)

    def sign(self, node: str, csr: str) -> str:
        """The chain for a request; the same one for the same key."""
        key = read_request(csr)
        chain = self.issued.get(key_hash(key))
        if chain is None:
            chain = self.issuer.sign_node(node, key, self.lifetime_s, self.now()).chain
            self.issued[key_hash(key)] = chain
        return chain

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Issuing]:
        app = web.Application(middlewares=[self._around])
        app.router.add_get("/v1/authority", self._authority)
        app.router.add_post("/v1/join", self._join)
        app.router.add_post("/v1/renew", self._renew)
        app.router.add_post("/v1/recover/nonce", self._nonce)
        app.router.add_post("/v1/recover", self._recover)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        assert runner.server is not None
        make = runner.server
        server = await asyncio.get_running_loop().create_server(
            lambda: Recording(make(), self.wire), "127.0.0.1", self.port, ssl=self.tls
        )
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()
            await runner.cleanup()

    # -- what it answers

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.refuse is not None and request.path != "/v1/authority":
            code, message = self.refuse
            return web.json_response({"error": {"message": message, "type": "identity", "code": code}}, status=403)
        if request.method == "POST":
            self.bodies.append(await request.json())
        answer: web.StreamResponse = await handler(request)
        if self.lose and request.path in ("/v1/join", "/v1/renew", "/v1/recover"):
            self.lose -= 1
            assert request.transport is not None
            request.transport.abort()
        return answer

    async def _authority(self, request: web.Request) -> web.Response:
        return web.json_response({"ca": self.roots, "time": self.now().isoformat()})

    async def _join(self, request: web.Request) -> web.Response:
        body = self.bodies[-1]
        if body["secret"] != self.secret:
            return web.json_response({"error": {"message": "no such token", "code": "token_unknown"}}, status=403)
        return self._grant(body["node"], body["csr"])

    async def _renew(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        der = request.transport.get_extra_info("ssl_object").getpeercert(True)
        if der is None:
            return web.json_response({"error": {"message": "no certificate", "code": "identity"}}, status=403)
        facts = facts_of_der(der)
        self.shown.append(facts.serial)
        return self._grant(facts.common_name, self.bodies[-1]["csr"])

    async def _nonce(self, request: web.Request) -> web.Response:
        return web.json_response({"nonce": f"nonce-for-{self.bodies[-1]['serial']}"})

    async def _recover(self, request: web.Request) -> web.Response:
        body = self.bodies[-1]
        old = x509.load_pem_x509_certificate(body["certificate"].encode())
        facts = facts_of(old)
        assert body["nonce"] == f"nonce-for-{facts.serial}"
        assert facts.not_after <= self.now()
        message = body["nonce"].encode() + request_der(body["csr"])
        assert is_proof(old, base64.b64decode(body["signature"]), message)
        return self._grant(facts.common_name, body["csr"])

    def _grant(self, node: str, csr: str) -> web.Response:
        chain = self.sign(node, csr)
        return web.json_response(
            {
                "certificate": chain,
                "ca": self.roots,
                "node": node,
                "cluster": "lab",
                "servers": [self.url],
                "labels": self.labels,
            }
        )


class Recording(asyncio.Protocol):
    """Hands everything on, and keeps what came in."""

    def __init__(self, inner: Any, wire: bytearray) -> None:
        self._inner = inner
        self._wire = wire

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._wire += data
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        answer: bool | None = self._inner.eof_received()
        return answer

    def connection_lost(self, error: BaseException | None) -> None:
        self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
