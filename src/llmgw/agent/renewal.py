"""Keeps a node's certificate from expiring: renewed about half way through its life, with a new key each time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog

from llmgw.agent.identity import IdentityStore, Pair
from llmgw.agent.reissue import reissue
from llmgw.link.course import parse_server
from llmgw.link.enrolment import EnrolmentError
from llmgw.link.notices import Notices
from llmgw.pki.certificate import facts_of, in_words
from llmgw.pki.contexts import TlsFiles, expires_soon, read_identity
from llmgw.pki.names import PkiError

EARLIEST, LATEST = 0.45, 0.60
"""Of a certificate's life: when it is renewed, another moment for each certificate."""
LOOK_S = 60.0
"""How long nothing is looked at: clocks are set, machines sleep, and certificates are changed by hand."""
RETRY_S = 5.0
RETRY_MOST_S = 3600.0
RETRY_EXPIRED_MOST_S = 60.0
RETRY_LEAST_S = 0.5
UNQUIET = 3
"""So many tries must fail before people are told: a control plane may just be restarting."""
NO_ISSUER = "no_issuer"
FINAL = frozenset(
    {NO_ISSUER, "revoked", "copied_key", "recovery_limit", "file_flow", "unknown", "foreign", "identity", "role"}
)
"""Answers that trying again soon does not change."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """Tries that failed in a row, and what the last one said."""

    since: datetime
    tries: int
    code: str
    words: str


def due_at(pair: Pair, now: datetime) -> datetime:
    """When the pair is to be renewed: the same answer however often it is asked, and another for each pair."""
    # A certificate begins before it is issued, and one may be brought here long after: what counts is its time here.
    begins = pair.since if pair.leaf.not_valid_before_utc < pair.since <= now else pair.leaf.not_valid_before_utc
    part = random.Random(pair.serial).uniform(EARLIEST, LATEST)
    return begins + max(pair.not_after - begins, timedelta(0)) * part


def retry_after_s(failing: Failing, left_s: float, rng: random.Random) -> float:
    """How long to wait after a try that failed; ``left_s`` until the certificate expires, negative after."""
    most_s = max(min(RETRY_MOST_S, left_s / 8), RETRY_LEAST_S) if left_s > 0 else RETRY_EXPIRED_MOST_S
    if failing.code in FINAL:
        most_s = RETRY_MOST_S
        wait_s = RETRY_MOST_S
    else:
        wait_s = RETRY_S * 2.0 ** min(failing.tries - 1, 16)
    return min(wait_s, most_s) * rng.uniform(0.5, 1.0)


class Renewal:
    """Runs on the agent's loop. ``renewed`` is called with words once another pair is the current one.

    ``files`` are those of the agent's file: only where they lead into ``store`` is anything renewed, files that
    somebody put there by hand are left alone. ``servers`` are asked in their order. ``cut_off`` tells whether the
    stream is down: then the control plane's clock is asked too, since by a wrong one here it may never be time.
    """

    def __init__(
        self,
        *,
        store: IdentityStore,
        files: TlsFiles,
        servers: Callable[[], Sequence[str]],
        renewed: Callable[[str], None],
        changed: Callable[[], None],
        cut_off: Callable[[], bool] = lambda: False,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._files = files
        self._servers = servers
        self._renewed = renewed
        self._changed = changed
        self._cut_off = cut_off
        self._was_cut_off = False
        self._clock = clock
        self._rng = rng or random.Random()
        self._asked = asyncio.Event()
        self._pair: Pair | None = None
        self._looked = False
        self._failing: Failing | None = None
        self._again_at: datetime | None = None
        self._warnings: tuple[str, ...] = ()
        self._notices = Notices()

    def ask(self) -> None:
        """Renew now, whether it is due or not."""
        self._asked.set()

    def warnings(self) -> tuple[str, ...]:
        """What people should know of the certificate, for the node's inventory."""
        return self._warnings

    async def run(self) -> None:
        while True:
            wait_s = await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._asked.wait()

    async def look(self) -> float:
        """Renew where it is time. Returns the seconds until there is something to look at again; raises nothing."""
        try:
            return await self._look()
        except Exception:
            log.exception("a fault of the agent's own; the certificate stays as it is")
            return LOOK_S

    async def _look(self) -> float:
        asked = self._asked.is_set()
        self._asked.clear()
        pair = await asyncio.to_thread(self._current)
        first, self._looked = not self._looked, True
        if pair is None:
            self._pair = None
            if asked:
                log.warning("the certificate can't be renewed from here", why=self._by_hand())
            self._say(await asyncio.to_thread(self._expiry_by_hand))
            return LOOK_S
        if not first and (self._pair is None or pair.serial != self._pair.serial):
            self._take(pair, f"certificate {pair.serial} was put in place")
        self._pair = pair
        # Twice in a row: a stream that is dialled anew is down for a moment.
        was_cut_off, self._was_cut_off = self._was_cut_off, self._cut_off()
        if asked or self._next_at(pair) <= self._clock():
            await self._try(pair)
        elif was_cut_off and self._was_cut_off and self._failing is None:
            await self._try(pair, not_before=due_at(pair, self._clock()))
        pair = self._pair
        self._say(self._expiry(pair))
        return min(max((self._next_at(pair) - self._clock()).total_seconds(), 0.05), LOOK_S)

    def _next_at(self, pair: Pair) -> datetime:
        now = self._clock()
        due = due_at(pair, now)
        if self._again_at is None or self._again_at > now + timedelta(seconds=RETRY_MOST_S):
            return due  # The clock was set back: what it said before says nothing now.
        return max(due, self._again_at)

    async def _try(self, pair: Pair, not_before: datetime | None = None) -> None:
        """Ask the servers in turn. With ``not_before`` only those by whose clock it is time: that of others is no
        failure, nor is it that nobody answers."""
        code, words = "", []
        for server in self._servers():
            try:
                new = await reissue(self._store, pair, parse_server(server), self._clock, not_before)
            except EnrolmentError as error:
                words.append(str(error))
                code = error.code
                if code:
                    break
                continue
            if new is not None:
                log.info("certificate renewed", serial=new.serial, replaces=pair.serial, until=in_words(new.not_after))
                self._take(new, f"the certificate was renewed, until {in_words(new.not_after)}")
            return
        if code or not_before is None:
            self._failed(pair, code, "; ".join(words) or "no control plane is named")

    def _take(self, pair: Pair, why: str) -> None:
        self._pair, self._failing, self._again_at = pair, None, None
        self._notices.forget_all()
        self._renewed(why)

    def _failed(self, pair: Pair, code: str, words: str) -> None:
        now = self._clock()
        before = self._failing
        failing = Failing(
            since=before.since if before else now, tries=before.tries + 1 if before else 1, code=code, words=words
        )
        self._failing = failing
        left_s = (pair.not_after - now).total_seconds()
        wait_s = retry_after_s(failing, left_s, self._rng)
        self._again_at = now + timedelta(seconds=wait_s)
        unsaid = self._notices.due("renewal", code, time.monotonic())
        if unsaid is not None:
            log.warning(
                "the certificate can't be renewed",
                serial=pair.serial,
                until=in_words(pair.not_after),
                why=words,
                retry_in_s=round(wait_s, 1),
                unsaid=unsaid,
            )

    # -- what people are told

    def _expiry(self, pair: Pair) -> tuple[str, ...]:
        now, failing = self._clock(), self._failing
        expires = "expired" if pair.not_after <= now else "expires"
        words = f"the certificate of this node {expires} on {in_words(pair.not_after)}"
        if failing is None:
            return (words,) if pair.not_after <= now else ()
        if failing.code == NO_ISSUER:
            return (f"{words}: {failing.words}",) if pair.not_after - now < expires_soon(facts_of(pair.leaf)) else ()
        if failing.tries < UNQUIET and failing.code not in FINAL and pair.not_after > now:
            return ()
        return (f"{words} and can't be renewed since {in_words(failing.since)}: {failing.words}",)

    def _expiry_by_hand(self) -> tuple[str, ...]:
        try:
            return tuple(read_identity(self._files).warnings(self._clock()))
        except PkiError as error:
            return (str(error),)

    def _say(self, words: tuple[str, ...]) -> None:
        if words != self._warnings:
            self._warnings = words
            self._changed()

    def _by_hand(self) -> str:
        return (
            f"{self._files.cert} does not lead into {self._store.directory}: it was put there by hand, and is replaced "
            "by hand; `llmgw agent join` with a token makes one that renews itself"
        )

    def _current(self) -> Pair | None:
        return self._store.current() if self._store.leads_here(self._files.cert) else None
