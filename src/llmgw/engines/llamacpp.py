"""llama.cpp's ``llama-server``, on the CPU or on GPUs; over several nodes by its RPC backend (see ``llamacpp_rpc``)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.cluster.catalog import Profile
from llmgw.cluster.model import DesiredShard
from llmgw.engines import llamacpp_rpc
from llmgw.engines.base import Command, Launch, LaunchRefused, Probe
from llmgw.engines.flags import Flag
from llmgw.engines.load import LoadMetrics
from llmgw.engines.openai import check_args, proof, read_health, readiness_probe

DEFAULT_PARALLEL = 4
"""Slots where a profile gives a context and no ``parallel``: what the engine takes by itself."""

ALL_LAYERS = "999"

# "version: 0.6.0-dev (build 11434, commit 7e4c0a9)"; before that "version: 10216 (876a43211)"; Debian's "b8681-Debian".
_BUILD = re.compile(r"\(build (\d+)(?:, commit (\w+))?")
_OLD_BUILD = re.compile(r"^version:\s+b?(\d+)(?![.\d])\S*(?:\s+\((\w+)\))?", re.MULTILINE)

# What the placement decides, or what would make the server answer elsewhere than where it is expected.
_RESERVED = {
    "--host": "the node's address and port are the placement's",
    "--port": "the node's address and port are the placement's",
    "--reuse-port": "the node's address and port are the placement's",
    "--model": "the model's `source` decides",
    "-m": "the model's `source` decides",
    "--model-url": "the model's `source` decides",
    "-mu": "the model's `source` decides",
    "--hf-repo": "the model's `source` decides",
    "-hf": "the model's `source` decides",
    "-hfr": "the model's `source` decides",
    "--models-dir": "the model's `source` decides",
    "--models-preset": "the model's `source` decides",
    "--alias": "the model's `name` decides",
    "-a": "the model's `name` decides",
    "--api-key": "each replica has a key of its own",
    "--api-key-file": "each replica has a key of its own",
    "--api-prefix": "the gateway asks for /v1 paths",
    "--ssl-key-file": "the gateway speaks plain HTTP to engines",
    "--ssl-cert-file": "the gateway speaks plain HTTP to engines",
    "--rpc": "the profile's `nodes` decide, and the placement",
}


class LlamaCpp:
    name = "llamacpp"
    starts_slowly_s = 1800.0
    worker_programs: tuple[str, ...] = llamacpp_rpc.PROGRAMS
    load_metrics: LoadMetrics | None = LoadMetrics(
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        prompt_tokens_total=("llamacpp:prompt_tokens_total",),
        generation_tokens_total=("llamacpp:tokens_predicted_total",),
    )

    def command(self, launch: Launch) -> Command:
        shard = launch.shard
        spans = shard.profile.nodes > 1
        if spans and shard.rank > 0:
            return llamacpp_rpc.worker(launch, _environment(shard))
        if launch.weights is None:
            # Without a model llama-server starts as a router: healthy, and serving nothing.
            raise LaunchRefused(f"shard {shard.id}: llamacpp needs a model file, and none was given")
        port = shard.placement.port
        argv = [*launch.program, *_server(launch, launch.weights)]
        argv += llamacpp_rpc.flags(launch) if spans else []
        argv += shard.profile.args
        return Command(
            argv=tuple(argv),
            env={**_environment(shard), "LLAMA_API_KEY": shard.api_key},
            endpoint=f"{launch.host}:{port}",
            sidecars=llamacpp_rpc.sidecars(launch, _environment(shard)) if spans else (),
            listens=llamacpp_rpc.own_ports(shard) if spans else (),
            waits_for=llamacpp_rpc.listeners(shard) if spans else (),
        )

    def refusal(self, shard: DesiredShard) -> str | None:
        profile = shard.profile
        if shard.task not in ("generate", "embed", "rerank"):
            return f"llamacpp serves the tasks generate, embed and rerank, not {shard.task}"
        if profile.pipeline_parallel > 1:
            return "llamacpp has no pipeline_parallel: it spreads layers over all the GPUs that it is given"
        if profile.launch_mode is not None:
            return f"profile {profile.name!r} has a launch_mode, which only vllm has"
        if profile.sim is not None:
            return f"profile {profile.name!r} has `sim` options, which only the engine sim reads"
        if profile.tensor_parallel > 1:
            return (
                "llamacpp has no tensor_parallel: it spreads layers over all the GPUs that it is given; "
                'leave it out, or set args: ["--split-mode", "row"]'
            )
        if profile.nodes > 1 and (words := llamacpp_rpc.refusal(shard)):
            return words
        return check_args(profile.args, _RESERVED)

    def loads_weights(self, rank: int) -> bool:
        """Rank 0 alone: the others are sent their layers."""
        return rank == 0

    def metrics(self) -> Probe | None:
        return Probe(method="GET", path="/metrics")

    def health(self) -> Probe:
        return Probe(method="GET", path="/health")

    def read_health(self, status: int, body: bytes) -> str | None:
        return read_health(status, body)

    def readiness(self, shard: DesiredShard) -> Probe:
        return readiness_probe(shard)

    def read_readiness(self, shard: DesiredShard, status: int, body: bytes) -> str | None:
        why = proof(shard, status, body)
        if why is not None and "Pooling type 'none'" in why:
            return f'{why}; a model made for chat has no pooling of its own: set args: ["--pooling", "mean"]'
        return why

    def read_version(self, output: str) -> str | None:
        """``b11434``; the commit where the build has no number (a build from a shallow clone calls itself 1)."""
        found = _BUILD.search(output) or _OLD_BUILD.search(output)
        if found is None:
            return None
        build, commit = found.groups()
        if int(build) > 1:
            return f"b{build}"
        return commit if commit != "unknown" else None


def _server(launch: Launch, weights: str) -> list[str]:
    """All but where the layers of other nodes are, and ``args``."""
    shard, profile, flags = launch.shard, launch.shard.profile, launch.flags
    # Only the name, never the aliases: answers carry the alphabetically first of them as `model`,
    # and requests may name any.
    argv = ["--host", launch.host, "--port", str(shard.placement.port), "--model", weights, "--alias", shard.model]
    argv.append("--metrics")
    argv += _context(profile.context, profile.parallel, flags)
    argv += _fit(profile, flags)
    argv += _devices(launch)
    argv += _task(shard)
    argv += _first_of(("--no-ui", "--no-webui"), flags)
    # What runs is what was placed: nothing is fetched behind the agent's back, whatever `args` name.
    return argv + _first_of(("--offline",), flags)


def _context(context: int | None, parallel: int | None, flags: Mapping[str, Flag]) -> list[str]:
    """``context`` is per request: a cache split evenly over the slots gives each its own, whatever others do.

    Without a context the slots share one cache of the model's own length, so that one request may use all of it.
    """
    if context is None:
        if parallel is None:
            return []
        return ["--parallel", str(parallel), *_first_of(("--kv-unified",), flags)]
    slots = parallel or DEFAULT_PARALLEL
    sizes = ["--ctx-size", str(context * slots), "--parallel", str(slots)]
    return [*sizes, *_first_of(("--no-kv-unified",), flags)]


def _fit(profile: Profile, flags: Mapping[str, Flag]) -> list[str]:
    """Where sizes are stated, or spread over nodes by us, it must fail rather than change them in silence."""
    stated = profile.context is not None or profile.nodes > 1
    return ["--fit", "off"] if stated and "--fit" in flags else []


def _devices(launch: Launch) -> list[str]:
    profile, flags = launch.shard.profile, launch.flags
    if profile.gpus_per_node:
        return ["--n-gpu-layers", ALL_LAYERS]
    # Threads spin on each other: with every core taken by others, one thread too many costs a factor of four.
    threads = ["--threads", str(max(1, launch.cores - 1))]
    if profile.nodes > 1:
        # Layers go to the ranks' servers, which count as devices.
        return [*threads, "--n-gpu-layers", ALL_LAYERS]
    return [*threads, "--device", "none"] if "--device" in flags else [*threads, "--n-gpu-layers", "0"]


def _task(shard: DesiredShard) -> list[str]:
    if shard.task == "embed":
        return ["--embeddings"]
    return ["--reranking"] if shard.task == "rerank" else []


def _first_of(names: tuple[str, ...], flags: Mapping[str, Flag]) -> list[str]:
    return [name for name in names if name in flags][:1]


def _environment(shard: DesiredShard) -> dict[str, str]:
    """That of every process of the shard, but for the key."""
    environment = {
        "GGML_NO_BACKTRACE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(shard.placement.gpu_uuids),
    }
    if shard.placement.gpus or shard.profile.nodes > 1:
        # Vulkan builds read no uuids. Empty, it hides all of them: no flag of a rank's server does.
        environment["GGML_VK_VISIBLE_DEVICES"] = ",".join(str(index) for index in shard.placement.gpus)
    return environment
