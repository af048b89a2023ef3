from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from llmgw.process import detached
from llmgw.process.detached import Detached, ExitRecord, StartError, find, start
from llmgw.process.errors import RecordError
from llmgw.process.identity import alive, holders, identify, nonce_of, read_stat
from llmgw.process.record import lock_is_held, read_exit, void_spec, write_spec

from .conftest import Programs, eventually, needs_root, run

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"


def shown(handle: Detached, line: str) -> bool:
    return line in handle.tail(1000)


async def test_it_runs_and_is_found_again(programs: Programs) -> None:
    spec = programs.shell("echo hello; echo trouble >&2; exec sleep 600", labels={"note": "a/b"})
    handle = start(spec)
    assert handle.running()
    assert handle.ended() is None
    eventually(lambda: handle.tail(9) == ["hello", "trouble"])
    again = find(spec.record_dir)
    assert again is not None
    assert again.record == handle.record
    assert again.record.labels == {"note": "a/b"}
    assert await again.stop(10) == await handle.wait()
    assert not handle.running()


async def test_it_has_a_session_of_its_own_under_a_reaper_that_belongs_to_nobody(programs: Programs) -> None:
    handle = start(programs.shell("exec sleep 600"))
    program, reaper = read_stat(handle.pid), read_stat(handle.record.reaper.pid)
    assert program is not None
    assert reaper is not None
    assert (program.session, program.group, program.parent) == (handle.pid, handle.pid, reaper.pid)
    assert reaper.session == reaper.pid
    assert reaper.parent != os.getpid()
    await handle.stop(10)


