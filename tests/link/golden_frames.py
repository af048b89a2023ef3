"""One frame of each type, with every field set. ``golden/`` holds them as they go over the wire.

``python tests/link/golden_frames.py`` writes the files anew. A change of one is a change of the protocol.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmgw.cluster.catalog import EngineSpec, Profile, SimOptions
from llmgw.cluster.model import (
    Cpu,
    DesiredShard,
    Endpoint,
    EngineOnNode,
    EngineState,
    Exit,
    Fabric,
    Gpu,
    Hca,
    Inventory,
    Load,
    ObservedShard,
    Placement,
    PortRange,
    Route,
    ShardPeer,
    ShardState,
    Traffic,
    Vitals,
)
from llmgw.link.messages import (
    Desired,
    Heartbeat,
    Hello,
    LogLines,
    LogsCancel,
    LogsRequest,
    Observed,
    Refused,
    Renew,
    Routes,
    RoutesAck,
    RoutesKey,
    TrafficReport,
    Welcome,
)
from llmgw.link.wire import Frame, encode, json_schema

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
SCHEMA = HERE / "protocol.schema.json"

INVENTORY = Inventory(
    hostname="gpu-a-01",
    os="Debian GNU/Linux 12",
    kernel="6.1.0-18-amd64",
    libc="glibc 2.36",
    cpu=Cpu(model="AMD EPYC 9354", architecture="x86_64", cores=64, extensions=("avx2", "fma")),
    memory_bytes=540_000_000_000,
    mgmt_addr="10.0.0.11",
    mgmt_interface="eth0",
    gpus=(Gpu(index=0, uuid="GPU-0001", name="NVIDIA H100", memory_bytes=85_000_000_000, nvlink_group=0, numa_node=1),),
    gpu_source="nvml",
    driver="570.86.15",
    hcas=(Hca(name="mlx5_0", port=1, state="ACTIVE", phys_state="LinkUp", link_layer="InfiniBand", rate_gbps=200.0),),
    fabrics=(Fabric(name="ib-a", hcas=("mlx5_0",), rate_gbps=200.0),),
    labels={"rack": "r12"},
    ports=PortRange(20000, 29999),
    launch_modes={"vllm": "mp"},
    warnings=("no AVX2",),
)
VITALS = Vitals(
    memory_bytes=540_000_000_000,
    memory_available_bytes=400_000_000_000,
    disk_bytes=2_000_000_000_000,
    disk_free_bytes=1_500_000_000_000,
    load_1m=0.5,
    loads={
        "qwen-abcde/0": Load(
            running=3.0, waiting=1.0, kv_used_ratio=0.25, prompt_tokens_total=9000.0, generation_tokens_total=512.0
        )
    },
)
ENGINE = EngineOnNode(name="llamacpp", version="b10991", state=EngineState.DOWNLOADING, words="42 %", since=1.5)
SHARD = ObservedShard(
    id="qwen-abcde/0",
    generation=2,
    state=ShardState.FAILED,
    since=1764442800.25,
    why="killed by SIGKILL",
    pid=812,
    endpoint="10.0.0.11:20000",
    exit=Exit(signal="SIGKILL", oom=True, last_lines=("out of memory",)),
    port_taken=True,
    prepared=True,
)
DESIRED_SHARD = DesiredShard(
    id="qwen-abcde/0",
    generation=3,
    rank=0,
    model="qwen",
    aliases=("default",),
    task="generate",
    source="hf://Qwen/Qwen3-32B",
    profile=Profile(
        name="one-node",
        engine="sim",
        nodes=2,
        gpus_per_node=1,
        memory_bytes=1024,
        context=8192,
        parallel=4,
        max_concurrency=64,
        launch_mode="mp",
        node_selector={"rack": "r12"},
        args=("--flag",),
        sim=SimOptions(load_time_s=2.0, first_token_s=0.05, token_interval_s=0.01, fault="hang"),
    ),
    placement=Placement(
        node="gpu-a-01", gpus=(0,), gpu_uuids=("GPU-0001",), memory_bytes=1024, port=20000, address="10.0.0.11"
    ),
    api_key="key-of-the-replica",
    fabric="ib-a",
    dist_init="10.0.0.11:20050",
    peers=(
        ShardPeer(node="gpu-a-01", address="10.0.0.11", fabrics=("ib-a",), port=20000),
        ShardPeer(node="gpu-a-02", address="10.0.0.12", fabrics=("ib-a", "ib-b"), port=20100),
    ),
    go=False,
)

FRAMES: tuple[Frame, ...] = (
    Hello(
        role="node",
        id="gpu-a-01",
        protocol=1,
        oldest_protocol=1,
        version="0.1.0",
        fingerprint="9f86d081",
        boot_id="b7c1",
        instance="d4e5",
        inventory=INVENTORY,
        vitals=VITALS,
        probed=True,
        engines=(ENGINE,),
        shards=(SHARD,),
        weights=("hf://Qwen/Qwen3-32B",),
        routes_version=7,
    ),
    Welcome(
        epoch=3,
        session=12,
        protocol=1,
        cluster="lab",
        version="0.1.0",
        heartbeat_s=5.0,
        servers=("https://10.0.0.140:7443",),
    ),
    Refused(code="identity", words="your certificate is for 'a', but you claim to be 'b'"),
    Desired(
        epoch=3,
        session=12,
        revision=4,
        shards=(DESIRED_SHARD,),
        engines=(
            EngineSpec(
                name="llamacpp", version="b10991", source="index", sha256="ab12", package="llama-server", build="cpu"
            ),
        ),
    ),
    Observed(
        epoch=3,
        session=12,
        revision=4,
        inventory=INVENTORY,
        probed=True,
        engines=(ENGINE,),
        shards=(SHARD,),
        weights=("hf://Qwen/Qwen3-32B",),
    ),
    Heartbeat(epoch=3, session=12, sent_at=1764442800.5, vitals=VITALS),
    Routes(
        epoch=3,
        session=13,
        version=9,
        lease_s=30.0,
        routes=(
            Route(
                model="qwen",
                aliases=("default",),
                task="generate",
                endpoints=(
                    Endpoint(
                        replica="qwen-abcde",
                        generation=3,
                        url="http://10.0.0.11:20000",
                        api_key="key-of-the-replica",
                        preferred=False,
                        max_concurrency=64,
                    ),
                ),
                why_none="",
                draining=("qwen-fghij",),
            ),
        ),
        keys=(RoutesKey(id="key-abcde", hash="ab12", models=("qwen",)),),
    ),
    RoutesAck(epoch=3, session=13, version=9, traffic={"qwen-fghij": Traffic(in_flight=2)}),
    TrafficReport(epoch=3, session=13, replicas={"qwen-fghij": Traffic(in_flight=1, finished=20, broken=1)}),
    LogsRequest(id="7", shard="qwen-abcde/0", lines=50, follow=True),
    LogsCancel(id="7"),
    LogLines(id="7", lines=("loading", "ready"), end=True, error="the shard is gone"),
    Renew(),
)


def golden_path(frame: Frame) -> Path:
    return GOLDEN / f"{frame.type}.json"


def golden_text(frame: Frame) -> str:
    return _pretty(json.loads(encode(frame)))


def schema_text() -> str:
    return _pretty(json_schema())


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for frame in FRAMES:
        golden_path(frame).write_text(golden_text(frame))
    SCHEMA.write_text(schema_text())


if __name__ == "__main__":
    main()
