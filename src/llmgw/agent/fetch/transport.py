"""HTTP as downloads and listings need it: proxies and authorities of this machine, redirects that keep secrets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import netrc
import os
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from types import TracebackType

import aiohttp
from yarl import URL

from llmgw.agent.fetch.artifact import Access, FetchFailed
from llmgw.agent.fetch.complaints import Broken, explain, shown
from llmgw.link.course import ServerAddress
from llmgw.link.failures import look_at
from llmgw.link.sockets import Sockets
from llmgw.pki.certificate import CertificateFacts

REDIRECTS = 10
READ_BYTES = 1 << 20
"""What may wait in memory unread, twice: reading goes on while the last piece is written."""

AGENT = "llmgw"
_REDIRECTS = (301, 302, 303, 307, 308)


class Transport:
    """Connections to one source. An async context manager; requests only inside of it."""

    def __init__(self, access: Access, *, patience_s: float = 30.0, decompress: bool = False) -> None:
        self._access = access
        self._patience_s = patience_s
        self._decompress = decompress
        self._session: aiohttp.ClientSession | None = None
        self._sockets = Sockets()
        self._trusting: ssl.SSLContext | None = None

    async def __aenter__(self) -> Transport:
        try:
            # In a thread, and now: it reads files, and SSL_CERT_FILE may have changed since the agent's start.
            context = await asyncio.to_thread(_context, self._access)
        except (OSError, ssl.SSLError) as error:
            raise FetchFailed(_unreadable(self._access, error)) from None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=4, socket_factory=self._sockets.make),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=self._decompress,
            read_bufsize=READ_BYTES,
            max_line_size=32 << 10,
            max_field_size=32 << 10,
            headers={"User-Agent": AGENT, "Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()
        await self._sockets.end()

    @contextlib.asynccontextmanager
    async def get(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer after all redirects, whatever its status; its body is yet to be read.

        ``headers`` go to the host of ``url`` in full; after a redirect to another one, without what authorizes.
        Raises Broken where the next try may fare better, FetchFailed where it will not.
        """
        place = _parse(url)
        asked, sent = place, dict(headers)
        for _ in range(REDIRECTS + 1):
            response = await self._ask(place, sent)
            try:
                if response.status not in _REDIRECTS or "Location" not in response.headers:
                    yield response
                    return
                following = _follow(asked, place, response.headers["Location"])
            finally:
                response.close()
            if following.origin() != place.origin():
                sent = {name: value for name, value in sent.items() if name.lower() not in ("authorization", "cookie")}
            elif following.raw_user is None:
                following = following.with_user(place.user).with_password(place.password)
            place = following
        raise FetchFailed(f"{shown(url)} redirects more than {REDIRECTS} times: look at it with a browser")

    async def _ask(self, place: URL, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        assert self._session is not None
        place, sent = _authorized(place, headers)
        proxy, for_proxy = _proxy(place, self._access)
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._session.get(
                    place,
                    headers=sent,
                    proxy=proxy,
                    proxy_headers=for_proxy,
                    allow_redirects=False,
                    ssl=self._context_for(place),
                )
        except TimeoutError:
            via = f" (through the proxy {shown(str(proxy))})" if proxy is not None else ""
            raise Broken(f"{shown(str(place))}{via} did not answer within {self._patience_s:g} s") from None
        except (aiohttp.ClientError, ssl.SSLError, OSError, ValueError) as error:
            chain = await self._chain(error, place) if proxy is None else ()
            raise explain(error, str(place), str(proxy) if proxy is not None else None, chain) from None

    async def _chain(self, error: Exception, place: URL) -> tuple[CertificateFacts, ...]:
        """What the server shows, where that was not accepted."""
        if not isinstance(error, aiohttp.ClientConnectorCertificateError) or place.host is None or place.port is None:
            return ()
        return await look_at(ServerAddress(place.host, place.port), self._unverified())

    def _context_for(self, place: URL) -> ssl.SSLContext | bool:
        if place.host is None or not {place.host, f"{place.host}:{place.port}"} & set(self._access.trusted_hosts):
            return True
        return self._unverified()

    def _unverified(self) -> ssl.SSLContext:
        if self._trusting is None:
            self._trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._trusting.check_hostname = False
            self._trusting.verify_mode = ssl.CERT_NONE
        return self._trusting


async def read(
    transport: Transport, url: str, headers: Mapping[str, str], *, most_bytes: int, patience_s: float = 30.0
) -> tuple[int, Mapping[str, str], bytes, str]:
    """A whole small answer: status, headers, body, and the URL that it came from. Raises Broken, FetchFailed."""
    async with transport.get(url, headers) as response:
        body = bytearray()
        try:
            async with asyncio.timeout(patience_s):
                async for piece in response.content.iter_chunked(1 << 16):
                    body += piece
                    if len(body) > most_bytes:
                        raise FetchFailed(f"{shown(url)} answers with more than {most_bytes} bytes: it is no listing")
        except TimeoutError:
            raise Broken(f"{shown(url)} stopped in the middle of its answer for {patience_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise explain(error, url) from None
        return response.status, response.headers, bytes(body), str(response.url)


def _parse(url: str) -> URL:
    try:
        place = URL(url, encoded=True)
        usable = place.scheme in ("http", "https") and bool(place.host) and place.port is not None
    except ValueError:
        usable = False
    if not usable:
        raise FetchFailed(f"{shown(url)} is no URL of a file: https://, http:// or file:// is expected")
    return place


def _follow(asked: URL, place: URL, location: str) -> URL:
    """Where a redirect leads. Nobody may lead a request that asked for TLS to where there is none."""
    try:
        following = place.join(URL(location, encoded=True))
        following.origin()
    except ValueError:
        raise FetchFailed(f"{shown(str(place))} redirects to {location[:200]!r}, which is no URL") from None
    if following.scheme == "https" or (following.scheme == "http" and asked.scheme == "http"):
        return following
    raise FetchFailed(
        f"{shown(str(place))} redirects to {shown(str(following))}, which is not encrypted: refused. "
        "Name the place itself as the source, with its sha256"
    )


def _authorized(place: URL, headers: Mapping[str, str]) -> tuple[URL, dict[str, str]]:
    """Credentials of the URL, else of the machine's netrc, as a header: never in a URL that is shown or sent on."""
    sent = dict(headers)
    user, password = place.user, place.password
    bare = place.with_user(None) if place.raw_user is not None or place.raw_password is not None else place
    if "Authorization" in sent:
        return bare, sent
    if user is None and place.host is not None:
        with contextlib.suppress(OSError, netrc.NetrcParseError, KeyError):
            known = netrc.netrc(os.environ.get("NETRC")).authenticators(place.host)
            if known is not None:
                user, password = known[0], known[2]
    if user is not None:
        sent["Authorization"] = basic(user, password or "")
    return bare, sent


def basic(user: str, password: str) -> str:
    """The value of an Authorization header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _proxy(place: URL, access: Access) -> tuple[URL | None, dict[str, str]]:
    """The proxy for this place, and what it is to be sent.

    By ``access``, else by HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY.
    """
    named = access.proxy
    if named is None:
        if place.host is None or urllib.request.proxy_bypass(f"{place.host}:{place.port}"):
            return None, {}
        proxies = urllib.request.getproxies()
        named = proxies.get(place.scheme) or proxies.get("all")
    if not named:
        return None, {}
    try:
        proxy = URL(named if "://" in named else f"http://{named}")
        usable = proxy.scheme in ("http", "https") and bool(proxy.host)
    except ValueError:
        usable = False
    if not usable:
        raise FetchFailed(f"the proxy {shown(named)} can't be used: http:// or https:// is expected (HTTPS_PROXY)")
    if proxy.user is None:
        return proxy, {}
    return proxy.with_user(None), {"Authorization": basic(proxy.user, proxy.password or "")}


def _context(access: Access) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if access.ca is not None:
        context = ssl.create_default_context(
            cafile=None if access.ca.is_dir() else str(access.ca), capath=str(access.ca) if access.ca.is_dir() else None
        )
    if access.client_cert is not None:
        context.load_cert_chain(access.client_cert)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _unreadable(access: Access, error: Exception) -> str:
    named = " and ".join(str(path) for path in (access.ca, access.client_cert) if path is not None)
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"the certificates that this machine names ({named or 'SSL_CERT_FILE'}) can't be read: {why}"
