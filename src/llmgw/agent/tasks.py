"""Tasks whose owner keeps them for long: one that ends by a fault says so at once, and not when it is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import structlog

log = structlog.get_logger()


def begin(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    """The caller keeps the task, and ends and awaits it."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_say_fault)
    return task


def _say_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a fault of the agent's own", task=task.get_name(), exc_info=error)
