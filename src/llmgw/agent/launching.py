"""What an adapter needs of this node to write a shard's command line, looked up where it takes a look."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llmgw.agent import peers
from llmgw.agent.fetch.threads import in_thread
from llmgw.agent.install import Program
from llmgw.agent.presence import Rooms
from llmgw.cluster.model import DesiredShard
from llmgw.engines.base import Engine, Launch


async def launch(adapter: Engine, shard: DesiredShard, rooms: Rooms, program: Program, weights: Path | None) -> Launch:
    """The files lie where it may take a while to look at them: that is done in a thread."""
    inventory = rooms.inventory()
    return Launch(
        shard=shard,
        program=program.argv,
        host=rooms.host(),
        weights=str(weights) if weights else None,
        weights_bytes=await in_thread(lambda _: _size_bytes(weights)) if weights else 0,
        work_dir=str(rooms.supervisor.work_dir(shard.id)),
        help_text=program.help_text,
        version=program.version,
        launch_mode=inventory.launch_modes.get(shard.profile.engine),
        cores=len(os.sched_getaffinity(0)),
        node_memory_bytes=inventory.memory_bytes,
        interface=inventory.mgmt_interface,
        hcas=peers.adapters(shard, inventory),
        sidecar_program=rooms.sidecar_programs.get(shard.profile.engine, ()),
        worker_program=await in_thread(lambda _: beside(program, adapter.worker_programs)),
    )


def beside(program: Program, names: Sequence[str]) -> tuple[str, ...]:
    """The first of these programs that lies in the folder of an engine's own; empty where none does."""
    if not names:
        return ()
    folder = Path(program.argv[0]).parent
    found = (folder / name for name in names)
    return next(((str(path),) for path in found if os.access(path, os.X_OK)), ())


def _size_bytes(weights: Path) -> int:
    """Of a file, or of all files in a folder; what can't be looked at counts as nothing."""
    try:
        if not weights.is_dir():
            return weights.stat().st_size
        return sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())
    except OSError:
        return 0
