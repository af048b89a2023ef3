from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.process.errors import RecordError
from llmgw.process.identity import (
    Identity,
    alive,
    boot_id,
    holders,
    identify,
    nonce_of,
    open_pidfd,
    parse_stat,
    read_stat,
    send_signal,
)
from llmgw.process.watch import gone

from .conftest import eventually, needs_root

NONCE = "test-nonce-" + os.urandom(8).hex()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sleep", "600"], env={"LLMGW_NONCE": NONCE})
    eventually(lambda: nonce_of(process.pid) == NONCE, "exec")
    yield process
    process.kill()
    process.wait()


@given(name=st.text(alphabet="()a b\n\t1Z", max_size=15), state=st.sampled_from("RSDZT"), ticks=st.integers(0, 2**63))
def test_a_name_may_hold_anything(name: str, state: str, ticks: int) -> None:
    rest = [state, "1", "2", "3", *["0"] * 15, str(ticks), "0", "0"]
    stat = parse_stat(f"42 ({name}) {' '.join(rest)}\n")
    assert (stat.pid, stat.name, stat.state, stat.parent, stat.group, stat.session) == (42, name, state, 1, 2, 3)
    assert stat.start_ticks == ticks


def test_a_real_process_with_parentheses_in_its_name(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"], env={"LLMGW_NONCE": NONCE}) as process:
        eventually(lambda: nonce_of(process.pid) == NONCE)
        stat = read_stat(process.pid)
        assert stat is not None
        assert (stat.name, stat.parent) == ("a) S 1 (b", os.getpid())
        assert alive(identify(process.pid))
        process.kill()


def test_a_process_is_recognised(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    assert identity.nonce == NONCE
    assert identity.boot_id == boot_id()
    assert alive(identity)
    assert holders(NONCE) == (identity,)
    assert Identity.from_json(identity.to_json()) == identity


@pytest.mark.parametrize(
    "change",
    [{"nonce": "another"}, {"boot_id": "0fd2c4ff-0000-4000-8000-000000000000"}, {"start_ticks": 7}, {"pid": 2**22}],
    ids=lambda change: next(iter(change)),
)
def test_whoever_differs_in_anything_is_not_signalled(
    sleeper: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    stranger = replace(identify(sleeper.pid), **change)  # type: ignore[arg-type]
    assert not alive(stranger)
    assert open_pidfd(stranger) is None
    assert not send_signal(stranger, signal.SIGKILL)
    assert send_signal(identify(sleeper.pid), signal.SIGTERM)
    assert sleeper.wait() == -signal.SIGTERM  # and not SIGKILL, which would have been first


@needs_root
def test_a_recycled_pid_is_not_signalled() -> None:
    """The same number, the same nonce, another process: the kernel is made to hand out the number again."""
    for _ in range(200):
        first = subprocess.Popen(["/bin/sleep", "600"], env={"LLMGW_NONCE": NONCE})
        eventually(lambda: nonce_of(first.pid) == NONCE)  # noqa: B023
        identity = identify(first.pid)
        eventually(lambda: identify(os.getpid(), NONCE).start_ticks and _ticks_now() > identity.start_ticks)  # noqa: B023
        first.kill()
        first.wait()
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
        second = subprocess.Popen(["/bin/sleep", "600"], env={"LLMGW_NONCE": NONCE})
        try:
            if second.pid == first.pid:  # else somebody else was quicker: again
                eventually(lambda: nonce_of(second.pid) == NONCE)  # noqa: B023
                assert not send_signal(identity, signal.SIGKILL)
                assert second.poll() is None
                return
        finally:
            second.kill()
            second.wait()
    pytest.fail("the number was never handed out again")


def _ticks_now() -> int:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return int(uptime * os.sysconf("SC_CLK_TCK"))


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    stat = read_stat(sleeper.pid)
    assert stat is not None
    assert stat.state == "Z"
    assert not alive(identity)
    assert not send_signal(identity, signal.SIGTERM)


async def test_the_end_is_noticed(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identify(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    await gone(identity)
    assert not alive(identity)


def test_who_has_no_nonce_can_not_be_identified() -> None:
    with subprocess.Popen(["/bin/sleep", "600"], env={}) as process:
        eventually(lambda: (stat := read_stat(process.pid)) and stat.name == "sleep")
        with pytest.raises(ProcessLookupError, match=r"\(sleep\) has no LLMGW_NONCE"):
            identify(process.pid)
        process.kill()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "must be an object, found NoneType"),
        ({}, "found None and None"),
        ({"pid": 1, "start_ticks": 5, "boot_id": "b", "nonce": "n"}, "a pid above 1"),
        ({"pid": -1, "start_ticks": 5, "boot_id": "b", "nonce": "n"}, "a pid above 1"),
        ({"pid": True, "start_ticks": 5, "boot_id": "b", "nonce": "n"}, "a pid above 1"),
        ({"pid": 9, "start_ticks": "5", "boot_id": "b", "nonce": "n"}, "'5'"),
        ({"pid": 9, "start_ticks": 5, "boot_id": "b", "nonce": ""}, "lacks its boot id or its nonce"),
        ({"pid": 9, "start_ticks": 5, "nonce": "n"}, "lacks its boot id or its nonce"),
    ],
)
def test_garbage_is_no_identity(value: object, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        Identity.from_json(value)
