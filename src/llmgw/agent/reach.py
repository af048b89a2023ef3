"""Waits until something takes connections: an engine that dials once ends where nobody answers yet."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from llmgw.engines.base import Listener

LOOK_AGAIN_S = 0.25
CONNECT_S = 5.0


async def reached(listener: Listener) -> str:
    """One try. Empty where it takes connections; else what came instead, in words."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(listener.host, listener.port)
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ""
