"""Rules and environment of replicas whose ranks compute together, on one node or several."""

from __future__ import annotations

from llmgw.cluster.catalog import Profile
from llmgw.cluster.model import DesiredShard
from llmgw.engines.base import Launch, LaunchRefused


def no_meeting_place(shard: DesiredShard) -> str | None:
    """Why the ranks of a replica over several nodes can't find each other; None where they can, or there is one."""
    if shard.profile.nodes > 1 and shard.dist_init is None:
        return (
            f"profile {shard.profile.name!r} asks for {shard.profile.nodes} nodes, and the address where their "
            "ranks meet did not come with it: the control plane is older than this agent; upgrade it"
        )
    return None


def meeting_place(shard: DesiredShard) -> str:
    """host:port on rank 0's node. Raises LaunchRefused where there is none."""
    if shard.dist_init is None:
        raise LaunchRefused(no_meeting_place(shard) or f"shard {shard.id} runs on one node: its ranks meet nowhere")
    return shard.dist_init


def parallel_refusal(engine: str, profile: Profile) -> str | None:
    """Why the profile's parallelism does not fit the nodes and GPUs that it asks for; None where it does."""
    nodes, gpus = profile.nodes, profile.gpus_per_node
    tensor, pipeline = profile.tensor_parallel, profile.pipeline_parallel
    if gpus < 1:
        return _on_processors(engine, profile)
    if tensor * pipeline != nodes * gpus:
        return (
            f"profile {profile.name!r}: tensor_parallel {tensor} × pipeline_parallel {pipeline} = "
            f"{tensor * pipeline} GPUs, and nodes {nodes} × gpus_per_node {gpus} = {nodes * gpus}: make them equal"
        )
    if gpus % tensor and tensor % gpus:
        return (
            f"profile {profile.name!r}: a tensor-parallel group of {tensor} would lie across nodes of {gpus} GPUs: "
            f"make tensor_parallel a divisor or a multiple of {gpus}"
        )
    return None


def _on_processors(engine: str, profile: Profile) -> str | None:
    if profile.tensor_parallel * profile.pipeline_parallel % profile.nodes:
        return (
            f"profile {profile.name!r}: tensor_parallel {profile.tensor_parallel} × pipeline_parallel "
            f"{profile.pipeline_parallel} is no multiple of its {profile.nodes} nodes, and {engine} runs as many "
            "processes on each: make it one"
        )
    return None


def processes_per_node(profile: Profile) -> int:
    """Of those that compute: one per GPU; on processors as many as the parallelism asks for."""
    return profile.gpus_per_node or max(1, profile.tensor_parallel * profile.pipeline_parallel // profile.nodes)


def threads(launch: Launch) -> int:
    """For each process that computes on processors. One core stays free: the processes spin on each other."""
    return max(1, (launch.cores - 1) // processes_per_node(launch.shard.profile))


def devices(shard: DesiredShard) -> dict[str, str]:
    """The shard's GPUs and no others, by uuid: indices change at a reboot."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(shard.placement.gpu_uuids)}


def collectives(launch: Launch) -> dict[str, str]:
    """What NCCL and Gloo must know to meet over the management network and to compute over one fabric alone.

    Empty on one node. Raises LaunchRefused where either is not known: left to themselves they take whatever looks
    alive, and hang at the first all-reduce.
    """
    shard = launch.shard
    if shard.profile.nodes == 1:
        return {}
    if launch.interface is None:
        raise LaunchRefused(
            f"shard {shard.id}: the interface of this node's management address is not known, and ranks on several "
            "nodes meet over it: set `mgmt_addr` in the agent's file to an address of this node"
        )
    if not launch.hcas:
        raise LaunchRefused(
            f"shard {shard.id}: no adapter of fabric {shard.fabric} is ACTIVE on this node, and a replica over "
            f"{shard.profile.nodes} nodes computes over one: see `llmgw agent discover`"
        )
    return {
        # Without the equals sign a name is a prefix: mlx5_1 would take mlx5_10 too.
        "NCCL_IB_HCA": f"={','.join(launch.hcas)}",
        "NCCL_SOCKET_IFNAME": f"={launch.interface}",
        # These two take plain names, and know no equals sign.
        "GLOO_SOCKET_IFNAME": launch.interface,
        "TP_SOCKET_IFNAME": launch.interface,
    }
