"""The simulated computation: when each token comes, what was counted, and the faults that strike meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from llmgw.simulator.faults import BadFault, Fault, FaultKind
from llmgw.simulator.options import Options
from llmgw.simulator.ranks import Alone, Ranks


@dataclass(slots=True)
class Stats:
    requests: int = 0
    """Requests for work, begun ever."""
    active: int = 0
    waiting: int = 0
    """Of the active ones, those that wait for a slot."""
    prompt_tokens: int = 0
    """Tokens of prompts, ever."""
    cancelled: int = 0
    """Ended because the client had gone."""
    tokens: int = 0
    """Tokens given out, ever."""


class Work:
    """One engine's state. Not safe across threads."""

    def __init__(self, options: Options, ranks: Ranks | None = None) -> None:
        self.options = options
        self.ranks = ranks or Alone()
        self.stats = Stats()
        self.fault: Fault | None = None
        self._slots = asyncio.Semaphore(options.parallel) if options.parallel else None
        self._tokens_left: float | None = None

    def strike(self, fault: Fault | None) -> None:
        """Takes up a fault in place of the last one; None: behaves again. May not return. Raises BadFault."""
        self.fault = fault
        self._tokens_left = None
        match fault:
            case Fault(FaultKind.DIE_AFTER, number):
                self._tokens_left = number
            case Fault(FaultKind.DIE, number):
                os.kill(os.getpid(), int(number))
            case Fault(FaultKind.EXIT_AT_START, number):
                os._exit(int(number))
            case Fault(FaultKind.FORK, path=path):
                _leave_strays(path)

    @contextlib.asynccontextmanager
    async def request(self, prompt_tokens: int = 0) -> AsyncIterator[None]:
        """Counts one request, and waits for a slot where there are only so many."""
        self.stats.requests += 1
        self.stats.prompt_tokens += prompt_tokens
        self.stats.active += 1
        try:
            if self.fault is not None and self.fault.kind is FaultKind.HANG:
                await asyncio.Event().wait()
            if self._slots is None:
                yield
            else:
                async with self._slot(self._slots):
                    yield
        except (asyncio.CancelledError, ConnectionError):
            self.stats.cancelled += 1
            raise
        finally:
            self.stats.active -= 1

    @contextlib.asynccontextmanager
    async def _slot(self, slots: asyncio.Semaphore) -> AsyncIterator[None]:
        self.stats.waiting += 1
        try:
            await slots.acquire()
        finally:
            self.stats.waiting -= 1
        try:
            yield
        finally:
            slots.release()

    async def paced(self, tokens: Sequence[str]) -> AsyncIterator[str]:
        """The tokens, each at its time."""
        for at, token in enumerate(tokens):
            delay = self._delay(first=at == 0)
            if delay:
                await asyncio.sleep(delay)
            await self.ranks.step()
            self._spend()
            yield token

    async def compute(self) -> None:
        """All ranks' work on what is no text: a vector, a score."""
        await self.ranks.step()

    async def take_part(self) -> bool:
        """This rank's share of another's token; False: it hangs, and never will have done it."""
        fault = self.fault
        if fault is not None and fault.kind is FaultKind.HANG:
            return False
        if fault is not None and fault.kind is FaultKind.SLOW_TOKENS:
            await asyncio.sleep(fault.number)
        self._spend()
        return True

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


def _leave_strays(path: str) -> None:
    """Two sleepers in sessions of their own, whose parent has gone: what a killed engine may leave behind."""
    with contextlib.ExitStack() as opened:
        held = [opened.enter_context(_locked(path))] if path else []
        subprocess.run(  # the shell ends at once, and the sleepers (an hour at most) are nobody's children
            ["/bin/sh", "-c", "setsid sleep 3600 & setsid sleep 3600 &"],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=held,
        )


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """The lock belongs to the open file, and so to every process that inherits it, until the last of them ends."""
    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield held
        finally:
            os.close(held)
    except OSError as error:
        raise BadFault(f"fork:{path}: it can't be locked: {error.strerror}") from None
