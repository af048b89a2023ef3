"""Run as a script, in a process of its own that may be killed: asks NVML for everything and prints one line of JSON.

Nothing of llmgw is imported, so that it starts fast. Printed is either ``{"error": CODE, "words": TEXT}``
or ``{"driver": TEXT, "devices": [...]}``; ``llmgw.agent.discovery.nvml`` reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

_P2P_OK = 0


def main() -> int:
    try:
        import pynvml
    except ImportError as error:
        return _print({"error": None, "words": str(error)})
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _print({"error": error.value, "words": str(error)})
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = {index: _try(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)}
        return _print(
            {
                "driver": _try(pynvml, pynvml.nvmlSystemGetDriverVersion)[0],
                "devices": [_device(pynvml, index, handles) for index in range(count)],
            }
        )
    except pynvml.NVMLError as error:
        return _print({"error": error.value, "words": str(error)})


def _device(nvml: Any, index: int, handles: dict[int, tuple[Any, Any]]) -> dict[str, object]:
    handle, problem = handles[index]
    if handle is None:
        return {"index": index, "problem": str(problem)}
    uuid, problem = _try(nvml, nvml.nvmlDeviceGetUUID, handle)
    memory, memory_error = _try(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    unsupported = memory_error is not None and memory_error.value == nvml.NVML_ERROR_NOT_SUPPORTED
    fatal = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_UNKNOWN)
    if problem is None and memory_error is not None and memory_error.value in fatal:
        problem = memory_error
    mig, _ = _try(nvml, nvml.nvmlDeviceGetMigMode, handle)
    pci, _ = _try(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    return {
        "index": index,
        "uuid": _text(uuid),
        "name": _text(_try(nvml, nvml.nvmlDeviceGetName, handle)[0]),
        "memory_bytes": None if memory is None else int(memory.total),
        "unsupported_memory": unsupported,
        "bus_id": None if pci is None else _text(pci.busId),
        "mig": bool(mig and mig[0] == 1),
        "instances": _instances(nvml, handle) if mig and mig[0] == 1 else [],
        "nvlink_peers": _peers(nvml, index, handle, handles),
        "problem": None if problem is None else str(problem),
    }


def _instances(nvml: Any, handle: Any) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    most, _ = _try(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    for number in range(most or 0):
        instance, _ = _try(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if instance is None:
            continue
        memory, _ = _try(nvml, nvml.nvmlDeviceGetMemoryInfo, instance)
        found.append(
            {
                "device": number,
                "uuid": _text(_try(nvml, nvml.nvmlDeviceGetUUID, instance)[0]),
                "name": _text(_try(nvml, nvml.nvmlDeviceGetName, instance)[0]),
                "memory_bytes": None if memory is None else int(memory.total),
            }
        )
    return found


def _peers(nvml: Any, index: int, handle: Any, handles: dict[int, tuple[Any, Any]]) -> list[int]:
    """Asked by pair: behind an NVSwitch, a GPU's links all end at the switch and name no peer."""
    peers: list[int] = []
    for other, (other_handle, _) in handles.items():
        if other == index or other_handle is None:
            continue
        status, _ = _try(nvml, nvml.nvmlDeviceGetP2PStatus, handle, other_handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == _P2P_OK:
            peers.append(other)
    return peers


def _try(nvml: Any, call: Callable[..., Any], *arguments: object) -> tuple[Any, Any]:
    """(value, None) or (None, NVML's error): one question that a device does not answer costs no other."""
    try:
        return call(*arguments), None
    except nvml.NVMLError as error:
        return None, error


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _print(answer: dict[str, object]) -> int:
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
