from __future__ import annotations

import pytest

from llmgw.process.memory import says_killed

GLOBAL = "3,1094,5012345678,-;Out of memory: Killed process 812 (llama-server) total-vm:1234kB, anon-rss:99kB"
GROUP = "3,1095,5012345678,-;Memory cgroup out of memory: Killed process 812 (python3) total-vm:1kB, UID:999"
OTHER = "6,1096,5012345678,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=llama-server,pid=812,uid=0"


@pytest.mark.parametrize("record", [GLOBAL, GROUP])
def test_the_kernel_names_whom_it_killed(record: str) -> None:
    assert says_killed(record, 812, since_boot_s=5000.0)


@pytest.mark.parametrize(
    ("record", "pid", "since_s"),
    [
        (GLOBAL, 81, 5000.0),
        (GLOBAL, 8120, 5000.0),
        (GLOBAL, 812, 5013.0),  # an earlier process with that number
        (OTHER, 812, 0.0),
        ("", 812, 0.0),
        ("garbage", 812, 0.0),
        ("3,1,x,-;Killed process 812 (a)", 812, 0.0),
    ],
)
def test_nobody_else_is_taken_for_killed(record: str, pid: int, since_s: float) -> None:
    assert not says_killed(record, pid, since_s)
