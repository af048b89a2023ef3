"""Whether the memory of GPUs is free for an engine to be started on them.

The driver gives back what a process held some while after it has ended, and programs that nobody here started may use
a GPU as well. Where the driver does not say, or can't be asked, nothing is held against a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from llmgw.agent.discovery.nvidia_smi import MemoryUse, ask_memory, find_nvidia_smi
from llmgw.agent.discovery.probe import ProbeHung, ProbeMissing
from llmgw.cluster.model import Placement

log = structlog.get_logger()

FREE_SHARE = 0.1
"""How much of a GPU's memory may be in use where it counts as free. Engines take nine tenths of it by default."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Asks nvidia-smi, where there is one: ``nvidia_smi`` as the node's file states it."""

    nvidia_smi: str | None = None
    limit_s: float = 15.0
    """How long one look may take."""
    wait_s: float = 30.0
    """How long a shard waits for its GPUs to become free."""
    ask_every_s: float = 1.0

    async def in_use(self, placement: Placement) -> str:
        """Which GPUs of the placement are not free, and who holds them, in words; empty where all are."""
        numbers = dict(zip(placement.gpu_uuids, placement.gpus, strict=True))
        # nvidia-smi tells the memory of whole GPUs, and takes no other for an id.
        whole = [uuid for uuid in numbers if uuid.startswith("GPU-")]
        path = find_nvidia_smi(self.nvidia_smi)
        if not whole or path is None:
            return ""
        try:
            found = await ask_memory(path, whole, self.limit_s)
        except (ProbeMissing, ProbeHung) as error:
            log.warning("whether the memory of GPUs is free is not known", gpus=list(numbers.values()), why=str(error))
            return ""
        return "; ".join(_words(numbers[uuid], found[uuid]) for uuid in whole if _is_used(found, uuid))


def _is_used(found: Mapping[str, MemoryUse], uuid: str) -> bool:
    return uuid in found and found[uuid].used_bytes > FREE_SHARE * found[uuid].total_bytes


def _words(number: int, use: MemoryUse) -> str:
    by = f", by {', '.join(use.holders)}" if use.holders else ""
    return f"GPU {number} has {use.used_bytes / _GIB:.1f} of {use.total_bytes / _GIB:.1f} GiB in use{by}"
