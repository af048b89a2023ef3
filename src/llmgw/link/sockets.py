"""The sockets of an HTTP client, seen gone when it is done with.

A connection over TLS that is closed waits for the other side's goodbye, for half a minute and owned by nobody. A server
that hangs must leave no socket behind here.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from aiohttp.connector import AddrInfoType

_LOOKS = 200
_LOOK_S = 0.005


class Sockets:
    """``make`` is what a connector makes its sockets by."""

    def __init__(self) -> None:
        self._made: list[socket.socket] = []

    def make(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        self._made.append(made)
        return made

    async def end(self) -> None:
        """Once the client is closed: ends each connection below TLS, and returns when its socket is closed."""
        for made in self._made:
            with suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
        for _ in range(_LOOKS):
            if all(made.fileno() == -1 for made in self._made):
                return
            await asyncio.sleep(_LOOK_S)
