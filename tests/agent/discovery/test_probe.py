from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.agent.discovery.probe import ProbeHung, ProbeMissing, run_probe

from .machines import write_script

FREEZER = Path("/sys/fs/cgroup/freezer")


@contextlib.contextmanager
def everyone_gone(fifo: Path) -> Iterator[None]:
    """On leaving, waits until no process holds ``fifo`` open for writing any more."""
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(fifo, os.O_WRONLY)
    try:
        try:
            yield
        finally:
            os.close(writer)
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        assert poll.poll(5000), "a process of the probe is still there"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def remove_when_empty(group: Path) -> None:
    """The kernel keeps a group until the last of its processes is reaped, and tells nobody when that is."""
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text():
        assert time.monotonic() < deadline, "a process of the probe is still there"
    group.rmdir()


async def test_status_and_both_outputs(tmp_path: Path) -> None:
    program = write_script(tmp_path / "smi", 'echo "said $1"; echo complained >&2; exit 9')
    output = await run_probe("smi", (program, "this"), 10)
    assert (output.status, output.stdout, output.stderr) == (9, "said this\n", "complained\n")


async def test_a_program_that_is_not_there_or_not_executable(tmp_path: Path) -> None:
    with pytest.raises(ProbeMissing, match="No such file"):
        await run_probe("smi", (str(tmp_path / "nothing"),), 10)
    (tmp_path / "data").write_text("x")
    with pytest.raises(ProbeMissing, match="Permission denied"):
        await run_probe("smi", (str(tmp_path / "data"),), 10)


async def test_a_hung_program_and_its_grandchild_are_killed_at_the_limit(tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    program = write_script(tmp_path / "smi", f"trap '' TERM; exec 9>{fifo}; echo partly; sleep 600 & sleep 600; wait")
    with everyone_gone(fifo), pytest.raises(ProbeHung):
        await run_probe("smi", (program,), 0.5)


async def test_a_grandchild_that_holds_the_output_delays_nothing_and_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    program = write_script(tmp_path / "smi", f"exec 9>{fifo}; sleep 600 & echo done")
    with everyone_gone(fifo):
        output = await run_probe("smi", (program,), 600)
        assert output.stdout == "done\n"


async def test_a_cancelled_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    fifo, ready = tmp_path / "held", tmp_path / "ready"
    os.mkfifo(ready)
    program = write_script(tmp_path / "smi", f"exec 9>{fifo}; sleep 60 & echo > {ready}; wait")
    with everyone_gone(fifo):
        async with asyncio.timeout(10):
            probe = asyncio.ensure_future(run_probe("smi", (program,), 60))
            await asyncio.to_thread(ready.read_text)
            probe.cancel()
            with pytest.raises(asyncio.CancelledError):
                await probe


@pytest.mark.parametrize("steps", range(8))
async def test_a_probe_cancelled_while_it_starts_leaves_nothing_behind(tmp_path: Path, steps: int) -> None:
    fifo, ready = tmp_path / "held", tmp_path / "ready"
    os.mkfifo(ready)
    program = write_script(tmp_path / "smi", f"exec 9>{fifo}; sleep 60 & echo > {ready}; wait")
    with everyone_gone(fifo):
        async with asyncio.timeout(10):
            probe = asyncio.ensure_future(run_probe("smi", (program,), 60))
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps > 1:
                ready.read_text()  # on purpose without the loop: the grandchild is there, and asyncio knows of no start
            probe.cancel()
            with pytest.raises(asyncio.CancelledError):
                await probe


async def test_a_flood_of_output_is_cut(tmp_path: Path) -> None:
    program = write_script(tmp_path / "smi", "exec yes GPU-")
    output = await run_probe("smi", (program,), 30)
    assert output.status != 0
    assert len(output.stdout) <= 4 << 20


@pytest.mark.root
@pytest.mark.skipif(not os.access(FREEZER / "cgroup.procs", os.W_OK), reason="needs root and a version 1 freezer")
async def test_a_program_that_can_not_be_killed_is_not_started_twice(tmp_path: Path) -> None:
    """A frozen process ignores SIGKILL, as one that is stuck in a driver does."""
    group = FREEZER / f"llmgw-test-{os.getpid()}"
    group.mkdir()
    starts, fifo = tmp_path / "starts", tmp_path / "held"
    stick = f"echo $$ > {group}/cgroup.procs; echo FROZEN > {group}/freezer.state; echo thawed"
    program = write_script(tmp_path / "smi", f"echo >> {starts}; exec 9>{fifo}; {stick}")
    try:
        with everyone_gone(fifo):
            with pytest.raises(ProbeHung, match="smi did not end in time"):
                await run_probe("smi", (program,), 0.5)
            for _ in range(3):
                with pytest.raises(ProbeHung, match=r"smi is stuck .* can't be killed"):
                    await run_probe("smi", (program,), 0.5)
            assert starts.read_text() == "\n"
            (group / "freezer.state").write_text("THAWED")
    finally:
        (group / "freezer.state").write_text("THAWED")
    async with asyncio.timeout(10):
        await asyncio.to_thread(remove_when_empty, group)
    write_script(tmp_path / "smi", "echo well again")
    async with asyncio.timeout(10):
        assert (await run_probe("smi", (program,), 5)).stdout == "well again\n"
