"""From what a driver said of its devices to the GPUs that placement counts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmgw.agent.discovery.files import read_text
from llmgw.cluster.model import Gpu, Inventory

# Parts whose memory is the machine's own. They report none, or (N1X) a small carve-out.
_UNIFIED = re.compile(r"\b(?:GB10|N1X?|Thor|Orin|Xavier|Tegra|Jetson)\b", re.IGNORECASE)
_BUS_ID = re.compile(r"(?:[0-9a-f]{4})?([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_KERNEL_MODULE = re.compile(r"Kernel Module\s+(?:for \S+\s+)?([0-9]+(?:\.[0-9]+)+)")

MIG_INDEX_STEP = 100
"""Instance 2 of GPU 0 has the index 102: MIG instances are numbered from (GPU + 1) x 100 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A slice of a GPU in MIG mode."""

    device: int
    uuid: str
    profile: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as its driver describes it. ``unsupported_memory``: the driver says it has no memory of its own."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    unsupported_memory: bool = False
    bus_id: str | None = None
    mig: bool = False
    instances: tuple[Instance, ...] = ()
    nvlink_peers: tuple[int, ...] = ()
    numa_node: int | None = None
    """As the driver has it; what the kernel says of the card's place on the bus comes first."""
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """``gpus`` is None where the driver could not say: not the same as having none."""

    gpus: tuple[Gpu, ...] | None = ()
    source: str = "none"
    driver: str | None = None
    warnings: tuple[str, ...] = ()


def to_gpus(devices: Sequence[Device], machine_memory_bytes: int, root: Path, architecture: str) -> tuple[Gpu, ...]:
    groups = nvlink_groups({device.index: device.nvlink_peers for device in devices})
    gpus: list[Gpu] = []
    for device in devices:
        gpu = _to_gpu(device, machine_memory_bytes, root, architecture, groups.get(device.index))
        gpus += [_instance_gpu(gpu, instance) for instance in device.instances] if device.instances else [gpu]
    return tuple(gpus)


def nvlink_groups(peers: Mapping[int, Iterable[int]]) -> Mapping[int, int]:
    """Devices that NVLink joins, directly or through one another, by number of their group; lone ones are left out."""
    group_of: dict[int, int] = {}
    number = 0
    for start in sorted(peers):
        if start in group_of:
            continue
        members, queue = {start}, [start]
        while queue:
            fresh = {peer for peer in peers.get(queue.pop(), ()) if peer in peers} - members
            members |= fresh
            queue += fresh
        if len(members) > 1:
            group_of |= dict.fromkeys(members, number)
            number += 1
    return group_of


def normal_bus_id(text: str) -> str | None:
    """The driver's "00000000:4F:00.0" as /sys has it: "0000:4f:00.0"."""
    match = _BUS_ID.fullmatch(text.strip())
    return "{}:{}:{}.{}".format(*match.groups()).lower() if match else None


def parse_driver_version(text: str) -> str | None:
    """From /proc/driver/nvidia/version."""
    match = _KERNEL_MODULE.search(text)
    return match[1] if match else None


def loaded_driver(root: Path) -> str | None:
    """Version of the NVIDIA kernel module that is loaded; None: there is none."""
    text = read_text(root / "proc/driver/nvidia/version")
    return None if text is None else parse_driver_version(text) or "unknown"


def warn_about_gpus(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    problems = tuple(f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}): {gpu.problem}" for gpu in gpus if gpu.problem)
    unknown = [
        str(gpu.index) for gpu in gpus if gpu.memory_bytes is None and not gpu.problem and "MIG-" not in gpu.uuid
    ]
    if unknown:
        return (*problems, f"the driver does not say how much memory GPU {', '.join(unknown)} has")
    return problems


def carried_over(report: GpuReport, previous: Inventory | None) -> GpuReport:
    """GPUs known before a probe failed are still in the machine: kept, as not usable until they answer again."""
    if report.gpus is not None or previous is None or not previous.gpus:
        return report
    silent = "the driver did not answer the last probe"
    return replace(
        report,
        gpus=tuple(gpu if gpu.problem else replace(gpu, problem=silent) for gpu in previous.gpus),
        source=previous.gpu_source,
        driver=report.driver or previous.driver,
    )


def _to_gpu(device: Device, machine_bytes: int, root: Path, architecture: str, nvlink_group: int | None) -> Gpu:
    # Discrete cards on x86 always know their memory; where one does not say, the machine's is not a safe guess.
    shared = bool(_UNIFIED.search(device.name)) or (device.unsupported_memory and architecture == "aarch64")
    problem = device.problem
    if problem is None and device.mig and not device.instances:
        problem = "MIG mode is on, but there are no instances: make some (nvidia-smi mig -cgi), or turn MIG off"
    return Gpu(
        index=device.index,
        uuid=device.uuid,
        name=device.name,
        memory_bytes=machine_bytes if shared else device.memory_bytes,
        memory_shared=shared,
        nvlink_group=nvlink_group,
        numa_node=device.numa_node if (numa := _numa_node(root, device.bus_id)) is None else numa,
        problem=problem,
    )


def _instance_gpu(gpu: Gpu, instance: Instance) -> Gpu:
    return replace(
        gpu,
        index=(gpu.index + 1) * MIG_INDEX_STEP + instance.device,
        uuid=instance.uuid,
        name=f"{gpu.name} MIG {instance.profile}",
        memory_bytes=instance.memory_bytes,
        nvlink_group=None,
    )


def _numa_node(root: Path, bus_id: str | None) -> int | None:
    if bus_id is None:
        return None
    text = read_text(root / "sys/bus/pci/devices" / bus_id / "numa_node") or ""
    return int(text) if re.fullmatch(r"[0-9]{1,4}", text) else None
