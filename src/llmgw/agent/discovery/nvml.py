"""GPUs through NVML, asked by a child process (see ``nvml_child``), since a wedged driver hangs whoever calls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.discovery import nvml_child
from llmgw.agent.discovery.gpus import Device, Instance, normal_bus_id
from llmgw.agent.discovery.probe import Output, ProbeMissing, run_probe


class NvmlUnreadable(Exception):
    """NVML has no answer. The message says why, in its own words."""


@dataclass(frozen=True, slots=True)
class NvmlAnswer:
    devices: tuple[Device, ...]
    driver: str | None


async def ask_nvml(limit_s: float) -> NvmlAnswer:
    """Raises NvmlUnreadable, or ProbeHung."""
    try:
        # -I: neither the working directory nor PYTHONPATH can slip another pynvml in.
        output = await run_probe("NVML", (sys.executable, "-I", str(Path(nvml_child.__file__))), limit_s)
    except ProbeMissing as error:
        raise NvmlUnreadable(f"its child process could not be started: {error}") from error
    return parse_answer(output)


def parse_answer(output: Output) -> NvmlAnswer:
    """Raises NvmlUnreadable."""
    try:
        answer = json.loads(output.stdout)
    except (ValueError, RecursionError):
        last = (output.stderr.strip().splitlines() or ["it printed nothing"])[-1][:200]
        raise NvmlUnreadable(f"its child process ended with {output.status}: {last}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("devices"), list):
        words = answer.get("words") if isinstance(answer, dict) else None
        raise NvmlUnreadable(str(words or "it gave no answer"))
    devices = (_device(entry) for entry in answer["devices"] if isinstance(entry, dict))
    return NvmlAnswer(tuple(device for device in devices if device is not None), _text(answer.get("driver")))


def _device(entry: Mapping[str, object]) -> Device | None:
    index = entry.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        return None
    peers, instances = entry.get("nvlink_peers"), entry.get("instances")
    problem = _text(entry.get("problem"))
    uuid = _text(entry.get("uuid"))
    return Device(
        index=index,
        uuid=uuid or f"unknown-{index}",
        name=_text(entry.get("name")) or "unknown",
        memory_bytes=_size(entry.get("memory_bytes")),
        unsupported_memory=entry.get("unsupported_memory") is True,
        bus_id=normal_bus_id(_text(entry.get("bus_id")) or ""),
        mig=entry.get("mig") is True,
        instances=_instances(instances if isinstance(instances, list) else []),
        nvlink_peers=tuple(peer for peer in peers if isinstance(peer, int)) if isinstance(peers, list) else (),
        problem=problem or (None if uuid else "the driver does not know its UUID"),
    )


def _instances(entries: list[object]) -> tuple[Instance, ...]:
    found: list[Instance] = []
    for entry in entries:
        device, uuid = (entry.get("device"), _text(entry.get("uuid"))) if isinstance(entry, dict) else (None, None)
        if not isinstance(entry, dict) or not isinstance(device, int) or not uuid:
            continue
        # NVML names an instance "NVIDIA A100-SXM4-80GB MIG 1g.10gb".
        profile = (_text(entry.get("name")) or "unknown").rpartition("MIG ")[2]
        memory = _size(entry.get("memory_bytes"))
        found.append(Instance(device=device, uuid=uuid, profile=profile, memory_bytes=memory))
    return tuple(found)


def _size(value: object) -> int | None:
    """NVML answers 0 where it does not know."""
    return value if isinstance(value, int) and value > 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
