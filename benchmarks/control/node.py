"""One simulated agent: a node with eight GPUs on one fabric, over the real protocol.

It does what the agent of ``llmgw agent`` does on the stream, frame by frame: a hello that has not probed yet, the whole
state after the welcome, heartbeats with vitals and a WebSocket ping each, an answer to every desired state. What it
leaves out is the machine: shards that it is asked to run are ready at once.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from llmgw.cluster.model import (
    Cpu,
    EngineOnNode,
    EngineState,
    Fabric,
    Gpu,
    Hca,
    Inventory,
    ObservedShard,
    ShardState,
    Vitals,
)
from llmgw.link.messages import Desired, Heartbeat, Hello, Observed, Welcome
from llmgw.link.wire import MAX_FRAME_BYTES, Frame, decode, encode
from llmgw.version import VERSION

GIB = 2**30
RECONNECT_BASE_S = 1.0
RECONNECT_MAX_S = 30.0


@dataclass
class Course:
    """What one agent went through. Times are of the machine's monotonic clock, the same in every process."""

    began_s: float = 0.0
    """The first time it dialled."""
    welcomed_s: float = 0.0
    """The first welcome; 0: none yet."""
    attempts: int = 0
    welcomes: int = 0
    troubles: list[str] = field(default_factory=list)


class SimulatedAgent:
    def __init__(self, id: str, tls: ssl.SSLContext, url: str, http: aiohttp.ClientSession) -> None:
        self.id = id
        self.course = Course()
        self.welcomed = asyncio.Event()
        self._tls = tls
        self._url = url
        self._http = http
        self._rng = random.Random(id)
        self._shards: tuple[ObservedShard, ...] = ()

    async def run(self) -> None:
        """Stays connected until cancelled."""
        self.course.began_s = time.monotonic()
        pause = RECONNECT_BASE_S
        while True:
            self.course.attempts += 1
            try:
                await self._attempt()
                trouble = "the control plane closed the stream"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                trouble = f"{type(error).__name__}: {error}"
            self.course.troubles.append(trouble)
            await asyncio.sleep(pause * (1 - self._rng.random() / 2))
            pause = min(2 * pause, RECONNECT_MAX_S)

    async def _attempt(self) -> None:
        async with asyncio.timeout(10.0):
            ws = await self._http.ws_connect(
                self._url, ssl=self._tls, autoping=False, max_msg_size=MAX_FRAME_BYTES, compress=0
            )
        async with ws:
            await ws.send_str(encode(self._hello()))
            welcome = await self._receive(ws, timeout_s=15.0)
            if not isinstance(welcome, Welcome):
                self.course.troubles.append(f"no welcome: {welcome}")
                return
            self.course.welcomed_s = self.course.welcomed_s or time.monotonic()
            self.course.welcomes += 1
            self.welcomed.set()
            await ws.send_str(encode(self._whole(welcome)))
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._beat(ws, welcome))
                await self._listen(ws, welcome)
                beating.cancel()

    async def _listen(self, ws: aiohttp.ClientWebSocketResponse, welcome: Welcome) -> None:
        while (frame := await self._receive(ws, timeout_s=3 * welcome.heartbeat_s)) is not None:
            if isinstance(frame, Desired):
                self._take_up(frame)
                await ws.send_str(
                    encode(
                        Observed(
                            epoch=welcome.epoch,
                            session=welcome.session,
                            revision=frame.revision,
                            shards=self._shards,
                        )
                    )
                )

    async def _receive(self, ws: aiohttp.ClientWebSocketResponse, timeout_s: float) -> Frame | None:
        """The next frame; None where the stream has ended. Pongs count as a sign of life, as everything does."""
        while True:
            async with asyncio.timeout(timeout_s):
                message = await ws.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                return decode(message.data)
            if message.type is aiohttp.WSMsgType.PING:
                await ws.pong(message.data)
            elif message.type is not aiohttp.WSMsgType.PONG:
                return None

    async def _beat(self, ws: aiohttp.ClientWebSocketResponse, welcome: Welcome) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        with suppress(aiohttp.ClientError, OSError):
            while True:
                due_s = max(due_s + welcome.heartbeat_s, loop.time())
                await asyncio.sleep(due_s - loop.time())
                beat = Heartbeat(
                    epoch=welcome.epoch, session=welcome.session, sent_at=time.time(), vitals=self._vitals()
                )
                await ws.send_str(encode(beat))
                await ws.ping()

    def _take_up(self, desired: Desired) -> None:
        running = {(shard.id, shard.generation): shard for shard in self._shards}
        self._shards = tuple(
            running.get((shard.id, shard.generation))
            or ObservedShard(
                id=shard.id,
                generation=shard.generation,
                state=ShardState.READY,
                since=time.time(),
                why="answers",
                pid=4711,
                endpoint=f"127.0.0.1:{shard.placement.port}",
            )
            for shard in desired.shards
        )

    # -- what it says of its machine

    def _hello(self) -> Hello:
        return Hello(
            role="node",
            id=self.id,
            version=VERSION,
            fingerprint=f"machine-of-{self.id}",
            boot_id="9f2c7a30-6b0e-4d0a-9a55-0d6f3f6b9e11",
            instance=f"{self._rng.getrandbits(32):08x}",
            inventory=_inventory(self.id),
            vitals=self._vitals(),
            probed=self.course.welcomes > 0,
            engines=_ENGINES if self.course.welcomes else (),
            shards=self._shards,
        )

    def _whole(self, welcome: Welcome) -> Observed:
        return Observed(
            epoch=welcome.epoch,
            session=welcome.session,
            inventory=_inventory(self.id),
            probed=True,
            engines=_ENGINES,
            shards=self._shards,
            weights=(),
        )

    def _vitals(self) -> Vitals:
        return Vitals(
            memory_bytes=512 * GIB,
            memory_available_bytes=int(self._rng.uniform(380, 480) * GIB),
            disk_bytes=3576 * GIB,
            disk_free_bytes=int(self._rng.uniform(1000, 2000) * GIB),
            load_1m=round(self._rng.uniform(0, 32), 2),
        )


