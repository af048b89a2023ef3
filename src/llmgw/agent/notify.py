"""What the agent tells the service manager that runs it: sd_notify(3), and the watchdog.

Where nobody listens (a terminal, a container, another service manager) all of it does nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

import structlog

log = structlog.get_logger()

SERVICE_VARIABLES = (
    "CREDENTIALS_DIRECTORY",
    "CACHE_DIRECTORY",
    "CONFIGURATION_DIRECTORY",
    "FDSTORE",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LISTEN_FDNAMES",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_PIDFDID",
    "LOGS_DIRECTORY",
    "MAINPID",
    "MANAGERPID",
    "MEMORY_PRESSURE_WATCH",
    "MEMORY_PRESSURE_WRITE",
    "NOTIFY_SOCKET",
    "RUNTIME_DIRECTORY",
    "STATE_DIRECTORY",
    "SYSTEMD_EXEC_PID",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
)
"""What systemd tells a service about itself. Meant for this process alone: what it starts is no part of it."""

LOOK_S = 5.0
"""How often the status is looked at, where the watchdog does not ask for more."""


class Notify:
    """``address``: a path, or ``@`` and an abstract name. ``watchdog_s``: 0 where nothing is expected."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else 0.0
        self._status = ""
        self._unheard = False

    @classmethod
    def take_from(cls, environment: MutableMapping[str, str] = os.environ) -> Notify:
        """By what the service manager has put into the environment, which holds none of it afterwards."""
        told = {name: environment.pop(name, "") for name in SERVICE_VARIABLES}
        for_us = told["WATCHDOG_PID"] in ("", str(os.getpid()))
        microseconds = told["WATCHDOG_USEC"] if for_us else ""
        return cls(told["NOTIFY_SOCKET"], int(microseconds) / 1e6 if microseconds.isdecimal() else 0.0)

    @property
    def pause_s(self) -> float:
        """Between two signs of life: four of them for each that is waited for."""
        return min(LOOK_S, self.watchdog_s / 4) if self.watchdog_s else LOOK_S

    def ready(self, status: str) -> None:
        """It has started: what waits for it may go on."""
        self._status = _one_line(status)
        self._tell(f"READY=1\nSTATUS={self._status}")

    def status(self, words: str) -> None:
        """One line for ``systemctl status``; said where it is new."""
        if (line := _one_line(words)) != self._status:
            self._status = line
            self._tell(f"STATUS={line}")

    def alive(self) -> None:
        if self.watchdog_s:
            self._tell("WATCHDOG=1")

    def stopping(self, why: str) -> None:
        self._status = _one_line(why)
        self._tell(f"STOPPING=1\nSTATUS={self._status}")

    def _tell(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)  # a manager that does not listen must not hold the agent up
                channel.sendto(message.encode(), self._address)
            self._unheard = False
        except OSError as error:
            if not self._unheard:
                log.warning("the service manager can't be told how the agent is", reason=str(error))
            self._unheard = True


async def pulse(
    notify: Notify, stuck_s: Callable[[], float], words: Callable[[], str], news: asyncio.Event | None = None
) -> None:
    """Gives signs of life from the loop that this runs on, for as long as the stream's thread works, too. Never ends.

    ``stuck_s``: for how long that thread has done nothing. A loop that stands still gives none by itself. Without
    them the service manager kills the agent and starts it anew; it adopts its engines then. ``news``: set when the
    words may have changed, so that they are told at once.
    """
    news = news or asyncio.Event()
    withheld = False
    while True:
        stands_s = stuck_s()
        if notify.watchdog_s and stands_s > notify.watchdog_s / 2:
            words_now = f"the thread of the stream has done nothing for {stands_s:.0f} s"
            if not withheld:
                log.error("no more signs of life for the service manager", why=words_now)
            withheld = True
        else:
            withheld, words_now = False, words()
            notify.alive()
        notify.status(words_now)
        with suppress(TimeoutError):
            async with asyncio.timeout(notify.pause_s):
                await news.wait()
                news.clear()


def standing(connected: bool, why: str, since: float, shards: int, *, now: float | None = None) -> str:
    """One line: whether a control plane is reached (``why`` not), and what runs here. Times are Unix seconds."""
    runs = "1 shard" if shards == 1 else f"{shards} shards"
    if connected:
        return f"{why}; {runs}"
    silent_s = max(0.0, (time.time() if now is None else now) - since)
    return f"no control plane reached for {silent_s:.0f} s: {why}; {runs}"


def _one_line(words: str) -> str:
    return " ".join(words.split())