async def test_the_environment_is_exactly_what_was_stated(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING_OF_OURS", "1")
    spec = programs.spec("/usr/bin/env", env={"A": "b c", "PATH": "/usr/bin"})
    handle = start(spec)
    assert (await handle.wait()).status == 0
    assert sorted(handle.tail(99)) == ["A=b c", f"LLMGW_NONCE={spec.nonce}", "PATH=/usr/bin"]


async def test_what_it_inherits_besides(programs: Programs) -> None:
    script = (
        "import os, resource, signal\n"
        "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))\n"
        "print(os.readlink('/proc/self/fd/0'), oct(os.umask(0)), os.getcwd())\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "status = dict(line.split(':\\t', 1) for line in lines if ':\\t' in line)\n"
        "print(status['NoNewPrivs'], int(status['SigBlk'], 16), resource.getrlimit(resource.RLIMIT_CORE))\n"
        "print(open('/proc/self/oom_score_adj').read().strip())\n"
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        handle = start(programs.python(script, cwd="/usr", oom_score_adj=321))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    assert (await handle.wait()).status == 0
    assert handle.tail(99) == ["[0, 1, 2] 4", "/dev/null 0o77 /usr", "1 0 (0, 0)", "321"]


async def test_it_does_not_inherit_the_standing_of_its_reaper(programs: Programs) -> None:
    handle = start(programs.shell("cat /proc/self/oom_score_adj; grep SigIgn /proc/self/status"))
    await handle.wait()
    own = Path("/proc/self/oom_score_adj").read_text().strip()
    score, ignored = handle.tail(9)
    assert score == own
    libcs_own = 1 << 31 | 1 << 32  # signals 32 and 33: nobody can set them, and some starters hand them down
    assert int(ignored.removeprefix("SigIgn:\t"), 16) & ~libcs_own == 0


@pytest.mark.parametrize(
    ("script", "status", "name"),
    [("exit 0", 0, None), ("exit 3", 3, None), ("kill -SEGV $$", None, "SIGSEGV"), ("kill -KILL $$", None, "SIGKILL")],
)
async def test_how_it_ended_is_told(programs: Programs, script: str, status: int | None, name: str | None) -> None:
    handle = start(programs.shell(f"echo last words; {script}"))
    ended = await handle.wait()
    assert (ended.status, ended.signal, ended.oom, ended.asked, ended.error) == (status, name, False, False, None)
    assert handle.tail(1) == ["last words"]
    assert find(handle.record_dir) is not None
    assert handle.ended() == ended


async def test_stopping_reaches_the_whole_group_and_those_that_left_it(programs: Programs) -> None:
    script = "sleep 600 & (setsid sleep 600 &) ; setsid setsid sh -c 'sleep 600; true' & echo up; wait"
    handle = start(programs.shell(script))
    eventually(lambda: shown(handle, "up"))
    eventually(lambda: len(holders(handle.record.program.nonce)) >= 6, "all children")
    ended = await handle.stop(10)
    assert ended.signal == "SIGTERM"
    assert ended.asked
    assert holders(handle.record.program.nonce) == ()


async def test_children_that_hide_their_nonce_are_killed_too(programs: Programs) -> None:
    """What descends from the program is known by descent: neither session nor environment matter."""
    script = "setsid env -i sleep 600 & echo $!; exec sleep 600"
    handle = start(programs.shell(script))
    child = int(eventually(lambda: handle.tail(1))[0])
    eventually(lambda: (stat := read_stat(child)) and stat.session == child)
    os.kill(handle.pid, signal.SIGKILL)
    assert (await handle.wait()).signal == "SIGKILL"
    assert read_stat(child) is None


async def test_after_a_crash_nothing_is_left(programs: Programs) -> None:
    handle = start(programs.python("import os, subprocess; subprocess.Popen(['setsid', 'sleep', '600']); os.abort()"))
    assert (await handle.wait()).signal == "SIGABRT"
    assert holders(handle.record.program.nonce) == ()


async def test_who_ignores_sigterm_is_killed_after_the_timeout(programs: Programs) -> None:
    handle = start(programs.python(STUBBORN))
    eventually(lambda: shown(handle, "up"))
    began = os.times().elapsed
    ended = await handle.stop(0.3)
    assert os.times().elapsed - began >= 0.3
    assert ended.signal == "SIGKILL"
    assert ended.asked
    assert not ended.oom


async def test_it_is_asked_once_however_often_it_is_stopped(programs: Programs) -> None:
    script = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'asked\\n'))\n"
        "os.write(1, b'up\\n')\n"
        "end = time.monotonic() + 600\n"
        "while time.monotonic() < end: time.sleep(600)\n"
    )
    handle = start(programs.python(script))
    eventually(lambda: shown(handle, "up"))
    handle._signal(signal.SIGTERM)
    eventually(lambda: shown(handle, "asked"))
    await handle.stop(0.3)
    assert handle.tail(9) == ["up", "asked"]
    assert await handle.stop(5) == handle.ended()  # idempotent


@pytest.mark.parametrize(
    ("argv", "more", "words"),
    [
        (("/no/such/engine",), {}, "/no/such/engine can't be run: No such file or directory"),
        (("/etc/passwd",), {}, "/etc/passwd can't be run: Permission denied"),
        (("no-such-engine",), {"env": {"PATH": "/usr/bin"}}, "no-such-engine can't be run: No such file"),
        (
            ("/bin/true",),
            {"cwd": "/no/such/place"},
            "can't enter the directory to run in, /no/such/place: No such file or directory",
        ),
        (("/bin/true",), {"reads": ("/no/weights.gguf",)}, "may not read /no/weights.gguf (No such file or directory)"),
    ],
)
def test_what_can_not_be_started_is_refused_in_words(
    programs: Programs, argv: tuple[str, ...], more: dict[str, object], words: str
) -> None:
    spec = programs.spec(*argv, **more)
    with pytest.raises(StartError) as refused:
        start(spec)
    assert words in str(refused.value)
    with pytest.raises(StartError) as again:
        find(spec.record_dir)
    assert str(again.value) == str(refused.value)
    eventually(lambda: holders(spec.nonce) == (), "the reaper going")


