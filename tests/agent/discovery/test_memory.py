from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.agent.discovery.cgroups import Limits, parse_membership, parse_number, parse_quota, parse_stat, read_limits
from llmgw.agent.discovery.memory import parse_meminfo, read_memory

from .machines import GIB, fixture, write_machine, write_tree

KIB = 1024


@pytest.mark.parametrize(
    ("name", "total", "available"),
    [
        ("server", 1056270840 * KIB, 985000000 * KIB),
        ("gb10", 127600748 * KIB, 118566368 * KIB),
        ("kernel_3_10", 8010408 * KIB, 4200000 * KIB),
        ("zero", None, None),
    ],
)
def test_meminfo(name: str, total: int | None, available: int | None) -> None:
    found = parse_meminfo(fixture(f"meminfo/{name}"))
    assert found[0] == total
    assert available is None or found[1] == available


@given(
    st.text() | st.lists(st.sampled_from(["MemTotal: 0 kB", "MemTotal: 12 kB", "MemAvailable: 99999 kB", "MemTotal:"]))
)
def test_no_text_raises_or_makes_memory_of_nothing(text: str | list[str]) -> None:
    total, available = parse_meminfo(text if isinstance(text, str) else "\n".join(text))
    assert total is None or total > 0
    assert total is None or available is None or available <= total


@pytest.mark.parametrize("meminfo", [None, "zero"])
def test_memory_that_meminfo_does_not_tell_is_the_kernels_count(meminfo: str | None, tmp_path: Path) -> None:
    if meminfo:
        write_machine(tmp_path, meminfo=meminfo)
    memory = read_memory(tmp_path, Limits())
    assert memory.total_bytes > 64 << 20
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_a_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
    root = write_machine(tmp_path)
    bounded = read_memory(root, Limits(memory_bytes=16 * GIB, memory_room_bytes=3 * GIB))
    assert (bounded.total_bytes, bounded.available_bytes) == (16 * GIB, 3 * GIB)
    above = read_memory(root, Limits(memory_bytes=4096 * GIB, memory_room_bytes=4096 * GIB))
    assert (above.total_bytes, above.available_bytes) == (1056270840 * KIB, 985000000 * KIB)


def test_limits_of_version_2_are_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    top = tmp_path / "sys/fs/cgroup"
    write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/llmgw.slice/agent\n",
            "sys/fs/cgroup/llmgw.slice/memory.max": f"{32 * GIB}\n",
            "sys/fs/cgroup/llmgw.slice/memory.current": f"{20 * GIB}\n",
            "sys/fs/cgroup/llmgw.slice/memory.stat": f"anon 5\nactive_file 7\ninactive_file {4 * GIB}\n",
            "sys/fs/cgroup/llmgw.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/llmgw.slice/agent/memory.max": "max\n",
            "sys/fs/cgroup/llmgw.slice/agent/cpu.max": "250000 100000\n",
        },
    )
    assert read_limits(tmp_path) == Limits(memory_bytes=32 * GIB, memory_room_bytes=16 * GIB, cpus=2.5)
    # In a container that sees its own group as the top.
    write_tree(top, {"memory.max": f"{8 * GIB}\n", "cpu.max": "100000 100000\n"})
    assert read_limits(tmp_path) == Limits(memory_bytes=8 * GIB, memory_room_bytes=8 * GIB, cpus=1.0)


def test_limits_of_version_1(tmp_path: Path) -> None:
    unlimited = "9223372036854771712\n"
    write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": unlimited,
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_limits(tmp_path) == Limits(memory_bytes=4 * GIB, memory_room_bytes=2 * GIB, cpus=4.0)


def test_the_agents_own_service_does_not_bound_engines_that_have_units_of_their_own(tmp_path: Path) -> None:
    unit = "sys/fs/cgroup/system.slice/llmgw-agent.service"
    write_tree(
        tmp_path,
        {"proc/self/cgroup": "0::/system.slice/llmgw-agent.service\n", f"{unit}/memory.max": f"{GIB}\n"},
    )
    assert read_limits(tmp_path).memory_bytes == GIB
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert read_limits(tmp_path).memory_bytes is None


def test_a_group_that_leaves_the_mount_is_not_followed(tmp_path: Path) -> None:
    write_tree(tmp_path, {"proc/self/cgroup": "0::/../../../etc\n", "etc/memory.max": "5\n"})
    assert read_limits(tmp_path / "sys") == Limits()
    assert read_limits(tmp_path) == Limits()


def test_membership_with_colons_in_its_path() -> None:
    assert parse_membership("9:name=systemd:/a:b\n4:cpu,cpuacct:/x\n0::/y") == {
        "name=systemd": "/a:b",
        "cpu": "/x",
        "cpuacct": "/x",
        "": "/y",
    }


@given(st.text())
@example("0\x1f")
def test_no_text_of_a_control_group_raises(text: str) -> None:
    parse_membership(text)
    number = parse_number(text)
    assert number is None or number >= 0
    assert parse_quota(text) is None or parse_quota(text) != 0
    parse_stat(text, "inactive_file")
