"""SGLang: every rank runs the server's module, rank 0 serves."""

from __future__ import annotations

import json
import re

from llmgw.cluster.model import DesiredShard
from llmgw.engines.base import Command, EngineUnhealthy, Launch, LaunchRefused, Probe
from llmgw.engines.load import LoadMetrics
from llmgw.engines.openai import check_args, proof, readiness_probe, said
from llmgw.engines.ranks import collectives, devices, meeting_place, no_meeting_place, parallel_refusal, threads

NCCL_PORT = 20
BOOTSTRAP_PORT = 30
"""Where in the shard's block they lie. Left out, both are the same for every engine on the node, or random."""

PROCESSES_BYTES = 2 * 2**30
"""What its processes take on a CPU beside the weights and the cache, measured at 2.1 GB."""

_ADDRESS = "the node's address and port are the placement's"
_MODEL = "the model's `source` decides"
_PARALLEL = "the profile's `tensor_parallel` and `pipeline_parallel` decide"
_COPIES = "the model's `replicas` decide how many copies there are, each an engine of its own"

_RESERVED = {
    "--host": _ADDRESS,
    "--port": _ADDRESS,
    "--grpc-port": _ADDRESS,
    "--nccl-port": _ADDRESS,
    "--engine-info-bootstrap-port": _ADDRESS,
    "--model-path": _MODEL,
    "--model": _MODEL,
    "--served-model-name": "the model's `name` and `aliases` decide",
    "--api-key": "each replica has a key of its own",
    "--admin-api-key": "each replica has a key of its own",
    "--config": "write the options into `args` one by one, so that each can be checked",
    "--context-length": "the profile's `context` decides",
    "--max-running-requests": "the profile's `parallel` decides",
    "--is-embedding": "the model's `task` decides",
    "--tp-size": _PARALLEL,
    "--tensor-parallel-size": _PARALLEL,
    "--pp-size": _PARALLEL,
    "--pipeline-parallel-size": _PARALLEL,
    "--dp-size": _COPIES,
    "--data-parallel-size": _COPIES,
    "--nnodes": "the placement decides",
    "--node-rank": "the placement decides",
    "--dist-init-addr": "the placement decides",
    "--nccl-init-addr": "the placement decides",
    "--use-ray": "ranks are started by llmgw",
    "--base-gpu-id": "the placement decides",
    "--device": "the profile's `gpus_per_node` decides",
}

_VERSION = re.compile(r"^sglang version:\s*(\S+)", re.MULTILINE)


class Sglang:
    """``Launch.program`` starts the server: ``PYTHON -m sglang.launch_server``, or ``sglang serve``."""

    name = "sglang"
    starts_slowly_s = 3600.0
    worker_programs: tuple[str, ...] = ()
    load_metrics: LoadMetrics | None = LoadMetrics(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_used_ratio=("sglang:token_usage",),
        prompt_tokens_total=("sglang:prompt_tokens_total",),
        generation_tokens_total=("sglang:generation_tokens_total",),
        # Every stage of a pipeline tells of the same requests.
        join_requests=max,
    )

    def command(self, launch: Launch) -> Command:
        shard, profile = launch.shard, launch.shard.profile
        if launch.weights is None:
            raise LaunchRefused(f"shard {shard.id}: sglang needs a model, and none was given")
        serves = shard.rank == 0
        files: dict[str, str] = {}
        # Ranks above 0 answer every look at their health with 200, whatever they do: nobody is to ask them.
        host = launch.host if serves else "127.0.0.1"
        argv = [*launch.program, "--host", host, "--port", str(shard.placement.port)]
        if serves:
            # It reads its key from no variable, and a command line can be read by everybody.
            path = f"{launch.work_dir}/sglang.yaml"
            files[path] = f"api-key: {json.dumps(shard.api_key)}\n"
            argv += ["--config", path]
        argv += _model(launch)
        argv += _ranks(launch)
        argv += _processors(launch)
        argv += profile.args
        endpoint = f"{launch.host}:{shard.placement.port}" if serves else None
        return Command(argv=tuple(argv), env=_environment(launch), endpoint=endpoint, files=files)

    def refusal(self, shard: DesiredShard) -> str | None:
        profile = shard.profile
        if shard.task not in ("generate", "embed"):
            return f"sglang serves the tasks generate and embed here, not {shard.task}"
        if profile.launch_mode is not None:
            return f"profile {profile.name!r} has a launch_mode, which only vllm has: every rank of sglang is started"
        if profile.sim is not None:
            return f"profile {profile.name!r} has `sim` options, which only the engine sim reads"
        return (
            no_meeting_place(shard)
            or parallel_refusal("sglang", profile)
            or check_args(profile.args, _RESERVED, abbreviated=True)
        )

    def loads_weights(self, rank: int) -> bool:
        return True

    def health(self) -> Probe:
        return Probe(method="GET", path="/health")

    def metrics(self) -> Probe | None:
        return Probe(method="GET", path="/metrics")

    def read_health(self, status: int, body: bytes) -> str | None:
        """A 200 takes a second: it answered one token. 503 while it starts, or where that token did not come."""
        if status == 200:
            return None
        if status == 503:
            return "starting, or too busy to answer one token"
        raise EngineUnhealthy(f"/health answered {status}: {said(body)}")

    def readiness(self, shard: DesiredShard) -> Probe:
        return readiness_probe(shard)

    def read_readiness(self, shard: DesiredShard, status: int, body: bytes) -> str | None:
        return proof(shard, status, body)

    def read_version(self, output: str) -> str | None:
        found = _VERSION.search(output)
        return found[1] if found else None