def test_a_record_directory_serves_one_start(programs: Programs) -> None:
    spec = programs.shell("exit 0")
    start(spec)
    with pytest.raises(StartError, match=r"already holds the record\.json of another start"):
        start(spec)


def test_a_user_that_is_not_there_is_refused(programs: Programs) -> None:
    with pytest.raises(StartError, match="there is no user llmgw-nobody-knows on this machine; make it: useradd"):
        start(programs.spec("/bin/true", user="llmgw-nobody-knows"))


async def test_output_turns_over_and_the_program_notices_nothing(programs: Programs) -> None:
    spec = programs.shell(
        "i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i+1)); done", log_limit_bytes=10_000, logs_kept=9
    )
    handle = start(spec)
    assert (await handle.wait()).status == 0
    assert handle.tail(9999) == [f"line {number}" for number in range(5000)]
    assert len(os.listdir(Path(spec.log_path).parent)) > 4


@needs_root
async def test_a_full_disk_under_the_output_does_not_hold_the_program_up(programs: Programs, small_disk: Path) -> None:
    flood = "for number in range(50_000): print('x' * 99)\nprint('end')"
    spec = programs.python(flood, log_path=str(small_disk / "output.log"), record_dir=str(small_disk / "record"))
    ended = await start(spec).wait()  # its record lies on the full disk as well
    assert (ended.status, ended.error) == (0, None)
    assert 4_700_000 < ended.lost_output_bytes < 5_000_010


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTSTP])
async def test_the_reaper_shrugs_off(programs: Programs, number: signal.Signals) -> None:
    handle = start(programs.shell("trap 'echo again' USR2; echo up; while :; do sleep 0.01; done"))
    eventually(lambda: shown(handle, "up"))
    os.kill(handle.record.reaper.pid, number)
    os.kill(handle.pid, signal.SIGUSR2)
    eventually(lambda: shown(handle, "again"), "output after the signal")
    assert handle.running()
    await handle.stop(10)


