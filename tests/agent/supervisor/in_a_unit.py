"""What an agent does on a node where systemd runs. Started there by test_units.py; prints one JSON object a step."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from llmgw.agent.supervisor import ProcessSpec, Running, Supervisor
from llmgw.process.identity import holders
from llmgw.process.record import read_record

WORK_DIR = Path("/var/lib/llmgw-agent")
COUNTING = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.01; done"
STUBBORN = "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 600; true' & echo up; while :; do sleep 600; done"


def say(step: str, **facts: object) -> None:
    print(json.dumps({"step": step, **facts}), flush=True)


def groups(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def name(running: Running) -> str:
    return f"{running.shard_id}/{running.part}".rstrip("/")


def units() -> list[str]:
    command = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "llmgw-shard-*"]
    return [line.split()[0] for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]


def reaper_of(running: Running) -> int:
    (path,) = WORK_DIR.glob(f"processes/{running.shard_id.replace('/', '%2F')}/{running.generation}/record")
    record = read_record(path)
    assert record is not None
    return record.reaper.pid


async def first() -> None:
    """Starts engines, and is killed with its whole control group."""
    supervisor = Supervisor(work_dir=WORK_DIR, log_lines=512, stop_timeout_s=1)
    await supervisor.adopt()
    scripts = {
        "counting/0": COUNTING,
        "stubborn/0": STUBBORN,
        "crashing/0": "echo bye; exit 7",
        "orphan/0": "exec sleep 600",
    }
    for shard_id, script in scripts.items():
        await supervisor.start(ProcessSpec(shard_id=shard_id, generation=1, argv=("/bin/sh", "-c", script)))
    beside = ProcessSpec(shard_id="counting/0", generation=1, part="ray", argv=("/bin/sh", "-c", "exec sleep 600"))
    await supervisor.start(beside)
    await supervisor.wait("crashing/0")
    found = supervisor.running()
    say(
        "first",
        warnings=supervisor.warnings(),
        pids={name(one): one.pid for one in found},
        users=sorted({os.stat(f"/proc/{one.pid}").st_uid for one in found}),
        groups={name(one): groups(one.pid) for one in found},
        own=groups(os.getpid()),
        units=units(),
    )
    os.killpg(0, signal.SIGKILL)


async def second() -> None:
    """Adopts them, sees one fall over and stops the others."""
    supervisor = Supervisor(work_dir=WORK_DIR, log_lines=512, stop_timeout_s=1)
    found = {name(one): one for one in await supervisor.adopt()}
    say(
        "adopted",
        pids={each: one.pid for each, one in found.items()},
        ended={one.shard_id: [one.exit.status, list(one.exit.last_lines)] for one in supervisor.ended()},
    )
    os.kill(reaper_of(found["orphan/0"]), signal.SIGKILL)
    orphan = await supervisor.wait("orphan/0")
    counting, stubborn = await asyncio.gather(supervisor.stop("counting/0"), supervisor.stop("stubborn/0"))
    (log,) = WORK_DIR.glob("processes/counting*/1/log/output.log")
    lines = log.read_text().splitlines()
    say(
        "stopped",
        orphan=str(orphan),
        counting=counting.signal,
        stubborn=stubborn.signal,
        left=[process.pid for one in found.values() for process in holders(one.nonce)],
        output_complete=lines == [f"line {number + 1}" for number in range(len(lines))],
        units=units(),
    )


if __name__ == "__main__":
    asyncio.run({"first": first, "second": second}[sys.argv[1]]())
