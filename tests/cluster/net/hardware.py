"""What a node's drivers would say: a program in nvidia-smi's place, and adapters as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

from tests.agent.discovery.machines import write_port, write_script

FIELDS = "index,uuid,name,memory.total,driver_version,pci.bus_id,mig.mode.current"


def write_gpus(folder: Path, node: str, count: int) -> str:
    """A program that names ``count`` GPUs, each with a UUID that no other node has."""
    rows = "\n".join(
        f"{index}, GPU-{node}-{index:04d}-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 81559, 570.86.15, "
        f"00000000:{index + 16:02X}:00.0, Disabled"
        for index in range(count)
    )
    head = "".join(f"\tGPU{index}" for index in range(count))
    links = "\n".join(
        f"GPU{row}" + "".join("\t X " if row == column else "\tNV18" for column in range(count)) + "\t0-31\t0\t\tN/A"
        for row in range(count)
    )
    body = (
        f'case "$*" in\n*--query-gpu={FIELDS}*) cat <<"END"\n{rows}\nEND\nexit 0;;\n'
        f'"topo -m") cat <<"END"\n{head}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n{links}\nEND\nexit 0;;\nesac\n'
        f'echo "Field is not a valid field to query." >&2; exit 2'
    )
    return write_script(folder / "nvidia-smi", body)


def write_adapters(folder: Path, number: int, count: int = 2) -> Path:
    """``mlx5_0`` and so on, one active port each, on the subnet that every fabric has by default."""
    ib_root = folder / "infiniband"
    for index in range(count):
        gid = f"fe80:0000:0000:0000:b83f:d203:00{number:02x}:{index:04x}"
        write_port(ib_root, f"mlx5_{index}", gids={0: gid})
    return ib_root


def set_port_state(ib_root: Path, adapter: str, state: str) -> None:
    (ib_root / adapter / "ports" / "1" / "state").write_text(state + "\n")
