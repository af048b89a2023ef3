"""GPUs through nvidia-smi's CSV."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmgw.agent.discovery.files import names_in, read_text
from llmgw.agent.discovery.gpus import Device
from llmgw.agent.discovery.probe import Output, ProbeHung, ProbeMissing, run_probe
from llmgw.agent.discovery.smi_text import (
    CORE_FIELDS,
    FIELDS,
    HOLDER_FIELDS,
    MEMORY_FIELDS,
    explain_failure,
    explain_status,
    parse_devices,
    parse_driver,
    parse_holders,
    parse_instances,
    parse_lost,
    parse_memory,
)
from llmgw.agent.discovery.topology_text import GpuLinks, parse_topology

_BAD_FIELD = 2


class SmiFailed(Exception):
    """nvidia-smi gave no GPUs. The message has its words and what to do."""


@dataclass(frozen=True, slots=True)
class SmiAnswer:
    devices: tuple[Device, ...]
    driver: str | None
    warnings: tuple[str, ...] = ()
    links_known: bool = False
    """It said how its GPUs are joined. Always so for a single one."""


def find_nvidia_smi(stated: str | None) -> str | None:
    """Where nvidia-smi is. A stated one that is not there is given back as it is; None: none stated, none on PATH."""
    return shutil.which(stated) or stated if stated else shutil.which("nvidia-smi")


async def ask_nvidia_smi(path: str, limit_s: float, root: Path) -> SmiAnswer:
    """Raises SmiFailed, ProbeMissing, or ProbeHung. ``limit_s`` is for all of its calls together."""
    smi = _Smi(path, time.monotonic() + limit_s)
    fields: Sequence[str] = FIELDS
    output = await smi.query(fields)
    if output.status == _BAD_FIELD:  # an old driver that lacks one of the others
        fields = CORE_FIELDS
        output = await smi.query(fields)
    devices = parse_devices(output.stdout, fields)
    lost = parse_lost(output.stdout + "\n" + output.stderr)
    if lost and not devices and (others := _bus_ids(root) - lost.keys()):
        # One GPU without a handle ends the whole query: ask again for the others.
        output = await smi.query(fields, only=sorted(others))
        devices = parse_devices(output.stdout, fields)
    if not devices and not lost:
        if output.status == 0 and not output.stdout.strip():
            return SmiAnswer((), None, (f"{path} ended well but printed no GPU",))
        raise SmiFailed(explain_failure(output.status, output.stdout + "\n" + output.stderr))
    if any(device.mig for device in devices):
        devices = _with_instances(devices, (await smi.run("-L")).stdout)
    warning = explain_status(output.status) if not lost else None
    warnings = (f"nvidia-smi: {warning}",) if warning else ()
    driver = parse_driver(output.stdout, fields)
    known, of_links = True, ""
    if len(devices) > 1:
        devices, known, of_links = await _with_links(smi, devices)
        of_links = "" if lost else of_links  # what is lost is said already
    devices = _with_lost(devices, lost, root)
    return SmiAnswer(devices, driver, (*warnings, of_links) if of_links else warnings, links_known=known)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    used_bytes: int
    total_bytes: int
    holders: tuple[str, ...] = ()
    """Processes that the driver names, as "pid 4242 (python)"; it may name none."""


async def ask_memory(path: str, uuids: Sequence[str], limit_s: float) -> Mapping[str, MemoryUse]:
    """How full the memory of these GPUs is, by UUID; those of which the driver does not say it are left out.

    Raises ProbeMissing, or ProbeHung. ``limit_s`` is for all of its calls together.
    """
    smi = _Smi(path, time.monotonic() + limit_s)
    memory = parse_memory((await smi.query(MEMORY_FIELDS, only=uuids)).stdout)
    if not any(used for used, _ in memory.values()):
        return {uuid: MemoryUse(used, total) for uuid, (used, total) in memory.items()}
    asked = f"--query-compute-apps={','.join(HOLDER_FIELDS)}"
    holders = parse_holders((await smi.run(asked, "--format=csv,noheader,nounits")).stdout)
    return {uuid: MemoryUse(used, total, holders.get(uuid, ())) for uuid, (used, total) in memory.items()}


@dataclass(frozen=True, slots=True)
class _Smi:
    path: str
    deadline: float

    async def query(self, fields: Sequence[str], only: Sequence[str] = ()) -> Output:
        chosen = (f"--id={','.join(only)}",) if only else ()
        return await self.run(*chosen, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")

    async def run(self, *arguments: str) -> Output:
        return await run_probe(
            "nvidia-smi", (os.fspath(self.path), *arguments), max(0.1, self.deadline - time.monotonic())
        )


async def _with_links(smi: _Smi, devices: tuple[Device, ...]) -> tuple[tuple[Device, ...], bool, str]:
    """The devices with what joins them, whether that is known, and what went wrong. GPUs are GPUs without it."""
    try:
        output = await smi.run("topo", "-m")
    except (ProbeHung, ProbeMissing) as error:
        return devices, False, f"how the GPUs are joined is not known: nvidia-smi topo -m: {error}"
    links = parse_topology(output.stdout)
    if not links:
        said = f"{output.stdout}\n{output.stderr}"
        # Stand-ins print the CSV whatever they are asked, or fail without a word: nothing is wrong with these.
        if output.status == 0 or not said.strip() or parse_devices(output.stdout):
            return devices, False, ""
        return devices, False, f"how the GPUs are joined is not known: {explain_failure(output.status, said)}"
    return tuple(_linked(device, links.get(device.index)) for device in devices), True, ""


def _linked(device: Device, links: GpuLinks | None) -> Device:
    return device if links is None else replace(device, nvlink_peers=links.nvlink_peers, numa_node=links.numa_node)


def _with_instances(devices: Sequence[Device], listing: str) -> tuple[Device, ...]:
    instances = parse_instances(listing)
    return tuple(replace(device, instances=instances.get(device.uuid, ())) for device in devices)


def _with_lost(devices: tuple[Device, ...], lost: Mapping[str, str], root: Path) -> tuple[Device, ...]:
    """Adds what can't be asked any more, as far as the kernel module remembers it."""
    order = sorted(_bus_ids(root) | lost.keys())
    gone = [
        _remembered(bus_id, words, order.index(bus_id), root)
        for bus_id, words in lost.items()
        if bus_id not in {device.bus_id for device in devices}
    ]
    return tuple(sorted((*devices, *gone), key=lambda device: device.index))


def _remembered(bus_id: str, words: str, index: int, root: Path) -> Device:
    lines = (read_text(root / "proc/driver/nvidia/gpus" / bus_id / "information") or "").splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    uuid = facts.get("GPU UUID", "")
    return Device(
        index=index,
        uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else f"unknown-{index}",
        name=facts.get("Model") or "unknown",
        memory_bytes=None,
        bus_id=bus_id,
        problem=words,
    )


def _bus_ids(root: Path) -> frozenset[str]:
    return frozenset(names_in(root / "proc/driver/nvidia/gpus"))
