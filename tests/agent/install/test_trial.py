"""Programs that are tried out as the user that engines run as. pytest's own folders are closed to it, as homes are."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from llmgw.agent.install.faults import NotProved
from llmgw.agent.install.trial import own, trial
from llmgw.agent.supervisor.engine_user import prepare
from llmgw.process.account import account

USER = "llmgw-engine"
DEADLINE_S = 30.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: users and mounts")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    assert prepare(USER).name == USER
    own(tmp_path / "cache/proofs", USER)
    return tmp_path / "cache/proofs"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@needs_root
async def test_it_runs_as_the_owner_of_the_folder_and_sees_what_it_needs(scratch: Path, tmp_path: Path) -> None:
    program = script(tmp_path / "closed/program", 'id -un; pwd; echo "$HOME"; cat given; touch kept && echo written')
    with trial(scratch, [program]) as place:
        place.write("given", b"for you\n")
        ended = await place.run([str(program)], limit_s=DEADLINE_S)
        folder = str(place.folder)
    assert ended.output.splitlines() == [USER, folder, folder, "for you", "written"]
    assert ended.status == 0
    assert not os.path.exists(folder)


async def test_what_a_program_puts_in_a_files_place_is_neither_written_nor_given_away(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    owner = precious.stat().st_uid
    program = script(tmp_path / "open/program", f"ln -s {precious} given")
    with trial(tmp_path / "proofs", [program]) as place:
        await place.run([str(program)], limit_s=DEADLINE_S)
        with pytest.raises(FileExistsError):
            place.write("given", b"for you")
    assert (precious.read_text(), precious.stat().st_uid) == ("as it was", owner)


@needs_root
async def test_what_it_was_not_given_it_does_not_see(scratch: Path, tmp_path: Path) -> None:
    program = script(tmp_path / "closed/program", f"cat {tmp_path}/secret; cat /proc/self/status")
    (tmp_path / "secret").write_text("key")
    with trial(scratch, [program]) as place:
        ended = await place.run([str(program)], limit_s=DEADLINE_S)
    assert "No such file" in ended.output or "Permission denied" in ended.output
    assert "NoNewPrivs:\t1" in ended.output
    assert "CapEff:\t0000000000000000" in ended.output


@needs_root
async def test_what_it_may_not_read_is_said(scratch: Path, tmp_path: Path) -> None:
    program = script(tmp_path / "program", "true")
    program.chmod(0o700)
    with trial(scratch, [program]) as place:
        ended = await place.run([str(program)], limit_s=DEADLINE_S)
    assert ended.status == 126
    assert f"{USER} may not read {program}" in ended.output


@needs_root
async def test_it_dies_with_the_agent_although_the_user_changed(scratch: Path, tmp_path: Path) -> None:
    """The kernel forgets, with a change of user, whose death was to be followed."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.chown(pipe, account(USER).uid, -1)
    # The agent's part is played by a process that is killed without a chance to clean up.
    agent = f"""
import asyncio
from pathlib import Path
from llmgw.agent.install.trial import trial
async def main():
    with trial(Path({str(scratch)!r}), [Path({str(pipe)!r})]) as place:
        await place.run(["/bin/sh", "-c", "echo $$ > {pipe}; exec sleep 600"], limit_s=600)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", agent)
    try:
        async with asyncio.timeout(DEADLINE_S):
            pid = int(await asyncio.to_thread(pipe.read_text))
            watch = os.pidfd_open(pid)
            assert os.stat(f"/proc/{pid}").st_uid == account(USER).uid
            process.send_signal(signal.SIGKILL)
            await process.wait()
            gone = asyncio.Event()
            asyncio.get_running_loop().add_reader(watch, gone.set)
            await gone.wait()
    finally:
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)


@needs_root
async def test_in_a_folder_of_root_it_runs_as_root(tmp_path: Path) -> None:
    own(tmp_path / "proofs", None)
    with trial(tmp_path / "proofs", []) as place:
        assert place.user is None
        assert (await place.run(["/usr/bin/id", "-un"], limit_s=DEADLINE_S)).output == "root\n"


@needs_root
def test_a_user_that_is_gone_is_said(tmp_path: Path) -> None:
    (tmp_path / "proofs").mkdir()
    os.chown(tmp_path / "proofs", 54321, 54321)
    with (
        pytest.raises(NotProved, match="user 54321, and this machine has no such user"),
        trial(tmp_path / "proofs", []),
    ):
        pass


async def test_who_is_not_root_runs_it_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with trial(tmp_path, []) as place:
        assert place.user is None
        assert (await place.run(["/bin/sh", "-c", "echo $GGML_NO_BACKTRACE"], limit_s=DEADLINE_S)).output == "1\n"
