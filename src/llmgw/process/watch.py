"""Waiting for the end of a process that need not be a child. Apart from ``identity``: the reaper has no event loop."""

from __future__ import annotations

import asyncio
import os

from llmgw.process.identity import Identity, open_pidfd


async def gone(identity: Identity) -> None:
    """Return as soon as this process no longer runs."""
    fd = open_pidfd(identity)
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
