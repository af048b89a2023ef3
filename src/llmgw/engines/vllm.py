"""vLLM: ``vllm serve`` on one node, or on several by ``mp`` (its own processes) or ``ray``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.cluster.catalog import LaunchMode
from llmgw.cluster.model import DesiredShard
from llmgw.engines import ray
from llmgw.engines.base import Command, EngineUnhealthy, Launch, LaunchRefused, Probe, Sidecar
from llmgw.engines.flags import Flag
from llmgw.engines.load import LoadMetrics
from llmgw.engines.openai import check_args, proof, readiness_probe, said
from llmgw.engines.ranks import (
    collectives,
    devices,
    meeting_place,
    no_meeting_place,
    parallel_refusal,
    processes_per_node,
    threads,
)

MP_SINCE = (0, 11, 1)
"""The first version whose own processes span nodes (``--nnodes``)."""
RUNNER_SINCE = (0, 10, 0)
"""The first version with ``--runner``; before, ``--task``."""

SHUTDOWN_TIMEOUT_SINCE = (0, 18, 0)
"""The first version with ``--shutdown-timeout``."""
SHUTDOWN_S = 30
"""How long it may finish requests after SIGTERM. Without, it drops them at once, and hangs until they are closed."""

PROCESSES_BYTES = 3 * 2**30
"""What its processes take on a CPU beside the weights and the cache, measured at 2.8 GB."""
CACHE_GIB = 4
"""The cache on a CPU where the profile states no memory: what vLLM itself took until it took most of the machine."""

INNER_PORTS = 10
"""Where in the shard's block its inner servers begin: vLLM counts upwards from VLLM_PORT."""

_ADDRESS = "the node's address and port are the placement's"
_MODEL = "the model's `source` decides"
_PARALLEL = "the profile's `tensor_parallel` and `pipeline_parallel` decide"
_RANKS = "the placement and `launch_mode` decide"
_COPIES = "the model's `replicas` decide how many copies there are, each an engine of its own"

_RESERVED = {
    "--host": _ADDRESS,
    "--port": _ADDRESS,
    "--uds": _ADDRESS,
    "--root-path": "the gateway asks for /v1 paths",
    "--ssl-keyfile": "the gateway speaks plain HTTP to engines",
    "--ssl-certfile": "the gateway speaks plain HTTP to engines",
    "--api-key": "each replica has a key of its own",
    "--model": _MODEL,
    "--served-model-name": "the model's `name` and `aliases` decide",
    "--config": "write the options into `args` one by one, so that each can be checked",
    "--max-model-len": "the profile's `context` decides",
    "--max-num-seqs": "the profile's `parallel` decides",
    "--runner": "the model's `task` decides",
    "--task": "the model's `task` decides",
    "--tensor-parallel-size": _PARALLEL,
    "-tp": _PARALLEL,
    "--pipeline-parallel-size": _PARALLEL,
    "-pp": _PARALLEL,
    "--data-parallel-size": _COPIES,
    "-dp": _COPIES,
    "--data-parallel-size-local": _COPIES,
    "-dpl": _COPIES,
    "--distributed-executor-backend": _RANKS,
    "--nnodes": _RANKS,
    "-n": _RANKS,
    "--node-rank": _RANKS,
    "-r": _RANKS,
    "--master-addr": _RANKS,
    "--master-port": _RANKS,
    "--headless": _RANKS,
    "--device-ids": "the placement decides",
}