def _model(launch: Launch) -> list[str]:
    """One name is enough: SGLang answers requests under any, and so to the model's aliases too."""
    shard, profile = launch.shard, launch.shard.profile
    assert launch.weights is not None
    argv = ["--model-path", launch.weights, "--served-model-name", shard.model]
    if profile.context is not None:
        argv += ["--context-length", str(profile.context)]
    if profile.parallel is not None:
        argv += ["--max-running-requests", str(profile.parallel)]
    if shard.task == "embed":
        argv.append("--is-embedding")
    return [*argv, "--enable-metrics"]


def _ranks(launch: Launch) -> list[str]:
    """Whole names only: ``--tp`` and the like are abbreviations, which turn ambiguous as flags are added."""
    shard, profile = launch.shard, launch.shard.profile
    port = shard.placement.port
    argv = ["--tp-size", str(profile.tensor_parallel), "--pp-size", str(profile.pipeline_parallel)]
    argv += ["--nccl-port", str(port + NCCL_PORT)]
    if "--engine-info-bootstrap-port" in launch.flags:
        argv += ["--engine-info-bootstrap-port", str(port + BOOTSTRAP_PORT)]
    if profile.nodes > 1:
        argv += ["--nnodes", str(profile.nodes), "--node-rank", str(shard.rank)]
        argv += ["--dist-init-addr", meeting_place(shard)]
    return argv


def _processors(launch: Launch) -> list[str]:
    """Empty on GPUs."""
    profile = launch.shard.profile
    if profile.gpus_per_node:
        return []
    argv = ["--device", "cpu", "--disable-overlap-schedule"]
    if profile.memory_bytes is not None and launch.node_memory_bytes:
        # Its own guess is most of the machine. The fraction is of what is free as it starts, and so never more.
        left_bytes = max(profile.memory_bytes - PROCESSES_BYTES, profile.memory_bytes // 2)
        argv += ["--mem-fraction-static", f"{min(left_bytes / launch.node_memory_bytes, 0.9):.3f}"]
    return argv


def _environment(launch: Launch) -> dict[str, str]:
    on_processors = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads(launch))}
    return {
        **devices(launch.shard),
        **collectives(launch),
        **({} if launch.shard.profile.gpus_per_node else on_processors),
        # Its own guess is what the host's name resolves to, or the address on the way to the internet.
        "SGLANG_HOST_IP": launch.host,
        # Else a folder of /tmp whose name anybody could have taken before. Other caches lie in HOME.
        "TORCHINDUCTOR_CACHE_DIR": f"{launch.work_dir}/torchinductor",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
