"""An engine that is kept usable on this node: tried for while it is wanted, proved again, and told of in words."""

from __future__ import annotations

import asyncio
import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import structlog

from llmgw.agent.fetch.artifact import FetchFailed
from llmgw.agent.fetch.disk import NoRoom
from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.program import Program
from llmgw.agent.install.recipe import RecipeFailed
from llmgw.cluster.catalog import EngineName
from llmgw.cluster.model import EngineOnNode, EngineState

log = structlog.get_logger()

RETRY_FIRST_S = 60.0
RETRY_MOST_S = 600.0

FAILURES = (RecipeFailed, FetchFailed, NotProved, NoRoom, OSError)
"""What an attempt may end with. Anything else is a fault of the agent's own."""


class Keeper(ABC):
    """All calls on the agent's own loop."""

    def __init__(self, name: EngineName, version: str, changed: Callable[[], None], *, named: bool = False) -> None:
        self.name = name
        self.version = version
        self.state: EngineOnNode | None = None
        """None until there is anything to say."""
        self.program: Program | None = None
        """What shards may be started with: it worked when it was proved last. None where none does."""
        self.pending = False
        """An attempt is being made, or the last one failed and is to be repeated."""
        self._named = named
        self._changed = changed
        self._busy = asyncio.Lock()
        self._failed = ""
        self._keeping = 0
        self._lost = asyncio.Event()

    @abstractmethod
    async def _have(self) -> None:
        """Makes one attempt at having it. Raises one of FAILURES."""

    async def keep(self) -> None:
        """Has it, and has it again whenever it is lost. A failed attempt is repeated, ever less often. Never ends."""
        pause = RETRY_FIRST_S
        self._keeping += 1  # the task before may still be ending
        try:
            while True:
                self._lost.clear()
                if await self._attempt(f"; next try in {pause:g} s"):
                    pause = RETRY_FIRST_S
                    await self._lost.wait()
                    continue
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MOST_S)
        finally:
            self._keeping -= 1

    async def ensure(self) -> EngineState:
        """Makes one attempt, and returns where it ended. What goes wrong is said in words, never raised."""
        await self._attempt("")
        assert self.state is not None
        return self.state.state

    async def _attempt(self, then: str) -> bool:
        self.pending = True
        async with self._busy:
            try:
                await self._have()
                self.pending = False
                return True
            except FAILURES as failure:
                self._fail(in_words(failure), then)
            except Exception as fault:
                log.exception("a fault of the agent's own", engine=self.name, version=self.version)
                self._fail(f"a fault in the agent: {fault!r}; see its log", then)
            return False

    @property
    def seen_to(self) -> bool:
        """Its state is fresh, or about to be: it need not be proved again now."""
        return self._busy.locked() or (self._keeping > 0 and self.program is None)

    def try_again(self) -> None:
        """What is asked for has changed with the machine."""
        self._lost.set()

    def lose(self, why: str) -> None:
        """It was there, and works no longer. What runs of it goes on."""
        self.program = None
        self._fail(why, "")
        self._lost.set()

    # -- what is said

    def _progress(self, state: EngineState, words: str) -> None:
        """While what is installed works, it is no less usable for what is being done beside it."""
        if self.program is None:
            self._say(state, words)
        elif self.pending:
            self._say(EngineState.INSTALLED, f"works as before; {state.value}: {words}")

    def _fail(self, why: str, then: str) -> None:
        if self.program is None:
            self._failed = why
            self._say(EngineState.FAILED, f"{why}{then}")
        else:
            self._say(EngineState.INSTALLED, f"works as before; what is asked for now has failed: {why}{then}")

    def _say(self, state: EngineState, words: str) -> None:
        if state is EngineState.INSTALLED:
            self._failed = ""
        last = self.state
        if last is not None and (last.version, last.state, last.words) == (self.version, state, words):
            return
        since = last.since if last is not None and last.state is state else time.time()
        self.state = EngineOnNode(
            name=self.name,
            version=self.version,
            state=state,
            words=words,
            since=since,
            named=self._named,
            failed=self._failed,
        )
        if last is None or last.state is not state or last.version != self.version:
            old = f"{last.version} {last.state.value}" if last is not None else None
            log.info("engine", engine=self.name, old=old, new=f"{self.version} {state.value}", words=words)
        self._changed()


def in_words(failure: BaseException) -> str:
    if not isinstance(failure, OSError):
        return str(failure)
    where = f"{failure.filename}: " if failure.filename else ""
    denied = failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    way_out = ": let the agent write there, or name another folder in its file (engines_dir)" if denied else ""
    return f"{where}{failure.strerror or failure}{way_out}"
