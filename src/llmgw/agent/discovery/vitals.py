"""What moves between two heartbeats: memory, disk, load. Cheap enough to be read every few seconds."""

from __future__ import annotations

import os
from pathlib import Path

from llmgw.agent.discovery.cgroups import read_limits
from llmgw.agent.discovery.disk import read_disk
from llmgw.agent.discovery.memory import read_memory
from llmgw.cluster.model import Vitals


def read_vitals(weights_dir: Path, root: Path = Path("/")) -> Vitals:
    """Safe in any thread; returns within about a second even where the disk does not answer."""
    memory = read_memory(root, read_limits(root))
    disk = read_disk(weights_dir)
    return Vitals(
        memory_bytes=memory.total_bytes,
        memory_available_bytes=memory.available_bytes,
        disk_bytes=disk.total_bytes,
        disk_free_bytes=disk.free_bytes,
        load_1m=_load(),
    )


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:  # where /proc is not mounted; a heartbeat must not fail for it
        return 0.0
