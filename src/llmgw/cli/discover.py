"""``llmgw agent discover``: what this machine is, without a control plane."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llmgw.agent.discovery import (
    DiscoveryRefused,
    DiscoverySettings,
    boot_id,
    discover,
    machine_fingerprint,
    read_vitals,
    settings_of,
)
from llmgw.cluster.model import Gpu, Hca, Inventory, Vitals
from llmgw.config import ConfigError, load_agent


def run_discover(config_path: Path | None, as_json: bool) -> int:
    """Prints what is found out, looking as the file at ``config_path`` says. Returns the exit status."""
    try:
        settings = DiscoverySettings() if config_path is None else settings_of(load_agent(config_path))
        inventory = asyncio.run(discover(settings))
    except (ConfigError, DiscoveryRefused) as error:
        print(error, file=sys.stderr)
        return 1
    vitals = read_vitals(settings.weights_dir, settings.root)
    if as_json:
        answer = {
            "inventory": asdict(inventory),
            "vitals": asdict(vitals),
            "fingerprint": machine_fingerprint(settings.root),
            "boot_id": boot_id(settings.root),
        }
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        Console(highlight=False).print(render(inventory, vitals, settings.weights_dir))
    return 0


def render(inventory: Inventory, vitals: Vitals, weights_dir: Path) -> RenderableType:
    """The table form. Made for 80 columns and more: long words wrap inside their own column."""
    parts: list[RenderableType] = [_machine(inventory, vitals, weights_dir)]
    parts += _section(f"GPUs ({inventory.gpu_source})", _gpus(inventory.gpus) if inventory.gpus else None)
    parts += _section("InfiniBand and RoCE ports", _hcas(inventory.hcas) if inventory.hcas else None)
    parts += _section("Fabrics, as stated", _fabrics(inventory) if inventory.fabrics else None)
    parts += _section("Warnings", _bullets(inventory.warnings) if inventory.warnings else None)
    return Group(*parts)


def _machine(inventory: Inventory, vitals: Vitals, weights_dir: Path) -> RenderableType:
    cpu = inventory.cpu
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    interface = f" on {inventory.mgmt_interface}" if inventory.mgmt_interface else ""
    rows: list[tuple[str, str]] = [
        ("Hostname", inventory.hostname),
        ("Management", f"{inventory.mgmt_addr}{interface}"),
        ("System", f"{inventory.os}, Linux {inventory.kernel}, {inventory.libc}"),
        ("Processor", f"{cpu.model} ({cpu.architecture}), {cpu.cores} cores"),
        ("Extensions", " ".join(cpu.extensions) or "none"),
        ("Memory", f"{_size(vitals.memory_available_bytes)} free of {_size(vitals.memory_bytes)}"),
        ("Disk", f"{_size(vitals.disk_free_bytes)} free of {_size(vitals.disk_bytes)} at {weights_dir}"),
        ("Load", f"{vitals.load_1m:.2f}"),
        ("Ports", str(inventory.ports)),
        ("NVIDIA driver", inventory.driver or "none"),
    ]
    if inventory.labels:
        rows.append(("Labels", ", ".join(f"{key}={value}" for key, value in sorted(inventory.labels.items()))))
    if groups := _nvlink(inventory.gpus):
        rows.append(("NVLink", groups))
    if not inventory.gpus:
        rows.append(("GPUs", "none"))
    if not inventory.hcas:
        rows.append(("InfiniBand", "none"))
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _gpus(gpus: Iterable[Gpu]) -> RenderableType:
    table = _table("#", "Name and UUID", "Memory", "NVLink", "NUMA", "State")
    table.columns[1].no_wrap = True
    for gpu in gpus:
        memory = "unknown" if gpu.memory_bytes is None else _size(gpu.memory_bytes)
        table.add_row(
            str(gpu.index),
            Text(gpu.name).append(f"\n{gpu.uuid}", style="dim"),
            f"{memory}, shared" if gpu.memory_shared else memory,
            _maybe(gpu.nvlink_group),
            _maybe(gpu.numa_node),
            _state(gpu.problem),
        )
    return table


def _hcas(hcas: Iterable[Hca]) -> RenderableType:
    table = _table("Port", "State", "Link", "Gb/s", "Layer", "NUMA", "Remark")
    for hca in hcas:
        table.add_row(
            f"{hca.name}/{hca.port}",
            hca.state,
            hca.phys_state,
            "-" if hca.rate_gbps is None else f"{hca.rate_gbps:g}",
            hca.link_layer,
            _maybe(hca.numa_node),
            _state(hca.problem),
        )
    return table


def _nvlink(gpus: Iterable[Gpu]) -> str:
    """Such as "group 0: GPUs 0-3; group 1: GPUs 4-7"; empty where NVLink joins none."""
    groups: dict[int, list[int]] = {}
    for gpu in gpus:
        if gpu.nvlink_group is not None:
            groups.setdefault(gpu.nvlink_group, []).append(gpu.index)
    return "; ".join(f"group {number}: GPUs {_ranges(indices)}" for number, indices in sorted(groups.items()))


def _ranges(numbers: Iterable[int]) -> str:
    """ "0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _fabrics(inventory: Inventory) -> RenderableType:
    table = _table("Name", "Ports", "Gb/s", "Subnet", "Replicas over several nodes")
    for fabric in inventory.fabrics:
        rate = "-" if fabric.rate_gbps is None else f"{fabric.rate_gbps:g}"
        ports = [hca for hca in inventory.hcas if hca.name in fabric.hcas]
        names = Text("\n".join(f"{hca.name}/{hca.port}" for hca in ports) or ", ".join(fabric.hcas))
        table.add_row(Text(fabric.name), names, rate, "\n".join(_subnets(ports)) or "-", _fit(ports))
    return table


def _subnets(ports: Iterable[Hca]) -> list[str]:
    """Prefixes of the InfiniBand subnets: nodes whose prefixes differ are not on one network, whatever is stated."""
    gids = (hca.gid for hca in ports if hca.gid is not None and hca.link_layer == "InfiniBand")
    return sorted({gid[:19] for gid in gids})


def _fit(ports: Iterable[Hca]) -> Text:
    bad = [f"{hca.name}/{hca.port} is {hca.state}" for hca in ports if not hca.usable]
    unread = [f"{hca.name}/{hca.port}" for hca in ports if hca.state == "unknown"]
    if bad:
        return Text(f"no: {', '.join(bad)}", style="red")
    return Text(f"unverified: {', '.join(unread)}", style="yellow") if unread else Text("yes", style="green")


def _bullets(lines: Iterable[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("!", Text(line), style="yellow")
    return table


def _section(title: str, body: RenderableType | None) -> list[RenderableType]:
    return [] if body is None else [Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _state(problem: str | None) -> Text:
    return Text("ok", style="green") if problem is None else Text(problem, style="red")


def _maybe(value: int | None) -> str:
    return "-" if value is None else str(value)


def _size(count: int) -> str:
    """Three digits are enough for people; -o json has the bytes."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 100 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 100 else f"{size:.0f} TiB"
