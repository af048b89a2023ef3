"""llama.cpp's ``llama-server``: single node, on the CPU or on the node's GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.cluster.model import DesiredShard
from llmgw.engines.base import Command, Launch, LaunchRefused, Probe
from llmgw.engines.flags import Flag
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
}


class LlamaCpp:
    name = "llamacpp"
    needs_weights = True
    starts_slowly_s = 1800.0

    def command(self, launch: Launch) -> Command:
        shard, profile = launch.shard, launch.shard.profile
        if launch.weights is None:
            # Without a model llama-server starts as a router: healthy, and serving nothing.
            raise LaunchRefused(f"shard {shard.id}: llamacpp needs a model file, and none was given")
        flags = launch.flags
        port = shard.placement.port
        # Only the name, never the aliases: answers carry the alphabetically first of them as `model`,
        # and requests may name any.
        argv = [*launch.program, "--host", launch.host, "--port", str(port)]
        argv += ["--model", launch.weights, "--alias", shard.model, "--metrics"]
        argv += _context(profile.context, profile.parallel, flags)
        argv += _devices(profile.gpus_per_node, launch.cores, flags)
        argv += _task(shard)
        argv += _first_of(("--no-ui", "--no-webui"), flags)
        argv += profile.args
        return Command(argv=tuple(argv), env=_environment(shard), endpoint=f"{launch.host}:{port}")

    def refusal(self, shard: DesiredShard) -> str | None:
        profile = shard.profile
        if profile.nodes > 1:
            return (
                f"llamacpp does not run over several nodes yet, and profile {profile.name!r} asks for {profile.nodes}"
            )
        if shard.task not in ("generate", "embed", "rerank"):
            return f"llamacpp serves the tasks generate, embed and rerank, not {shard.task}"
        if profile.pipeline_parallel > 1:
            return "llamacpp has no pipeline_parallel: it spreads layers over all the GPUs that it is given"
        if profile.sim is not None:
            return f"profile {profile.name!r} has `sim` options, which only the engine sim reads"
        if profile.tensor_parallel > 1:
            return (
                "llamacpp has no tensor_parallel: it spreads layers over all the GPUs that it is given; "
                'leave it out, or set args: ["--split-mode", "row"]'
            )
        return check_args(profile.args, _RESERVED)

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
    # Sizes are stated: the engine must fail rather than shrink them in silence to what fits.
    stated = ["--fit", "off"] if "--fit" in flags else []
    return [*sizes, *_first_of(("--no-kv-unified",), flags), *stated]


def _devices(gpus: int, cores: int, flags: Mapping[str, Flag]) -> list[str]:
    if gpus:
        return ["--n-gpu-layers", ALL_LAYERS]
    # Threads spin on each other: with every core taken by others, one thread too many costs a factor of four.
    threads = ["--threads", str(max(1, cores - 1))]
    return [*threads, "--device", "none"] if "--device" in flags else [*threads, "--n-gpu-layers", "0"]


def _task(shard: DesiredShard) -> list[str]:
    if shard.task == "embed":
        return ["--embeddings"]
    return ["--reranking"] if shard.task == "rerank" else []


def _first_of(names: tuple[str, ...], flags: Mapping[str, Flag]) -> list[str]:
    return [name for name in names if name in flags][:1]


def _environment(shard: DesiredShard) -> dict[str, str]:
    environment = {
        "LLAMA_API_KEY": shard.api_key,
        "GGML_NO_BACKTRACE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(shard.placement.gpu_uuids),
    }
    if shard.placement.gpus:
        # Vulkan builds read no uuids.
        environment["GGML_VK_VISIBLE_DEVICES"] = ",".join(str(index) for index in shard.placement.gpus)
    return environment