_VERSION = re.compile(r"^(\d+\.\d+\.\d+\S*)\s*$", re.MULTILINE)
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Vllm:
    """``Launch.program`` is ``vllm`` alone, and ``Launch.help_text`` what ``serve --help=all`` prints."""

    name = "vllm"
    starts_slowly_s = 3600.0
    worker_programs: tuple[str, ...] = ()
    load_metrics: LoadMetrics | None = LoadMetrics(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_used_ratio=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        prompt_tokens_total=("vllm:prompt_tokens_total",),
        generation_tokens_total=("vllm:generation_tokens_total",),
    )

    def command(self, launch: Launch) -> Command:
        shard, profile = launch.shard, launch.shard.profile
        if launch.weights is None:
            raise LaunchRefused(f"shard {shard.id}: vllm needs a model, and none was given: it would fetch one itself")
        environment = _environment(launch)
        serves = shard.rank == 0
        mode = _mode(launch) if profile.nodes > 1 else None
        sidecars: tuple[Sidecar, ...] = ()
        if mode == "ray":
            sidecars = (ray.sidecar(launch, environment),)
            environment = {**environment, "RAY_ADDRESS": meeting_place(shard)}
            if not serves:
                return Command(argv=(), env={}, endpoint=None, sidecars=sidecars)
        argv = [*launch.program, "serve", launch.weights]
        if serves:
            argv += ["--host", launch.host, "--port", str(shard.placement.port)]
            if not _lacks(launch, "--shutdown-timeout", SHUTDOWN_TIMEOUT_SINCE):
                argv += ["--shutdown-timeout", str(SHUTDOWN_S)]
            environment = {**environment, "VLLM_API_KEY": shard.api_key}
        argv += _model(launch)
        argv += _ranks(launch, mode)
        argv += profile.args
        endpoint = f"{launch.host}:{shard.placement.port}" if serves else None
        return Command(argv=tuple(argv), env=environment, endpoint=endpoint, sidecars=sidecars)

    def refusal(self, shard: DesiredShard) -> str | None:
        profile = shard.profile
        if shard.task not in ("generate", "embed", "rerank"):
            return f"vllm serves the tasks generate, embed and rerank here, not {shard.task}"
        if profile.sim is not None:
            return f"profile {profile.name!r} has `sim` options, which only the engine sim reads"
        return (
            no_meeting_place(shard)
            or parallel_refusal("vllm", profile)
            or check_args(profile.args, _RESERVED, abbreviated=True)
        )

    def loads_weights(self, rank: int) -> bool:
        return True

    def health(self) -> Probe:
        return Probe(method="GET", path="/health")

    def metrics(self) -> Probe | None:
        return Probe(method="GET", path="/metrics")

    def read_health(self, status: int, body: bytes) -> str | None:
        """It answers nothing while it loads, and 503 only once its engine is dead."""
        if status == 200:
            return None
        if status == 503:
            raise EngineUnhealthy("/health answered 503: vLLM's engine process is dead")
        raise EngineUnhealthy(f"/health answered {status}: {said(body)}")

    def readiness(self, shard: DesiredShard) -> Probe:
        return readiness_probe(shard)

    def read_readiness(self, shard: DesiredShard, status: int, body: bytes) -> str | None:
        return proof(shard, status, body)

    def read_version(self, output: str) -> str | None:
        """``0.32.0+cpu``, on a line of its own among others."""
        found = _VERSION.search(output)
        return found[1] if found else None


def _mode(launch: Launch) -> LaunchMode:
    """The profile's choice, else the node's, else ``mp`` where the build has it. On processors there is no other."""
    profile = launch.shard.profile
    on_gpus = profile.gpus_per_node > 0
    lacks = _lacks(launch, "--nnodes", MP_SINCE)
    match profile.launch_mode or launch.launch_mode or ("ray" if lacks and on_gpus else "mp"):
        case "ray" if on_gpus:
            return "ray"
        case "ray":
            raise LaunchRefused(
                f"launch_mode ray needs GPUs, and profile {profile.name!r} has none: vLLM does not run over Ray on "
                "processors; set launch_mode: mp"
            )
        case "mp" if not lacks:
            return "mp"
        case "mp":
            way_out = "upgrade it, or set launch_mode: ray" if on_gpus else "upgrade it"
            raise LaunchRefused(
                f"launch_mode mp over {profile.nodes} nodes needs vLLM 0.11.1 or newer, and this node has "
                f"{launch.version or 'one without --nnodes'}: {way_out}"
            )
        case asked:
            raise LaunchRefused(f"launch_mode {asked} is none of vLLM's: set it to mp or ray")