def test_it_outlives_its_starter_its_group_and_its_terminal(programs: Programs) -> None:
    """A starter in a terminal; the terminal hangs up, and the starter's whole group is killed."""
    spec = programs.shell("exec sleep 600")
    script = (
        "import json, sys, time; from llmgw.process.detached import DetachedSpec, start\n"
        "fields = json.loads(sys.argv[1]); fields['argv'] = tuple(fields['argv'])\n"
        "print(start(DetachedSpec(**fields)).pid, flush=True); time.sleep(600)\n"
    )
    starter, terminal = pty.fork()
    if starter == 0:
        os.execv(sys.executable, [sys.executable, "-c", script, json.dumps(asdict(spec))])
    said = eventually(lambda: os.read(terminal, 100)).decode()
    os.write(terminal, b"\x03")  # Ctrl-C
    os.close(terminal)  # and the terminal hangs up
    os.killpg(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    handle = find(spec.record_dir)
    assert handle is not None
    assert handle.pid == int(said)
    assert handle.running()


def test_a_spec_that_nobody_took_is_never_obeyed(programs: Programs) -> None:
    spec = programs.shell("exec sleep 600")
    write_spec(spec)  # the starter is killed here
    assert find(spec.record_dir) is None
    run(*detached._REAPER, spec.record_dir, LLMGW_NONCE=spec.nonce)  # and its order arrives late
    # What ends has lost its environment a moment before its lock.
    eventually(lambda: not holders(spec.nonce) and not lock_is_held(spec.record_dir), "the late reaper going")
    assert find(spec.record_dir) is None


async def test_a_start_that_is_under_way_is_waited_for(programs: Programs) -> None:
    spec = programs.shell("exec sleep 600")
    write_spec(spec)
    process = await asyncio.create_subprocess_exec(
        *detached._REAPER, spec.record_dir, env={"LLMGW_NONCE": spec.nonce}, start_new_session=True
    )
    eventually(lambda: not Path(spec.record_dir, "spec.json").exists(), "the reaper taking the spec")
    handle = find(spec.record_dir)
    assert handle is not None
    assert handle.running()
    assert await process.wait() == 0
    await handle.stop(10)


def test_a_reaper_killed_before_it_recorded_leaves_no_program(programs: Programs, tmp_path: Path) -> None:
    """The child waits to be on record; without its reaper it goes."""
    spec = programs.shell(f"touch {tmp_path}/ran; exec sleep 600")
    write_spec(spec)
    os.mkdir(Path(spec.record_dir) / ".record.json.draft")  # the record can't be written
    run(*detached._REAPER, spec.record_dir, LLMGW_NONCE=spec.nonce)
    eventually(lambda: holders(spec.nonce) == ())
    with pytest.raises(StartError, match="Is a directory"):
        find(spec.record_dir)
    assert not (tmp_path / "ran").exists()


async def test_a_program_that_overwrites_its_environment_is_still_known_by_its_reaper(programs: Programs) -> None:
    """Some set their title there, which wipes the nonce out (setproctitle does, unless SPT_NOENV is set)."""
    script = (
        "import os, time\n"
        "fields = open('/proc/self/stat').read().rsplit(')')[1].split()\n"
        "start, end = int(fields[47]), int(fields[48])\n"
        "memory = open('/proc/self/mem', 'r+b', 0); memory.seek(start); memory.write(b'x' * (end - start))\n"
        "os.write(1, b'done\\n'); time.sleep(600)\n"
    )
    handle = start(programs.python(script))
    eventually(lambda: shown(handle, "done"))
    assert nonce_of(handle.pid) is None
    again = find(handle.record_dir)
    assert again is not None
    assert again.running()
    assert (await again.stop(10)).signal == "SIGTERM"
    assert read_stat(handle.pid) is None


async def test_a_killed_reaper_has_a_successor(programs: Programs, tmp_path: Path) -> None:
    """What the program writes while it has none waits in its pipe: not a line of it is lost."""
    turns = tmp_path / "turns"
    os.mkfifo(turns, 0o666)
    turns.chmod(0o666)
    handle = start(programs.shell(f"i=0; while read -r _; do i=$((i+1)); echo line $i; done <{turns}; exec sleep 600"))
    with turns.open("w") as program:

        def has_written(lines: int) -> None:
            program.write("\n" * 10)
            program.flush()
            eventually(lambda: len(handle.tail(10_000)) == lines)

        has_written(10)
        for lines in (30, 50):
            killed = handle.record.reaper
            os.kill(killed.pid, signal.SIGKILL)
            eventually(lambda: not alive(killed))  # noqa: B023
            assert handle.ended() is None
            program.write("\n" * 10)
            program.flush()
            handle.mend()
            assert handle.record.reaper != killed
            has_written(lines)
    assert await handle.stop(10) == ExitRecord(asked=True, ended_at=handle.ended().ended_at)  # type: ignore[union-attr]
    assert handle.tail(10_000) == [f"line {number + 1}" for number in range(50)]


async def test_whoever_waits_gives_it_a_successor(programs: Programs) -> None:
    handle = start(programs.shell("sleep 600 & exec sleep 600"))
    eventually(lambda: len(holders(handle.record.program.nonce)) == 3)
    other = find(handle.record_dir)
    assert other is not None
    os.kill(handle.record.reaper.pid, signal.SIGKILL)
    os.kill(handle.pid, 0)
    ended = await other.stop(10)
    assert not ended.seen
    assert holders(handle.record.program.nonce) == ()


async def test_what_a_program_leaves_whose_reaper_was_killed_too_is_cleared_away(programs: Programs) -> None:
    handle = start(programs.shell("setsid sleep 600 & echo up; exec sleep 600"))
    eventually(lambda: shown(handle, "up") and len(holders(handle.record.program.nonce)) == 3)
    for process in (handle.record.reaper, handle.record.program):
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: not alive(process))  # noqa: B023
    assert len(holders(handle.record.program.nonce)) == 1
    assert not (await handle.wait()).seen
    assert holders(handle.record.program.nonce) == ()


