from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from llmgw.simulator.faults import BadFault, Fault, FaultKind, parse_fault, parse_scoped

from .conftest import KEY, Start
from .test_server import DEADLINE_S, HEADERS, hello, http, stats_when

__all__ = ["http"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("exit-at-start", Fault(FaultKind.EXIT_AT_START, 1)),
        ("exit-at-start:7", Fault(FaultKind.EXIT_AT_START, 7)),
        ("hang", Fault(FaultKind.HANG)),
        ("slow-tokens:0.5", Fault(FaultKind.SLOW_TOKENS, 0.5)),
        ("die-after:3", Fault(FaultKind.DIE_AFTER, 3)),
        ("die:SIGSEGV", Fault(FaultKind.DIE, signal.SIGSEGV)),
        ("die:KILL", Fault(FaultKind.DIE, signal.SIGKILL)),
        ("fork", Fault(FaultKind.FORK)),
        ("fork:/tmp/a:b", Fault(FaultKind.FORK, path="/tmp/a:b")),
        ("hang-in-rendezvous", Fault(FaultKind.HANG_IN_RENDEZVOUS)),
        ("health-500", Fault(FaultKind.HEALTH_500)),
    ],
)
def test_faults_are_read(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nap", "'nap' is no fault: expected one of exit-at-start, hang-in-rendezvous, hang, slow-tokens"),
        ("", "is no fault"),
        ("hang:1", "takes no argument"),
        ("exit-at-start:", "a status from 0 to 255"),
        ("exit-at-start:256", "a status from 0 to 255"),
        ("slow-tokens", "expected seconds"),
        ("slow-tokens:-1", "expected seconds"),
        ("slow-tokens:nan", "expected seconds"),
        ("die-after:x", "a number of tokens"),
        ("die:SIGNOPE", "expected a signal"),
        ("fork:", "expected a path"),
    ],
)
def test_faults_that_can_not_be_read_say_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(BadFault, match=words):
        parse_fault(text)


@pytest.mark.parametrize(
    ("text", "fault", "rank"),
    [
        ("hang", Fault(FaultKind.HANG), None),
        ("hang@1", Fault(FaultKind.HANG), 1),
        ("die-after:3@0", Fault(FaultKind.DIE_AFTER, 3), 0),
        ("fork:/a@b", Fault(FaultKind.FORK, path="/a@b"), None),
        ("fork:/a@b@2", Fault(FaultKind.FORK, path="/a@b"), 2),
    ],
)
def test_a_fault_may_name_its_rank(text: str, fault: Fault, rank: int | None) -> None:
    assert parse_scoped(text) == (fault, rank)


def test_a_fault_of_the_serving_rank_is_no_other_ranks() -> None:
    with pytest.raises(BadFault, match="rank 1 has no port"):
        parse_scoped("health-500@1")


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "llmgw.simulator", *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--fault", "exit-at-start:7", "--port", "0"], 7, "simulated fault: exit at start"),
        (["--nodes", "2"], 2, "--nodes 2 needs --dist-init HOST:PORT"),
        (["--dist-init", "a:1"], 2, "give --nodes too"),
        (["--nodes", "2", "--dist-init", "a"], 2, "expected HOST:PORT, such as 10.0.0.1:20050"),
        (["--nodes", "2", "--rank", "1", "--dist-init", "a:0"], 2, "only rank 0 can take any free port"),
        (["--rank", "1"], 2, "--rank 1: ranks of 1 node go from 0 to 0"),
        (["--fault", "hang@1"], 2, "--fault hang@1: ranks of 1 node go from 0 to 0"),
        (["--fault", "fork:/nope/x", "--port", "0"], 1, "fork:/nope/x: it can't be locked: No such file"),
        (["--fault", "nap"], 2, "'nap' is no fault"),
        (["--load-time", "soon"], 2, "expected seconds"),
        (["--port", "70000"], 2, "expected a port"),
        (["--parallel", "0"], 2, "from 1"),
        (["--nope"], 2, "unrecognized arguments: --nope"),
    ],
)
def test_command_lines_that_end_at_once(flags: list[str], status: int, words: str) -> None:
    ended = run(*flags)
    assert ended.returncode == status
    assert words in ended.stderr


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("llmgw-sim ")
    assert "--token-interval SECONDS" in run("--help").stdout


async def set_fault(http: aiohttp.ClientSession, url: str, body: object) -> aiohttp.ClientResponse:
    async with http.post(f"{url}/sim/fault", json=body) as answer:
        await answer.read()
        return answer


