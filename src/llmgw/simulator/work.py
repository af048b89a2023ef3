"""The simulated computation: when each token comes, what was counted, and the faults that strike meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from llmgw.simulator.faults import Fault, FaultKind
from llmgw.simulator.options import Options


@dataclass(slots=True)
class Stats:
    requests: int = 0
    """Requests for work, begun ever."""
    active: int = 0
    cancelled: int = 0
    """Ended because the client had gone."""
    tokens: int = 0
    """Tokens given out, ever."""


class Work:
    """One engine's state. Not safe across threads."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.stats = Stats()
        self.fault: Fault | None = None
        self._slots = asyncio.Semaphore(options.parallel) if options.parallel else None
        self._tokens_left: float | None = None

    def strike(self, fault: Fault | None) -> None:
        """Takes up a fault in place of the last one; None: behaves again. May not return."""
        self.fault = fault
        self._tokens_left = None
        match fault:
            case Fault(FaultKind.DIE_AFTER, number):
                self._tokens_left = number
            case Fault(FaultKind.DIE, number):
                os.kill(os.getpid(), int(number))
            case Fault(FaultKind.EXIT_AT_START, number):
                os._exit(int(number))
            case Fault(FaultKind.FORK):
                _leave_strays()

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Counts one request, and waits for a slot where there are only so many."""
        self.stats.requests += 1
        self.stats.active += 1
        try:
            if self.fault is not None and self.fault.kind is FaultKind.HANG:
                await asyncio.Event().wait()
            if self._slots is None:
                yield
            else:
                async with self._slots:
                    yield
        except (asyncio.CancelledError, ConnectionError):
            self.stats.cancelled += 1
            raise
        finally:
            self.stats.active -= 1

    async def paced(self, tokens: Sequence[str]) -> AsyncIterator[str]:
        """The tokens, each at its time."""
        for at, token in enumerate(tokens):
            delay = self._delay(first=at == 0)
            if delay:
                await asyncio.sleep(delay)
            self._spend()
            yield token

    def _delay(self, *, first: bool) -> float:
        if self.fault is not None and self.fault.kind is FaultKind.SLOW_TOKENS:
            return self.fault.number
        return self.options.first_token_s if first else self.options.token_interval_s

    def _spend(self) -> None:
        if self._tokens_left is not None:
            if self._tokens_left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._tokens_left -= 1
        self.stats.tokens += 1


def _leave_strays() -> None:
    """Two sleepers in sessions of their own, whose parent has gone: what a killed engine may leave behind."""
    subprocess.run(  # the shell ends at once, and the sleepers (an hour at most) are nobody's children
        ["/bin/sh", "-c", "setsid sleep 3600 & setsid sleep 3600 &"],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
