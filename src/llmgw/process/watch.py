"""Waiting for the end of a process that need not be a child. Apart from ``identity``: the reaper has no event loop."""

from __future__ import annotations

import asyncio
import os

from llmgw.process.identity import Identity, alive, open_pidfd

_LOOK_S = 0.2


async def gone(identity: Identity) -> None:
    """Return as soon as this process no longer runs."""
    try:
        fd = open_pidfd(identity)
    except OSError:  # out of descriptors: look now and then instead
        await _look_until_gone(identity)
        return
    if fd is None:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _look_until_gone(identity: Identity) -> None:
    while True:
        if not alive(identity):
            return
        await asyncio.sleep(_LOOK_S)