async def test_hang_is_healthy_and_answers_nothing_until_cleared(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start("--fault", "hang")
    await stats_when(http, sim, lambda stats: stats["fault"] == "hang")
    async with http.get(f"{sim.url}/health") as answer:
        assert answer.status == 200
    with pytest.raises(asyncio.TimeoutError):
        await http.post(
            f"{sim.url}/v1/chat/completions", json=hello(), headers=HEADERS, timeout=aiohttp.ClientTimeout(total=0.3)
        )
    await stats_when(http, sim, lambda stats: stats["active"] == 0 and stats["cancelled"] == 1)
    assert (await set_fault(http, sim.url, {"kind": None})).status == 200
    async with http.post(f"{sim.url}/v1/chat/completions", json=hello(), headers=HEADERS) as answer:
        assert answer.status == 200


async def test_health_500(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start()
    await stats_when(http, sim, lambda stats: stats["fault"] is None)
    assert (await set_fault(http, sim.url, {"kind": "health-500"})).status == 200
    async with http.get(f"{sim.url}/health") as answer:
        assert answer.status == 500
    async with http.post(f"{sim.url}/v1/chat/completions", json=hello(), headers=HEADERS) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("body", [{"kind": "nap"}, {"kind": 7}, {}, {"kind": "die:NOPE"}])
async def test_a_bad_fault_changes_nothing(start: Start, http: aiohttp.ClientSession, body: object) -> None:
    sim = start()
    assert (await set_fault(http, sim.url, {"kind": "health-500"})).status == 200
    assert (await set_fault(http, sim.url, body)).status == 400
    assert (await stats_when(http, sim, lambda _: True))["fault"] == "health-500"


@pytest.mark.parametrize(("fault", "status"), [("die:SIGTERM", 0), ("die:SIGSEGV", -signal.SIGSEGV)])
async def test_die_by_signal(start: Start, fault: str, status: int) -> None:
    sim = start("--fault", fault)
    assert await asyncio.to_thread(sim.process.wait, DEADLINE_S) == status


async def test_die_after_tokens_breaks_the_stream(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start("--fault", "die-after:3", "--token-interval", "0.01")
    url = f"{sim.url}/v1/completions"
    body = {"prompt": "x", "stream": True, "max_tokens": 50, "ignore_eos": True}
    await stats_when(http, sim, lambda stats: stats["fault"] == "die-after")
    async with http.post(url, json=body, headers=HEADERS) as answer:
        received = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert all(event.startswith(b"data: ") for event in received)
    assert await asyncio.to_thread(sim.process.wait, DEADLINE_S) == -signal.SIGKILL


async def test_fork_leaves_processes_in_sessions_of_their_own(start: Start, http: aiohttp.ClientSession) -> None:
    sim = start()
    before = _sleepers()
    assert (await set_fault(http, sim.url, {"kind": "fork"})).status == 200
    strays = await _new_sleepers(before)
    try:
        for pid in strays:
            assert os.getsid(pid) == pid
            assert os.getsid(pid) != os.getsid(sim.process.pid)
    finally:
        for pid in strays:
            os.kill(pid, signal.SIGKILL)


async def test_what_a_killed_engine_leaves_behind_holds_a_lock_until_it_is_gone(
    start: Start, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The lock stands for GPU memory: it is not free because the engine is gone."""
    held = tmp_path / "gpu-memory"
    sim = start()
    before = _sleepers()
    assert (await set_fault(http, sim.url, {"kind": f"fork:{held}"})).status == 200
    strays = await _new_sleepers(before)
    try:
        sim.process.kill()
        await asyncio.to_thread(sim.process.wait, DEADLINE_S)
        assert not _free(held)
    finally:
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
    with held.open("r+") as file:
        await asyncio.wait_for(asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX), DEADLINE_S)


def _free(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


async def _new_sleepers(before: set[int]) -> set[int]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            strays = _sleepers() - before
            if len(strays) == 2:
                return strays
            await asyncio.sleep(0.01)


def _sleepers() -> set[int]:
    """Processes that run ``sleep 3600`` with this test's key in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if command == b"sleep\x003600\x00" and f"LLMGW_SIM_API_KEY={KEY}".encode() in environment:
                found.add(int(entry.name))
    return found


async def test_another_machine_may_not_set_faults(start: Start, http: aiohttp.ClientSession) -> None:
    """This machine's own address that is not loopback stands for another machine: the kernel reports it as the peer."""
    address = _address_of_this_machine()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    sim = start("--host", "0.0.0.0")
    port = sim.url.rpartition(":")[2]
    refused = await set_fault(http, f"http://{address}:{port}", {"kind": "health-500"})
    assert refused.status == 403
    assert (await stats_when(http, sim, lambda _: True))["fault"] is None


def _address_of_this_machine() -> str | None:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only picks the route
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address
