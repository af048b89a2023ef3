"""The machine that the tests run on, read without the agent's own discovery."""

from __future__ import annotations

import platform
from pathlib import Path

from llmgw.cluster.model import Cpu, Inventory


def _extensions() -> tuple[str, ...]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return tuple(flag for flag in line.split() if flag in ("avx2", "fma", "f16c", "avx512f"))
    return ()


THIS_MACHINE = Inventory(
    hostname="here",
    os="Linux",
    kernel=platform.release(),
    libc=" ".join(platform.libc_ver()),
    cpu=Cpu(model="this processor", architecture=platform.machine(), cores=2, extensions=_extensions()),
    memory_bytes=1 << 34,
    mgmt_addr="127.0.0.1",
)
