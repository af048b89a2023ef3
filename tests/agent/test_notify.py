"""What the agent tells its service manager, on a real socket; and when it gives no more signs of life."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from llmgw.agent.notify import Notify, pulse, standing
from llmgw.link.client import LinkClient, LinkState
from llmgw.link.messages import Hello
from tests.cluster.lab import free_port
from tests.link.ends import Pki

DEADLINE_S = 20.0


class Manager:
    """A service manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)
        self.told: list[str] = []

    def hear(self) -> list[str]:
        with suppress(BlockingIOError):
            while True:
                self.told.append(self._socket.recv(4096).decode())
        return self.told

    async def until(self, check: Callable[[list[str]], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not check(self.hear()):
                self.told.append(await self._next())

    async def _next(self) -> str:
        return (await asyncio.get_running_loop().sock_recv(self._socket, 4096)).decode()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@llmgw-test-{os.getpid()}-{id(request)}"
    found = Manager(address)
    yield found
    found.close()


def test_all_that_is_said(manager: Manager) -> None:
    notify = Notify(manager.address, watchdog_s=8.0)
    notify.ready("no control plane\nreached")
    notify.alive()
    notify.status("no control plane reached")
    notify.status("connected")
    notify.status("connected")
    notify.stopping("ends")
    assert manager.hear() == [
        "READY=1\nSTATUS=no control plane reached",
        "WATCHDOG=1",
        "STATUS=connected",
        "STOPPING=1\nSTATUS=ends",
    ]
    assert notify.pause_s == 2.0


def test_children_hear_nothing_of_it(manager: Manager) -> None:
    environment = {
        "PATH": "/bin",
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "60000000",
        "WATCHDOG_PID": str(os.getpid()),
        "INVOCATION_ID": "8d",
        "JOURNAL_STREAM": "8:1",
        "SYSTEMD_EXEC_PID": str(os.getpid()),
        "STATE_DIRECTORY": "/var/lib/llmgw-agent",
        "LISTEN_FDS": "1",
    }
    notify = Notify.take_from(environment)
    assert environment == {"PATH": "/bin"}
    assert notify.watchdog_s == 60.0
    notify.alive()
    assert manager.hear() == ["WATCHDOG=1"]


@pytest.mark.parametrize("told", [{"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": ""}])
def test_a_watchdog_that_is_not_meant_for_us(told: dict[str, str], manager: Manager) -> None:
    notify = Notify.take_from({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "60000000", **told})
    notify.alive()
    assert manager.hear() == []
    assert notify.pause_s > 0


def test_nobody_listens(tmp_path: Path) -> None:
    Notify.take_from({}).ready("alone")
    notify = Notify(str(tmp_path / "gone"), watchdog_s=1.0)
    with capture_logs() as said:
        notify.ready("x")
        notify.alive()
    assert [line["event"] for line in said] == ["the service manager can't be told how the agent is"]


def test_words() -> None:
    assert standing(True, "connected to https://h:7443", 0.0, 2) == "connected to https://h:7443; 2 shards"
    assert standing(False, "https://h:7443: refused", 60.0, 1, now=100.4) == (
        "no control plane reached for 40 s: https://h:7443: refused; 1 shard"
    )


async def test_no_signs_of_life_while_the_thread_of_the_stream_stands_still(tmp_path: Path, manager: Manager) -> None:
    """The thread of a real stream is held up, and let go again."""
    held, go_on = threading.Event(), threading.Event()

    def on_state(state: LinkState) -> None:
        held.set()
        assert go_on.wait(DEADLINE_S)

    link = LinkClient(
        role="node",
        id="n1",
        servers=[f"https://127.0.0.1:{free_port()}"],  # nobody is there: the first try fails, and is told
        tls=Pki.make(tmp_path).node("n1"),
        hello=lambda: Hello(role="node", id="n1"),
        vitals=lambda: None,
        on_frame=lambda frame: None,
        on_state=on_state,
    )
    link.start()
    notify = Notify(manager.address, watchdog_s=0.4)
    feeding = asyncio.create_task(pulse(notify, link.stuck_s, lambda: "well"))
    try:
        assert await asyncio.to_thread(held.wait, DEADLINE_S)
        await manager.until(lambda told: any("has done nothing for" in line for line in told))
        fed = manager.told.count("WATCHDOG=1")
        await manager.until(lambda told: link.stuck_s() > 1.0)
        assert manager.told.count("WATCHDOG=1") == fed
        go_on.set()
        await manager.until(lambda told: told.count("WATCHDOG=1") > fed)
    finally:
        go_on.set()
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding
        await asyncio.to_thread(link.stop)