_ENGINES = (EngineOnNode(name="sim", version=VERSION, state=EngineState.INSTALLED, words="seen to run"),)


def _inventory(id: str) -> Inventory:
    return Inventory(
        hostname=id,
        os="Debian GNU/Linux 12 (bookworm)",
        kernel="6.1.0-28-amd64",
        libc="glibc 2.36",
        cpu=Cpu(
            model="AMD EPYC 9354 32-Core Processor",
            architecture="x86_64",
            cores=64,
            extensions=("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16"),
        ),
        memory_bytes=512 * GIB,
        mgmt_addr="127.0.0.1",
        mgmt_interface="eno1",
        gpus=tuple(
            Gpu(
                index=index,
                uuid=f"GPU-{id}-{index}",
                name="NVIDIA H100 80GB HBM3",
                memory_bytes=81559 << 20,
                nvlink_group=0,
                numa_node=index // 4,
            )
            for index in range(8)
        ),
        gpu_source="nvml",
        driver="550.127.05",
        hcas=tuple(
            Hca(
                name=f"mlx5_{index}",
                port=1,
                state="ACTIVE",
                phys_state="LinkUp",
                link_layer="InfiniBand",
                rate_gbps=400.0,
                gid=f"fe80:0000:0000:0000:946d:ae03:00f1:{index:04x}",
                numa_node=index // 2,
            )
            for index in range(4)
        ),
        fabrics=(Fabric(name="ib-a", hcas=tuple(f"mlx5_{index}" for index in range(4)), rate_gbps=400.0),),
        labels={"rack": f"r{int(id[-4:]) // 20}", "site": "here"},
    )
