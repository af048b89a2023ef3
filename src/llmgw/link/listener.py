"""Accepts TCP connections and does the TLS handshake itself, so that every failed one is told, with its address.

``asyncio.start_server`` swallows failed handshakes: a node with a wrong certificate would leave no trace here.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import structlog

from llmgw.process.ports import port_holder

HANDSHAKE_S = 10.0
BACKLOG = 1024
ACCEPT_AGAIN_S = 1.0
MAX_HANDSHAKES = 256
"""Connections in their handshake at once; more wait in the kernel's queue."""

log = structlog.get_logger("llmgw.link")


class ListenError(Exception):
    """The address can't be listened on; the message says why, and who holds it where that can be seen."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ListenError in words."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"can't listen on {host}:{port}: {host!r} is not an address of this machine") from error
    family, _, _, _, address = found[0]
    try:
        listener = socket.create_server(
            (str(address[0]), int(address[1])),
            family=family,
            backlog=BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        raise ListenError(_why_not(host, port, error)) from error
    listener.setblocking(False)
    return listener


class Listener:
    """Hands each connection whose handshake succeeded to a protocol of ``factory``."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        factory: Callable[[], asyncio.BaseProtocol],
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        self._sock = sock
        self._context = context
        self._factory = factory
        self._on_failure = on_failure
        self._slots = asyncio.Semaphore(MAX_HANDSHAKES)
        self._task: asyncio.Task[None] | None = None

    def use(self, context: ssl.SSLContext) -> None:
        """From the next connection on."""
        self._context = context

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="link listener")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._sock.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as handshakes:
            while True:
                await self._slots.acquire()
                accepted = await self._accept()
                handshakes.create_task(self._shake_hands(*accepted))

    async def _accept(self) -> tuple[socket.socket, str]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("no connection can be accepted", why=str(error), do="raise the limit of open files")
                await asyncio.sleep(ACCEPT_AGAIN_S)
            else:
                return sock, host_port(address)

    async def _shake_hands(self, sock: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            if not await _speaks(sock):
                # A probe of the port (a load balancer's, say) connects and says nothing: that is no failure.
                sock.close()
                return
            await loop.connect_accepted_socket(
                self._factory, sock, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=1.0
            )
        except Exception as error:
            self._on_failure(address, error)
        finally:
            self._slots.release()


async def _speaks(sock: socket.socket) -> bool:
    """Wait for the first byte, and leave it there; False where the other end closed without one."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await readable.wait()
    except BaseException:
        loop.remove_reader(sock)
        sock.close()
        raise
    loop.remove_reader(sock)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def host_port(address: object) -> str:
    """A socket's address as people read it."""
    if not isinstance(address, tuple):
        return str(address)
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why_not(host: str, port: int, error: OSError) -> str:
    where = f"can't listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        by = f" by {holder}" if holder else ""
        return f"{where}: the port is taken{by}; stop that process, or choose another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{where}: {host} is not an address of this machine"
    if error.errno == errno.EACCES:
        return f"{where}: ports below 1024 need root; choose another port"
    return f"{where}: {error.strerror or error}"
