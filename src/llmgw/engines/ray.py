"""Ray as vLLM's ``ray`` launch mode needs it: a cluster of a replica's own, one sidecar per rank."""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.engines.base import Launch, LaunchRefused, Sidecar
from llmgw.engines.ranks import meeting_place

READY_WITHIN_S = 180.0
"""A first start reads a few hundred megabytes of Python; and each look at a head that is not there yet takes 40 s."""

# Where in the shard's block each of Ray's servers listens. The head's own port is the meeting place.
_SERVERS = (
    ("--node-manager-port", 51),
    ("--object-manager-port", 52),
    ("--runtime-env-agent-port", 53),
    ("--metrics-export-port", 54),
    ("--dashboard-agent-listen-port", 55),
    ("--dashboard-agent-grpc-port", 56),
    ("--min-worker-port", 60),
    ("--max-worker-port", 99),
)


def sidecar(launch: Launch, env: Mapping[str, str]) -> Sidecar:
    """The head on rank 0, a worker elsewhere. A worker that comes first waits for its head.

    ``env`` is the engine's without its key: Ray's processes compute, and serve nothing.
    """
    if not launch.sidecar_program:
        raise LaunchRefused(
            "launch_mode ray needs Ray, and this node has none: name it in the agent's file (engines.vllm.ray_bin), "
            "or set launch_mode: mp"
        )
    shard = launch.shard
    where = meeting_place(shard)
    gpus = shard.profile.gpus_per_node
    argv = [*launch.sidecar_program, "start", "--block", "--disable-usage-stats"]
    if shard.rank == 0:
        argv += ["--head", "--port", where.rpartition(":")[2], "--include-dashboard", "false"]
    else:
        argv += ["--address", where]
    # Its own guess would be every core of the node, a process for each, and a port for each process.
    argv += ["--node-ip-address", launch.host, "--num-gpus", str(gpus), "--num-cpus", str(gpus)]
    for flag, offset in _SERVERS:
        argv += [flag, str(shard.placement.port + offset)]
    return Sidecar(
        name="ray",
        argv=tuple(argv),
        env=env,
        ready_argv=(*launch.sidecar_program, "health-check", "--address", where),
        ready_within_s=READY_WITHIN_S,
    )