async def test_a_record_of_another_boot_signals_nobody(programs: Programs) -> None:
    """The same pids live on, as other people's: after a restart of the machine they could be anybody's."""
    handle = start(programs.shell("exec sleep 600"))
    path = Path(handle.record_dir) / "record.json"
    record = json.loads(path.read_text())
    for who in ("program", "reaper"):
        record[who]["boot_id"] = "00000000-0000-4000-8000-000000000000"
    kept = path.read_text()
    path.write_text(json.dumps(record))
    other = find(handle.record_dir)
    assert other is not None
    other._signal(signal.SIGKILL)
    assert alive(handle.record.program)
    path.write_text(kept)
    await handle.stop(10)


@pytest.mark.parametrize("garbage", ["{", "[]", "{}", '{"program": 5}', "\x00\xff", '{"program": {"pid": 1}}'])
async def test_garbage_is_refused_and_nothing_is_signalled(programs: Programs, garbage: str) -> None:
    handle = start(programs.shell("exec sleep 600"))
    path = Path(handle.record_dir) / "record.json"
    kept = path.read_text()
    path.write_text(garbage)
    with pytest.raises(RecordError, match=r"record\.json"):
        find(handle.record_dir)
    assert handle.running()
    path.write_text(kept)
    await handle.stop(10)


def test_nothing_is_found_where_nothing_was_started(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(tmp_path / "not even there") is None
    assert not void_spec(tmp_path)
    assert not lock_is_held(tmp_path)


def test_secrets_do_not_stay_on_the_disk(programs: Programs) -> None:
    spec = programs.shell("exec sleep 600", env={"API_KEY": "sk-very-secret"})
    start(spec)
    for path in Path(spec.record_dir).iterdir():
        if path.is_file():
            assert b"sk-very-secret" not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0


@needs_root
async def test_memory_running_out_is_told_from_a_plain_kill(programs: Programs) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"llmgw-test-{os.getpid()}"
    if not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists():
        pytest.skip("needs the memory controller of control groups v1")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 * 1024 * 1024))
        hungry = programs.python("print('eating'); held = [b'x' * 2**20 for _ in range(256)]", oom_score_adj=1000)
        plain = programs.shell("kill -KILL $$")
        script = (
            "import json, os, sys; from llmgw.process.detached import DetachedSpec, start\n"
            "open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "for text in sys.argv[2:]:\n"
            "    fields = json.loads(text); fields['argv'] = tuple(fields['argv']); start(DetachedSpec(**fields))\n"
        )
        specs = [json.dumps(asdict(spec)) for spec in (plain, hungry)]
        run(sys.executable, "-c", script, group, *specs)
        for spec, oom in ((plain, False), (hungry, True)):
            handle = find(spec.record_dir)
            assert handle is not None
            ended = await handle.wait()
            assert (ended.signal, ended.oom) == ("SIGKILL", oom)
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text().strip(), "the group emptying")
        group.rmdir()


async def test_many_at_once(programs: Programs) -> None:
    specs = [programs.shell(f"echo {number}; exec sleep 600") for number in range(20)]
    handles = await asyncio.gather(*(asyncio.to_thread(start, spec) for spec in specs))
    for number, handle in enumerate(handles):
        eventually(lambda: handle.tail(1) == [str(number)])  # noqa: B023
        assert nonce_of(handle.pid) == handle.record.program.nonce
        assert identify(handle.pid) == handle.record.program
    ends = await asyncio.gather(*(handle.stop(10) for handle in handles))
    assert {ended.signal for ended in ends} == {"SIGTERM"}
    assert all(read_exit(handle.record_dir) for handle in handles)
