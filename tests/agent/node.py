"""A node's rooms put together as the agent does it, without a stream: what is wanted is told by the test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from llmgw.agent.converge import Converge
from llmgw.agent.exposure import Exposure
from llmgw.agent.gpus import GpuMemory
from llmgw.agent.install import Installer
from llmgw.agent.memory import ShardMemory
from llmgw.agent.presence import Rooms
from llmgw.agent.probe import EngineClient
from llmgw.agent.supervisor import Supervisor
from llmgw.agent.weights import WeightStore
from llmgw.cluster.catalog import Profile, SimOptions
from llmgw.cluster.model import Cpu, DesiredShard, EngineOnNode, Inventory, ObservedShard, Placement, ShardState
from llmgw.link.messages import Desired
from llmgw.process.errors import RecordError
from llmgw.process.identity import holders
from llmgw.process.record import read_record

DEADLINE_S = 30.0
INVENTORY = Inventory(
    hostname="n1",
    os="Debian",
    kernel="6.1",
    libc="glibc 2.36",
    cpu=Cpu(model="x", architecture="x86_64", cores=2),
    memory_bytes=2**34,
    mgmt_addr="127.0.0.1",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sim(
    generation: int = 1, *, port: int = 0, id: str = "m-abcde/0", task: str = "generate", **options: object
) -> DesiredShard:
    return DesiredShard(
        id=id,
        generation=generation,
        rank=0,
        model="m",
        aliases=(),
        task=task,  # type: ignore[arg-type]
        source=None,
        profile=Profile(name="p", engine="sim", memory_bytes=2**20, sim=SimOptions(**options)),  # type: ignore[arg-type]
        placement=Placement(node="n1", port=port or free_port()),
        api_key="secret-of-the-replica",
    )


class Node:
    def __init__(
        self,
        folder: Path,
        *,
        stop_timeout_s: float = 5.0,
        host: str = "127.0.0.1",
        gpu_memory: GpuMemory | None = None,
    ) -> None:
        self.folder = folder
        self.host = host
        self.inventory = INVENTORY
        self.supervisor = Supervisor(
            work_dir=folder / "work", log_lines=100, stop_timeout_s=stop_timeout_s, engine_user=None
        )
        self.memory = ShardMemory(folder / "work" / "wanted")
        self.engines_changed = asyncio.Event()
        self._reported = asyncio.Event()
        self.installer = Installer(
            engines_dir=folder / "engines",
            cache_dir=folder / "cache",
            named={},
            inventory=lambda: INVENTORY,
            report=self._engines_said,
        )
        self.client = EngineClient()
        rooms = Rooms(
            supervisor=self.supervisor,
            installer=self.installer,
            weights=WeightStore(weights_dir=folder / "weights"),
            client=self.client,
            memory=self.memory,
            exposure=Exposure(node_id="t", memory=folder / "work" / "gateways.json", changed=lambda: None),
            host=lambda: self.host,
            health_interval_s=0.1,
            engines_changed=lambda: self.engines_changed,
            inventory=lambda: self.inventory,
            gpu_memory=gpu_memory or GpuMemory(),
            sidecar_programs={"vllm": (sys.executable, "-I", "-S", "-u", "-c")},
        )
        self.told: list[tuple[ObservedShard, ...]] = []
        self.at: dict[ShardState, Callable[[], None]] = {}
        """What the test does in the moment in which a shard is first told to be in a state."""
        self.converge = Converge(rooms, self._report)
        self._revision = 0
        self._running: asyncio.Task[None] | None = None

    def want(self, *shards: DesiredShard) -> None:
        self._revision += 1
        self.converge.take(Desired(epoch=1, session=1, revision=self._revision, shards=shards))

    async def open(self) -> None:
        running = await self.supervisor.adopt()
        self.converge.adopt(running, self.supervisor.ended(), self.memory.all())
        self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.converge.run())
            group.create_task(self.installer.run())

    async def close(self) -> None:
        """The agent goes. What it has started stays."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
        await self.supervisor.close()
        await self.client.close()

    async def until(self, check: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not check():
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}; now {self.converge.shards()}") from None

    async def one(self, state: ShardState, generation: int | None = None) -> ObservedShard:
        """The only shard, once it is in this state."""

        def there() -> bool:
            return any(
                shard.state is state and generation in (None, shard.generation) for shard in self.converge.shards()
            )

        await self.until(there, f"a shard is {state}")
        (shard,) = self.converge.shards()
        return shard

    async def none(self) -> None:
        await self.until(lambda: not self.converge.shards(), "no shard is left")

    def _report(self) -> None:
        self.told.append(self.converge.shards())
        for shard in self.converge.shards():
            if act := self.at.pop(shard.state, None):
                act()
        self._reported.set()

    def _engines_said(self, engines: tuple[EngineOnNode, ...]) -> None:
        changed, self.engines_changed = self.engines_changed, asyncio.Event()
        changed.set()
        self._reported.set()


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[Node]:
    node = Node(folder, **options)
    await node.open()
    try:
        yield node
    finally:
        await node.close()


def clear(folder: Path) -> None:
    """Ends every engine that was started below ``folder``."""
    for path in folder.glob("work/processes/**/record"):
        with suppress(RecordError):
            record = read_record(path)
            while record is not None and (left := holders(record.program.nonce)):
                for process in left:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
