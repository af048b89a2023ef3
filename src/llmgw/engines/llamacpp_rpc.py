"""llama.cpp over several nodes, by its RPC backend. Experimental, as it is upstream.

Ranks above 0 run ``ggml-rpc-server``, which holds layers and computes them for whoever connects: it knows no key and no
encryption. Rank 0 runs ``llama-server``, reads the model and sends each its layers, over the management network.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmgw.cluster.model import DesiredShard
from llmgw.engines.base import Command, Launch, LaunchRefused, Listener, Sidecar

PROGRAMS = ("ggml-rpc-server", "rpc-server")
"""Beside ``llama-server``; the second is its name before 2026."""

OWN_PORT = 1
"""Where in rank 0's block its own server listens, on loopback."""

_LOOPBACK = "127.0.0.1"


def refusal(shard: DesiredShard) -> str | None:
    """Why the ranks can't be joined, in words; None where they can."""
    profile = shard.profile
    if any(peer.port == 0 for peer in shard.peers) or len(shard.peers) != profile.nodes:
        return (
            f"profile {profile.name!r} asks for {profile.nodes} nodes, and where their ranks listen did not come "
            "with it: the control plane is older than this agent; upgrade it"
        )
    six = next((peer for peer in shard.peers if ":" in peer.address), None)
    if six is not None:
        return (
            f"llamacpp over several nodes takes IPv4 addresses alone, and {six.node} has {six.address}: set "
            "`mgmt_addr` in its agent's file"
        )
    return None


def worker(launch: Launch, env: Mapping[str, str]) -> Command:
    """A rank above 0: it has no HTTP, no model and no key."""
    port = launch.shard.placement.port
    return Command(argv=_argv(launch, launch.host, port), env=_env(env), endpoint=None, listens=(port,))


def sidecars(launch: Launch, env: Mapping[str, str]) -> tuple[Sidecar, ...]:
    """Rank 0's own server where there are no GPUs: without it all layers would go to the other nodes."""
    if launch.shard.profile.gpus_per_node:
        return ()
    argv = _argv(launch, _LOOPBACK, launch.shard.placement.port + OWN_PORT)
    return (Sidecar(name="rpc", argv=argv, env=_env(env)),)


def own_ports(shard: DesiredShard) -> tuple[int, ...]:
    return () if shard.profile.gpus_per_node else (shard.placement.port + OWN_PORT,)


def listeners(shard: DesiredShard) -> tuple[Listener, ...]:
    """The ranks' servers, in the order of ranks: ``llama-server`` aborts where it finds one of them closed."""
    others = [
        Listener(who=f"rank {rank} on {peer.node}", host=peer.address, port=peer.port)
        for rank, peer in enumerate(shard.peers)
        if rank > 0
    ]
    own = [Listener(who="its own server", host=_LOOPBACK, port=port) for port in own_ports(shard)]
    return (*own, *others)


def flags(launch: Launch) -> list[str]:
    """Rank 0's flags."""
    known = launch.flags
    if "--help" in known and "--rpc" not in known:
        raise LaunchRefused(
            f"this node's llama.cpp ({launch.version or launch.program[0]}) was built without its RPC backend, which "
            "a replica over several nodes needs: name another build in the agent's file (engines.llamacpp.bin)"
        )
    servers = listeners(launch.shard)
    argv = ["--rpc", ",".join(f"{server.host}:{server.port}" for server in servers)]
    if not launch.shard.profile.gpus_per_node:
        # Each node has set the same memory aside, whatever else of it is free at the moment.
        argv += ["--tensor-split", ",".join("1" for _ in servers)]
    return argv


def _argv(launch: Launch, host: str, port: int) -> tuple[str, ...]:
    if not launch.worker_program:
        raise LaunchRefused(
            f"llamacpp over several nodes needs {PROGRAMS[0]} beside {launch.program[0]}, and there is none: name a "
            "build that has it in the agent's file (engines.llamacpp.bin)"
        )
    argv = [*launch.worker_program, "--host", host, "--port", str(port)]
    if not launch.shard.profile.gpus_per_node:
        argv += ["--threads", str(max(1, launch.cores - 1))]
    return tuple(argv)


def _env(env: Mapping[str, str]) -> Mapping[str, str]:
    # It would find RDMA by itself, and choose an adapter by itself: of whichever fabric.
    return {**env, "GGML_RPC_NO_RDMA": "1"}
