"""One connection to a control plane as it is dialled: by the identity that the files hold at that moment."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import structlog

from llmgw.link.course import Ended, ServerAddress
from llmgw.link.failures import explain
from llmgw.link.sockets import Sockets
from llmgw.link.wire import MAX_FRAME_BYTES, close_reason
from llmgw.pki.contexts import ClientIdentity, Identity, client_context
from llmgw.pki.names import IdentityError

PATH = "/v1/stream"
CONNECT_S = 10.0
CLOSE_S = 1.0

log = structlog.get_logger("llmgw.link")


@dataclass(frozen=True, slots=True)
class Line:
    """An open connection, on which nothing has been said yet; to be closed by whoever holds it."""

    server: ServerAddress
    http: aiohttp.ClientSession
    sockets: Sockets
    ws: aiohttp.ClientWebSocketResponse
    identity: Identity

    async def close(self, why: str) -> None:
        try:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.ws.close(message=close_reason(why))
        finally:
            await self.http.close()
            await self.sockets.end()


class Dialling:
    """Dials by the files of ``tls``, which are read again whenever they changed."""

    def __init__(self, tls: ClientIdentity) -> None:
        self._tls = tls
        self._contexts = Contexts(tls)

    async def dial(self, server: ServerAddress) -> Line | Ended:
        """Ended: it came to no connection, and why."""
        try:
            context, identity = self._contexts.current()
        except IdentityError as error:
            return Ended("identity", str(error))
        sockets = Sockets()
        connector = aiohttp.TCPConnector(ssl=context, force_close=True, socket_factory=sockets.make)
        http = aiohttp.ClientSession(connector=connector, trust_env=False)
        try:
            async with asyncio.timeout(CONNECT_S):
                ws = await http.ws_connect(server.url + PATH, autoping=False, max_msg_size=MAX_FRAME_BYTES, compress=0)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await http.close()
            await sockets.end()
            return await self.failure(server, error, identity, greeted=False)
        except BaseException:
            await http.close()
            await sockets.end()
            raise
        return Line(server, http, sockets, ws, identity)

    async def failure(self, server: ServerAddress, error: BaseException, identity: Identity, *, greeted: bool) -> Ended:
        failure = await explain(server, error, identity, self._tls, greeted=greeted)
        return Ended(failure.key, failure.words)


class Contexts:
    """One TLS context as long as the files stay the same; where new ones can't be used, the old one goes on."""

    def __init__(self, files: ClientIdentity) -> None:
        self._files = files
        self._stamp: object = None
        self._made: tuple[ssl.SSLContext, Identity] | None = None

    def current(self) -> tuple[ssl.SSLContext, Identity]:
        """Raises IdentityError where there never was one that could be used."""
        stamp = self._stamp_now()
        if self._made is not None and stamp == self._stamp:
            return self._made
        try:
            self._made = client_context(self._files)
        except IdentityError as error:
            if self._made is None:
                raise
            log.warning("the new certificate can't be used; going on with the old one", why=str(error))
        self._stamp = stamp
        return self._made

    def _stamp_now(self) -> object:
        try:
            stats = [path.stat() for path in (self._files.ca, self._files.cert, self._files.key)]
        except OSError as error:
            return (error.errno, error.filename)
        return [(stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats]
