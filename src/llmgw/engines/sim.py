"""The simulated engine: ``python -m llmgw.simulator``, a real server that computes nothing."""

from __future__ import annotations

import hashlib
import hmac

from llmgw.cluster.catalog import SimOptions
from llmgw.cluster.model import DesiredShard
from llmgw.engines.base import Command, Launch, Probe
from llmgw.engines.load import LoadMetrics
from llmgw.engines.openai import check_args, proof, read_health, readiness_probe
from llmgw.engines.ranks import meeting_place, no_meeting_place

KEY_VARIABLE = "LLMGW_SIM_API_KEY"
RENDEZVOUS_VARIABLE = "LLMGW_SIM_RENDEZVOUS_KEY"
"""By it the ranks of one generation know each other, so that a late rank of an older one joins nothing."""

_RESERVED = {
    "--host": "the node's address and port are the placement's",
    "--port": "the node's address and port are the placement's",
    "--model": "the model's `name` decides",
    "--alias": "the model's `aliases` decide",
    "--rank": "the placement decides",
    "--nodes": "the placement decides",
    "--dist-init": "the placement decides",
}


class Sim:
    name = "sim"
    starts_slowly_s = 600.0
    worker_programs: tuple[str, ...] = ()
    load_metrics: LoadMetrics | None = LoadMetrics(
        running=("llmgw_sim_requests_running",),
        waiting=("llmgw_sim_requests_waiting",),
        prompt_tokens_total=("llmgw_sim_prompt_tokens_total",),
        generation_tokens_total=("llmgw_sim_tokens_total",),
    )

    def command(self, launch: Launch) -> Command:
        shard, profile = launch.shard, launch.shard.profile
        port = shard.placement.port
        argv = [*launch.program, "--host", launch.host, "--port", str(port), "--model", shard.model]
        for alias in shard.aliases:
            argv += ["--alias", alias]
        if profile.context is not None:
            argv += ["--context", str(profile.context)]
        if profile.parallel is not None:
            argv += ["--parallel", str(profile.parallel)]
        argv += _behaviour(profile.sim or SimOptions())
        env = {KEY_VARIABLE: shard.api_key} if shard.rank == 0 else {}
        if profile.nodes > 1:
            argv += ["--rank", str(shard.rank), "--nodes", str(profile.nodes), "--dist-init", meeting_place(shard)]
            env[RENDEZVOUS_VARIABLE] = _rendezvous_key(shard)
        argv += profile.args
        # Ranks above 0 open no port.
        endpoint = f"{launch.host}:{port}" if shard.rank == 0 else None
        return Command(argv=tuple(argv), env=env, endpoint=endpoint)

    def refusal(self, shard: DesiredShard) -> str | None:
        if words := no_meeting_place(shard):
            return words
        if shard.task not in ("generate", "embed", "rerank"):
            return f"the simulated engine serves the tasks generate, embed and rerank, not {shard.task}"
        return check_args(shard.profile.args, _RESERVED)

    def loads_weights(self, rank: int) -> bool:
        return False

    def health(self) -> Probe:
        return Probe(method="GET", path="/health")

    def metrics(self) -> Probe | None:
        return Probe(method="GET", path="/metrics")

    def read_health(self, status: int, body: bytes) -> str | None:
        return read_health(status, body)

    def readiness(self, shard: DesiredShard) -> Probe:
        return readiness_probe(shard)

    def read_readiness(self, shard: DesiredShard, status: int, body: bytes) -> str | None:
        return proof(shard, status, body)

    def read_version(self, output: str) -> str | None:
        name, _, version = output.strip().partition(" ")
        return version if name == "llmgw-sim" and version else None


def _rendezvous_key(shard: DesiredShard) -> str:
    """Made from what all ranks of one generation have in common, and no other replica or generation has."""
    replica = shard.id.rpartition("/")[0]
    return hmac.new(shard.api_key.encode(), f"{replica} {shard.generation}".encode(), hashlib.sha256).hexdigest()


def _behaviour(options: SimOptions) -> list[str]:
    argv: list[str] = []
    for flag, seconds in (
        ("--load-time", options.load_time_s),
        ("--first-token", options.first_token_s),
        ("--token-interval", options.token_interval_s),
    ):
        if seconds:
            argv += [flag, f"{seconds:g}"]
    return [*argv, "--fault", options.fault] if options.fault else argv
