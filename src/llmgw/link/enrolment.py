"""How a node asks the control planes for its certificates: HTTP on the agents' port, beside the stream.

Nothing but the authority's own certificate is ever taken from a server that was not verified.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
from cryptography import x509

from llmgw.link.course import ServerAddress
from llmgw.link.failures import explain, look_at, unreachable
from llmgw.link.sockets import Sockets
from llmgw.pki.certificate import in_words
from llmgw.pki.chain import certificates_of
from llmgw.pki.contexts import ClientIdentity, Identity
from llmgw.pki.diagnose import ADDRESS_MISMATCH, HOSTNAME_MISMATCH, not_for
from llmgw.pki.names import PkiError

AUTHORITY = "/v1/authority"
JOIN = "/v1/join"
RENEW = "/v1/renew"
RECOVER = "/v1/recover"
NONCE = "/v1/recover/nonce"
LIMIT_S = 20.0
MAX_ANSWER_BYTES = 256 * 1024
SKEW_WORTH_SAYING_S = 30.0

_TRANSPORT = (aiohttp.ClientError, OSError, TimeoutError)


class EnrolmentError(Exception):
    """What was asked for was not given; the message says why and what to do.

    ``code`` is the control plane's where it answered; empty: no answer came, and the next one may have it.
    """

    def __init__(self, words: str, *, code: str = "", reason: ssl.SSLCertVerificationError | None = None) -> None:
        super().__init__(words)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AuthorityAnswer:
    """The roots of a control plane, and its clock."""

    roots: tuple[x509.Certificate, ...]
    time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A certificate as it came back: PEM texts, still to be checked against the key that they are for."""

    certificate: str
    ca: str
    node: str = ""
    cluster: str = ""
    servers: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ours:
    """The own identity, by which failures of TLS are put into words."""

    identity: Identity
    files: ClientIdentity


