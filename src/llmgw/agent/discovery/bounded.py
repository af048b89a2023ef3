"""Blocking calls that may never return: a dead mount, wedged firmware, a resolver without a network.

A thread in such a call can't be stopped. So each kind of call has one ``Gate``: it waits for at most
``limit_s``, and while a call hangs, no second one is started: hung calls never pile up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class StillHanging(Exception):
    """The call did not return in time, or an earlier one has not returned yet."""


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Gate:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._hung: threading.Thread | None = None

    def call(self, function: Callable[[], T], limit_s: float) -> T:
        """``function()``, in a thread of its own. Raises StillHanging, and whatever the function raises."""
        with self._lock:
            if self._hung is not None and self._hung.is_alive():
                raise StillHanging(f"{self._name} has not returned from an earlier call")
            self._hung = None
            call = _Call(function, self._name)
            call.thread.start()
            call.thread.join(limit_s)
            if call.thread.is_alive():
                self._hung = call.thread
                raise StillHanging(f"{self._name} has not returned in {limit_s:g} s")
        return call.result()

    async def call_async(self, function: Callable[[], T], limit_s: float) -> T:
        """As ``call``, without blocking the event loop."""
        return await asyncio.to_thread(self.call, function, limit_s)
