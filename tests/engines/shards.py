"""Shards and launches for the tests of adapters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llmgw.cluster.catalog import Profile, Task
from llmgw.cluster.model import DesiredShard, Placement
from llmgw.engines.base import Launch

HERE = Path(__file__).parent


def help_of(build: str) -> str:
    return (HERE / f"help_{build}.txt").read_text()


def whole_help(build: str) -> str:
    """What a real ``vllm-0.32.0`` or ``sglang-0.5.23`` printed, every option of it."""
    return (HERE / "help" / f"{build}.txt").read_text()


def flags_of(build: str) -> frozenset[str]:
    """Every flag that the build's whole help defines, such as of ``vllm_0.32.0``."""
    return frozenset((HERE / f"flags_{build}.txt").read_text().split())


def help_with(flags: Iterable[str]) -> str:
    """A help that is whole, and defines these flags."""
    return "".join(f"  {flag}\n" for flag in ("-h, --help  show this help message and exit", *sorted(flags)))


def shard(profile: Profile, *, task: Task = "generate", gpus: int = 0) -> DesiredShard:
    placement = Placement(
        node="a", port=20100, gpus=tuple(range(gpus)), gpu_uuids=tuple(f"GPU-{index:04d}" for index in range(gpus))
    )
    return DesiredShard(
        id="small-abcde/0",
        generation=1,
        rank=0,
        model="small",
        aliases=("a-first", "b"),
        task=task,
        source="file:///models/small.gguf",
        profile=profile,
        placement=placement,
        api_key="k-secret",
    )


def launch(shard: DesiredShard, *, help_text: str = "", cores: int = 8, program: str = "/e/llama-server") -> Launch:
    return Launch(
        shard=shard,
        program=(program,),
        host="10.0.0.11",
        weights="/models/small.gguf",
        work_dir="/var/lib/llmgw-agent/shards/small-abcde-0",
        help_text=help_text,
        cores=cores,
    )