class Enrolment:
    """Asks one control plane. ``context`` decides whom it is, and what is shown to it."""

    def __init__(self, server: ServerAddress, context: ssl.SSLContext, ours: Ours | None = None) -> None:
        self._server = server
        self._context = context
        self._ours = ours

    async def authority(self) -> AuthorityAnswer:
        """Raises EnrolmentError, here as in all that follow."""
        answer = await self._ask("GET", AUTHORITY, None)
        try:
            roots = certificates_of(_text(answer, "ca"), f"the authority of {self._server.url}")
            moment = datetime.fromisoformat(_text(answer, "time"))
        except (PkiError, ValueError) as error:
            raise EnrolmentError(f"{self._server.url} does not say who its authority is: {error}") from error
        return AuthorityAnswer(roots, moment if moment.tzinfo else moment.replace(tzinfo=UTC))

    async def join(self, *, id: str, secret: str, node: str, csr: str, fingerprint: str) -> Granted:
        body = {"id": id, "secret": secret, "node": node, "csr": csr, "fingerprint": fingerprint, "time": _now()}
        return self._granted(await self._ask("POST", JOIN, body))

    async def renew(self, csr: str) -> Granted:
        """By the current certificate, which the context has to show."""
        return self._granted(await self._ask("POST", RENEW, {"csr": csr, "time": _now()}))

    async def nonce(self, serial: str) -> str:
        """What ``recover`` has to sign for the certificate of this serial; good for a minute and once."""
        return _text(await self._ask("POST", NONCE, {"serial": serial}), "nonce")

    async def recover(self, *, certificate: str, csr: str, nonce: str, signature: str) -> Granted:
        body = {"certificate": certificate, "csr": csr, "nonce": nonce, "signature": signature, "time": _now()}
        return self._granted(await self._ask("POST", RECOVER, body))

    async def _ask(self, method: str, path: str, body: dict[str, str] | None) -> dict[str, Any]:
        sockets = Sockets()
        connector = aiohttp.TCPConnector(ssl=self._context, force_close=True, socket_factory=sockets.make)
        try:
            async with (
                asyncio.timeout(LIMIT_S),
                aiohttp.ClientSession(connector=connector, trust_env=False) as http,
                http.request(method, self._server.url + path, json=body, allow_redirects=False) as response,
            ):
                data = await response.content.read(MAX_ANSWER_BYTES + 1)
                while data and len(data) <= MAX_ANSWER_BYTES and (more := await response.content.read(1 << 16)):
                    data += more
                return self._answer(response.status, data)
        except _TRANSPORT as error:
            raise await self._failed(error) from error
        finally:
            await sockets.end()

    def _answer(self, status: int, data: bytes) -> dict[str, Any]:
        try:
            content = json.loads(data) if len(data) <= MAX_ANSWER_BYTES else None
        except ValueError:
            content = None
        if isinstance(content, dict) and isinstance(error := content.get("error"), dict):
            hint = f" ({error['hint']})" if error.get("hint") else ""
            # A server that fails at it is passed over; one that refuses has spoken for all of them.
            code = str(error.get("code") or f"http_{status}") if status < 500 else ""
            raise EnrolmentError(f"{self._server.url}: {error.get('message') or f'HTTP {status}'}{hint}", code=code)
        if status != 200 or not isinstance(content, dict):
            raise EnrolmentError(
                f"{self._server.url} answered HTTP {status}: this is not the port for agents (`listen.agents`), not "
                "llmgw's control plane, or one of a version that does not issue certificates"
            )
        return content

    async def _not_accepted(self, error: BaseException) -> str:
        server = self._server
        if getattr(error, "verify_code", None) in (HOSTNAME_MISMATCH, ADDRESS_MISMATCH):
            return not_for(server.url, server.host, await look_at(server, unverified()))
        why = getattr(error, "verify_message", "") or str(error)
        return f"the certificate of {server.url} was not accepted: {why}"

    async def _failed(self, error: BaseException) -> EnrolmentError:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            cause = error.certificate_error
            reason = cause if isinstance(cause, ssl.SSLCertVerificationError) else None
            if self._ours is None:
                return EnrolmentError(await self._not_accepted(reason or cause), reason=reason)
        else:
            reason = None
        if self._ours is not None:
            failure = await explain(self._server, error, self._ours.identity, self._ours.files, greeted=False)
            return EnrolmentError(failure.words, reason=reason)
        return EnrolmentError(unreachable(self._server, error))

    def _granted(self, answer: dict[str, Any]) -> Granted:
        servers, labels = answer.get("servers") or [], answer.get("labels") or {}
        return Granted(
            certificate=_text(answer, "certificate"),
            ca=_text(answer, "ca"),
            node=str(answer.get("node") or ""),
            cluster=str(answer.get("cluster") or ""),
            servers=tuple(map(str, servers)) if isinstance(servers, list) else (),
            labels={str(key): str(value) for key, value in labels.items()} if isinstance(labels, dict) else {},
        )


def unverified() -> ssl.SSLContext:
    """Only to ask who the authority is: the answer counts once its hash is that of the token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def trusting(roots_pem: str) -> ssl.SSLContext:
    """Verifies the server by these roots and the dialled name; shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=roots_pem)
    return context


def clocks_differ(theirs: datetime, ours: datetime) -> str:
    """In words, where it is worth saying; empty otherwise."""
    ahead_s = (ours - theirs).total_seconds()
    if abs(ahead_s) < SKEW_WORTH_SAYING_S:
        return ""
    return (
        f"this machine's clock ({in_words(ours)}) is {_span(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} "
        f"the control plane's ({in_words(theirs)})"
    )


def _span(seconds: float) -> str:
    for unit, length_s in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def _text(answer: dict[str, Any], key: str) -> str:
    value = answer.get(key)
    if not isinstance(value, str) or not value:
        raise EnrolmentError(f"the control plane's answer has no `{key}`: it may be of another version")
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
