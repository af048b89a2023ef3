"""The client's side of the session rules, without I/O: which server to dial when, and which frames to believe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal
from urllib.parse import urlsplit

from llmgw.link.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Desired,
    LogLines,
    LogsCancel,
    LogsRequest,
    Observed,
    Refused,
    Renew,
    Routes,
    RoutesAck,
    TrafficReport,
    Welcome,
)
from llmgw.link.wire import Frame
from llmgw.version import VERSION

DEFAULT_PORT = 7443
SETTLED_S = 10.0
"""A session that lasted as long has worked: the backoff begins anew."""

Outgoing = Observed | RoutesAck | TrafficReport | LogLines
Delivered = Welcome | Desired | Routes | LogsRequest | LogsCancel | Refused | Renew


class LinkError(Exception):
    """A server's address can't be dialled as it is written; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A control plane as it is dialled: ``url`` is ``https://HOST:PORT``."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"


def parse_server(text: str) -> ServerAddress:
    """The address in ``https://HOST[:PORT]``. Raises LinkError in words."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise LinkError(f"server {text!r} is not an address: https://HOST:{DEFAULT_PORT} was expected") from error
    if parts.scheme == "http":
        raise LinkError(
            f"server {text!r} begins with http://, but this peer has certificates and speaks mutual TLS only: "
            f"write https://{text.removeprefix('http://')}"
        )
    if parts.scheme != "https" or not host or parts.path not in ("", "/") or parts.query or parts.username:
        raise LinkError(f"server {text!r} is not an address: https://HOST:{DEFAULT_PORT} was expected")
    return ServerAddress(host, port or DEFAULT_PORT)


class Course:
    """Goes round the servers: those of the file, then those learned. Waits between rounds, with jitter.

    The delay doubles from ``base_s`` to ``max_s`` with each whole round that failed; a random half of it is taken
    off, so that a thousand agents that lost one server do not come back at once.
    """

    def __init__(self, servers: Sequence[str], *, base_s: float, max_s: float, rng: Random) -> None:
        self._stated = tuple(dict.fromkeys(parse_server(server) for server in servers))
        if not self._stated:
            raise LinkError("no server is named: at least one https://HOST:PORT was expected")
        self._learned: tuple[ServerAddress, ...] = ()
        self._base_s = base_s
        self._max_s = max(base_s, max_s)
        self._rng = rng
        self._index = 0
        self._failures = 0
        self.newest_epoch = 0
        """The highest leader epoch ever welcomed with; never decreases."""

    @property
    def servers(self) -> tuple[ServerAddress, ...]:
        return self._stated + self._learned

    @property
    def current(self) -> ServerAddress:
        return self.servers[self._index % len(self.servers)]

    def welcomed(self, welcome: Welcome) -> None:
        """Remember the epoch, and the servers that this one names; malformed ones are passed over."""
        self.newest_epoch = max(self.newest_epoch, welcome.epoch)
        here = self.current
        learned: list[ServerAddress] = []
        for text in welcome.servers:
            try:
                address = parse_server(text)
            except LinkError:
                continue
            if address not in self._stated and address not in learned:
                learned.append(address)
        if here not in self._stated and here not in learned:
            learned.append(here)
        self._learned = tuple(learned)
        self._index = self.servers.index(here)

    def failed(self, *, lasted_s: float = 0.0, patient: bool = False) -> float:
        """The connection failed or ended after ``lasted_s`` of being welcomed. Moves on to the next server.

        Returns the seconds to wait before dialling it. ``patient``: the longest wait, where haste makes it worse.
        """
        if lasted_s >= SETTLED_S:
            self._failures = 0
        count = len(self.servers)
        self._failures += 1
        self._index = (self._index + 1) % count
        if patient:
            return self._jittered(self._max_s)
        rounds, rest = divmod(self._failures, count)
        if rest:
            # Within a round the next server is tried almost at once: it may lead now.
            return self._rng.uniform(0.0, min(self._base_s, 1.0) / 2)
        return self._jittered(min(self._max_s, self._base_s * 2.0 ** min(rounds - 1, 32)))

    def _jittered(self, delay_s: float) -> float:
        return delay_s * self._rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Deliver:
    """The frame counts: hand it on."""

    frame: Delivered


@dataclass(frozen=True, slots=True)
class Ended:
    """The connection is to be closed. ``patient`` as in Course.failed."""

    key: str
    words: str
    patient: bool = False
    refused: Refused | None = None


class Conversation:
    """What one connection may say: hello first, then a welcome, then frames of that epoch and session."""

    def __init__(self, server: str, newest_epoch: int) -> None:
        self._server = server
        self._newest_epoch = newest_epoch
        self.welcome: Welcome | None = None
        self.dropped: Counter[str] = Counter()

    def receive(self, frame: Frame) -> Deliver | Ended | Literal[False]:
        """What a frame from the server means; False: it was dropped and counted."""
        match frame:
            case Refused():
                return self._refused(frame)
            case Welcome():
                return self._welcomed(frame)
            case Desired() | Routes():
                return self._delivered(frame, current=self._current(frame.epoch, frame.session))
            case LogsRequest() | LogsCancel() | Renew():
                return self._delivered(frame, current=True)
            case _:
                return self._dropped("unknown")

    def stamp(self, frame: Outgoing) -> Outgoing:
        """The frame with this session's epoch and number. Only after the welcome."""
        assert self.welcome is not None
        if isinstance(frame, LogLines):
            return frame
        return replace(frame, epoch=self.welcome.epoch, session=self.welcome.session)

    def _welcomed(self, welcome: Welcome) -> Deliver | Ended | Literal[False]:
        if self.welcome is not None:
            return self._dropped("second-welcome")
        if not OLDEST_PROTOCOL <= welcome.protocol <= PROTOCOL:
            return Ended(
                "protocol",
                f"{self._server} wants protocol {welcome.protocol} (llmgw v{welcome.version}), this peer speaks "
                f"{OLDEST_PROTOCOL} to {PROTOCOL} (llmgw v{VERSION}): upgrade control planes first, then agents",
            )
        if welcome.epoch < self._newest_epoch:
            return Ended(
                "epoch",
                f"{self._server} leads with epoch {welcome.epoch}, but epoch {self._newest_epoch} has been seen: it "
                "was deposed and does not know it; going on to the next server. (If the store was restored from a "
                "backup, restart this process: its engines stay up)",
            )
        self.welcome = welcome
        return Deliver(welcome)

    def _refused(self, frame: Refused) -> Ended:
        how = "ended the session" if self.welcome else "refused this peer"
        taken_over = self.welcome is not None and frame.code == "duplicate"
        return Ended(f"refused-{frame.code}", f"{self._server} {how}: {frame.words}", taken_over, frame)

    def _current(self, epoch: int, session: int) -> bool:
        return self.welcome is not None and (self.welcome.epoch, self.welcome.session) == (epoch, session)

    def _delivered(
        self, frame: Desired | Routes | LogsRequest | LogsCancel | Renew, *, current: bool
    ) -> Deliver | Literal[False]:
        if self.welcome is None:
            return self._dropped("before-welcome")
        return Deliver(frame) if current else self._dropped("stale")

    def _dropped(self, why: str) -> Literal[False]:
        self.dropped[why] += 1
        return False
