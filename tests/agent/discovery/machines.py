"""Machines as file trees, and stand-ins for nvidia-smi as real programs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
MACHINE_ID = "3d1219c7c4c5404aaa1f6d2a48adfda4"
GIB = 1 << 30


def fixture(path: str) -> str:
    return (FIXTURES / path).read_bytes().decode("utf-8", "replace")


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_machine(root: Path, *, cpu: str = "epyc_9354", os_release: str = "debian12", meminfo: str = "server") -> Path:
    """What every machine has; ``arch`` follows the processor."""
    arm = "Features" in fixture(f"cpuinfo/{cpu}")
    return write_tree(
        root,
        {
            "proc/cpuinfo": fixture(f"cpuinfo/{cpu}"),
            "proc/meminfo": fixture(f"meminfo/{meminfo}"),
            "proc/sys/kernel/arch": "aarch64\n" if arm else "x86_64\n",
            "proc/sys/kernel/hostname": "gpu-a-01\n",
            "proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
            "proc/sys/kernel/random/boot_id": "b892dadb-9748-4aba-b667-7724d6579ce8\n",
            "etc/os-release": fixture(f"os_release/{os_release}"),
            "etc/machine-id": MACHINE_ID + "\n",
        },
    )


def write_port(
    ib_root: Path,
    adapter: str,
    *,
    port: int = 1,
    state: str = "4: ACTIVE",
    phys_state: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
    link_layer: str = "InfiniBand",
    numa_node: str = "0",
    gids: Mapping[int, str] | None = None,
) -> Path:
    """One port of an adapter, as the kernel shows it. Returns the port's folder."""
    found = {0: "fe80:0000:0000:0000:b83f:d203:0012:3456", 1: ":".join(["0000"] * 8)} if gids is None else gids
    folder = ib_root / adapter / "ports" / str(port)
    write_tree(
        folder,
        {
            "state": state + "\n",
            "phys_state": phys_state + "\n",
            "rate": rate + "\n",
            "link_layer": link_layer + "\n",
            **{f"gids/{slot}": gid + "\n" for slot, gid in found.items()},
        },
    )
    write_tree(ib_root / adapter, {"node_type": "1: CA\n", "device/numa_node": numa_node + "\n"})
    return folder


def write_script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return os.fspath(path)


def write_nvidia_smi(folder: Path, answers: Mapping[str, tuple[int, str]]) -> str:
    """A program that answers by the first pattern (of sh's case, over all arguments) that fits: status and fixture."""
    cases = "\n".join(
        f"{pattern}) cat {shlex.quote(str(FIXTURES / 'nvidia_smi' / name))}; exit {status};;"
        for pattern, (status, name) in answers.items()
    )
    return write_script(folder / "nvidia-smi", f'case "$*" in\n{cases}\nesac\nexit 255')
