"""Nothing of a session stays behind: after many both ends are as large as after a few, each with one context."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from llmgw.pki.contexts import client_context

from .ends import Pki

AT_A_TIME = 8
ROOM_BYTES = 2**20
"""A context for each of the sessions takes twice as much and more."""


def held() -> tuple[int, int]:
    """TLS contexts, and open files. Those that earlier tests left are counted too."""
    gc.collect()
    contexts = sum(isinstance(thing, ssl.SSLContext) for thing in gc.get_objects())
    return contexts, sum(1 for _ in Path("/proc/self/fd").iterdir())


class Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of the C library."""

    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost
    _fields_ = tuple((name, ctypes.c_size_t) for name in (*"0123", "hblkhd", *"56", "uordblks", *"89"))


def in_use_bytes() -> int:
    """What OpenSSL and all others hold of the C library's heaps. What a large process keeps of freed pages, and
    whatever pytest records of each line of a log, is none of it."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


async def stays_as_it_is(times: Callable[[int], Awaitable[None]], warm: int, measured: int) -> None:
    await times(warm)
    (contexts, files), before_bytes = held(), in_use_bytes()
    await times(measured)
    contexts_after, files_after = held()
    assert contexts_after <= contexts + 1
    assert files_after <= files + AT_A_TIME
    grown_bytes = in_use_bytes() - before_bytes
    assert grown_bytes < ROOM_BYTES, f"{grown_bytes / 2**20:.1f} MiB more after {measured} sessions"


async def test_a_server_after_many_handshakes(serve, pki: Pki):
    """Agents that come and go, or whoever knocks at the door for days."""
    server, _ = await serve()
    context, _ = client_context(pki.node("a"))

    async def shake(count: int) -> None:
        for _ in range(count):
            _, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=context, server_hostname="127.0.0.1"
            )
            writer.transport.abort()

    async def shakes(count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(shake(count // AT_A_TIME))

    await stays_as_it_is(shakes, 200, 1000)


async def test_both_ends_after_many_sessions(serve, dial):
    """One agent that loses its stream again and again reads its certificates anew only where they changed."""
    server, told = await serve()
    dial(server.port, "a", reconnect_base_s=0.001, reconnect_max_s=0.002)

    async def sessions(count: int) -> None:
        for _ in range(count):
            ((peer,),) = await told.wait("welcomed")
            told.told.clear()
            peer.end("to be dialled anew")

    await stays_as_it_is(sessions, 30, 150)