def _lacks(launch: Launch, flag: str, since: tuple[int, int, int]) -> bool:
    """By the version where it is known, by the help where it is whole; an unknown build counts as a recent one."""
    release = _RELEASE.match(launch.version)
    if release is not None:
        major, minor, patch = release.groups()
        return (int(major), int(minor), int(patch)) < since
    flags = launch.flags
    # The short help names groups of flags only. Whole is what defines --help itself.
    return "--help" in flags and flag not in flags


def _model(launch: Launch) -> list[str]:
    shard, profile = launch.shard, launch.shard.profile
    argv = ["--served-model-name", shard.model, *shard.aliases]
    if profile.context is not None:
        argv += ["--max-model-len", str(profile.context)]
    if profile.parallel is not None:
        argv += ["--max-num-seqs", str(profile.parallel)]
    if shard.task != "generate":
        old = {"embed": "embed", "rerank": "score"}[shard.task]
        argv += ["--task", old] if _lacks(launch, "--runner", RUNNER_SINCE) else ["--runner", "pooling"]
    return [*argv, *_quiet(launch.flags)] if shard.rank == 0 else argv


def _quiet(flags: Mapping[str, Flag]) -> list[str]:
    """Prompts belong into no log, and a line for each look at /health into none either."""
    return [flag for flag in ("--disable-log-requests", "--disable-uvicorn-access-log") if flag in flags]


def _ranks(launch: Launch, mode: LaunchMode | None) -> list[str]:
    shard, profile = launch.shard, launch.shard.profile
    argv = ["--tensor-parallel-size", str(profile.tensor_parallel)]
    argv += ["--pipeline-parallel-size", str(profile.pipeline_parallel)]
    if mode is not None:
        argv += ["--distributed-executor-backend", mode]
    if mode == "mp":
        host, _, port = meeting_place(shard).rpartition(":")
        argv += ["--nnodes", str(profile.nodes), "--node-rank", str(shard.rank)]
        argv += ["--master-addr", host.strip("[]"), "--master-port", port]
        if shard.rank > 0:
            argv.append("--headless")
    return argv


def _environment(launch: Launch) -> dict[str, str]:
    """That of every process of the shard, but for the key."""
    return {
        **devices(launch.shard),
        **collectives(launch),
        **_processors(launch),
        # Its own guess is the address on the way to the internet, and Ray must be told the same one.
        "VLLM_HOST_IP": launch.host,
        "VLLM_PORT": str(launch.shard.placement.port + INNER_PORTS),
        # It gives itself up after ten minutes, and big models take longer.
        "VLLM_ENGINE_READY_TIMEOUT_S": f"{Vllm.starts_slowly_s:.0f}",
        "VLLM_NO_USAGE_STATS": "1",
        # Else a folder of /tmp whose name anybody could have taken before. Other caches lie in HOME.
        "TORCHINDUCTOR_CACHE_DIR": f"{launch.work_dir}/torchinductor",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _processors(launch: Launch) -> dict[str, str]:
    """Empty on GPUs. A replica has no processors of its own: left to itself, each would bind to the same ones."""
    if launch.shard.profile.gpus_per_node:
        return {}
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(_cache_gib(launch)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads(launch)),
    }


def _cache_gib(launch: Launch) -> int:
    """Of each process, in whole GiB: what the profile's memory leaves beside the weights. Never none."""
    profile = launch.shard.profile
    if profile.memory_bytes is None:
        return CACHE_GIB
    left_bytes = profile.memory_bytes - PROCESSES_BYTES - launch.weights_bytes // profile.nodes
    return max(1, left_bytes // processes_per_node(profile) // 2**30)
