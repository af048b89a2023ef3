"""Command lines, compared whole with files: a change of any flag shows in the diff."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from llmgw.cluster.catalog import Profile, SimOptions, Task
from llmgw.cluster.model import ShardPeer
from llmgw.engines.base import Command, Launch, LaunchRefused
from llmgw.engines.registry import engine
from llmgw.engines.sim import RENDEZVOUS_VARIABLE

from .shards import help_of, launch, shard

GOLDEN = Path(__file__).parent / "golden"


def llama(build: str, *, task: Task = "generate", gpus: int = 0, cores: int = 8, **options: object) -> Launch:
    profile = Profile(name="p", engine="llamacpp", gpus_per_node=gpus, **options)  # type: ignore[arg-type]
    help_text = help_of(build) if build else ""
    return launch(shard(profile, task=task, gpus=gpus), help_text=help_text, cores=cores)


RPC = ("/e/ggml-rpc-server",)


def spread(rank: int, case: Launch) -> Launch:
    """The same case as one rank of a llama.cpp over two nodes; each rank has another block of ports."""
    peers = tuple(ShardPeer(node=f"n{at}", address=f"10.0.0.{11 + at}", port=20100 + 100 * at) for at in (0, 1))
    there = ranked(rank, case)
    placed = dataclasses.replace(there.shard.placement, port=peers[rank].port)
    shard = dataclasses.replace(there.shard, peers=peers, placement=placed)
    return dataclasses.replace(there, shard=shard, worker_program=RPC, weights="/models/s.gguf" if rank == 0 else None)


def sim(**options: object) -> Launch:
    profile = Profile(name="p", engine="sim", **options)  # type: ignore[arg-type]
    return launch(shard(profile), program="/e/sim")


def ranked(rank: int, case: Launch) -> Launch:
    """The same case as one rank of a replica over two nodes."""
    shard = dataclasses.replace(case.shard, id=f"small-abcde/{rank}", rank=rank, dist_init="10.0.0.11:20150")
    return dataclasses.replace(case, shard=shard, host=f"10.0.0.{11 + rank}")


CASES: Mapping[str, Launch] = {
    "llamacpp-cpu": llama("b10068"),
    "llamacpp-one-core": llama("b10068", cores=1),
    "llamacpp-context": llama("b10068", context=8192, parallel=4),
    "llamacpp-context-alone": llama("b10068", context=8192),
    "llamacpp-parallel-alone": llama("b10068", parallel=2),
    "llamacpp-b11434": llama("b11434", context=8192, parallel=4),
    "llamacpp-b11434-cpu": llama("b11434"),
    "llamacpp-b11434-gpus": llama("b11434", gpus=2, context=4096, parallel=8),
    "llamacpp-b11434-2-rank-0": spread(0, llama("b11434", nodes=2)),
    "llamacpp-2-rank-0": spread(0, llama("b10068", nodes=2, context=4096, args=("--flash-attn", "on"))),
    "llamacpp-2-rank-1": spread(1, llama("b10068", nodes=2, context=4096, args=("--flash-attn", "on"))),
    "llamacpp-2-gpus-rank-0": spread(0, llama("b10068", nodes=2, gpus=2)),
    "llamacpp-2-gpus-rank-1": spread(1, llama("b10068", nodes=2, gpus=2)),
    "llamacpp-unknown-help": llama("", context=8192, parallel=4),
    "llamacpp-gpus": llama("b10068", gpus=2, context=4096, parallel=8),
    "llamacpp-embed": llama("b10068", task="embed", args=("--pooling", "mean")),
    "llamacpp-rerank": llama("b10068", task="rerank"),
    "llamacpp-args": llama("b10068", args=("--threads", "2", "--flash-attn", "on")),
    "sim": sim(),
    "sim-options": sim(
        context=512,
        parallel=2,
        sim=SimOptions(load_time_s=2.0, first_token_s=0.05, token_interval_s=0.01, fault="slow-tokens:1"),
        args=("--fault", "hang"),
    ),
    "sim-2-rank-0": ranked(0, sim(nodes=2)),
    "sim-2-rank-1": ranked(1, sim(nodes=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_command_line_is_the_golden_one(name: str) -> None:
    case = CASES[name]
    command = engine(case.shard.profile.engine).command(case)
    # What is empty most of the time is shown where it is not.
    shown = {name: value for name, value in _plain(command).items() if value or name in ("argv", "env", "endpoint")}
    path = GOLDEN / f"{name}.json"
    if os.environ.get("LLMGW_GOLDEN") == "write":
        path.write_text(json.dumps(shown, indent=2) + "\n")
    assert shown == json.loads(path.read_text())


def _plain(command: Command) -> dict[str, object]:
    """As it comes back from a file."""
    return dict(json.loads(json.dumps(dataclasses.asdict(command))))


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_key_is_never_an_argument_and_only_the_rank_that_serves_has_it(name: str) -> None:
    case = CASES[name]
    command = engine(case.shard.profile.engine).command(case)
    assert not any(case.shard.api_key in argument for argument in command.argv)
    assert not any(case.shard.api_key in repr(sidecar) for sidecar in command.sidecars)
    assert (case.shard.api_key in command.env.values()) == (case.shard.rank == 0)


def test_ranks_of_one_generation_share_a_key_that_no_other_has() -> None:
    def key(rank: int, **changed: object) -> str:
        case = ranked(rank, sim(nodes=2))
        shard = dataclasses.replace(case.shard, **changed)  # type: ignore[arg-type]
        return engine("sim").command(dataclasses.replace(case, shard=shard)).env[RENDEZVOUS_VARIABLE]

    assert key(0) == key(1)
    others = [key(1, generation=2), key(1, id="small-other/1"), key(1, api_key="k-other")]
    assert len({key(0), *others}) == 4


@pytest.mark.parametrize("build", ["b10068", "b11434"])
def test_every_flag_of_a_command_line_is_in_that_builds_help(build: str) -> None:
    from llmgw.engines.flags import read_flags

    flags = read_flags(help_of(build))
    for case in (
        llama(build, context=1, parallel=2),
        llama(build, gpus=1, task="embed"),
        llama(build, task="rerank"),
        spread(0, llama(build, nodes=2)),
    ):
        argv = engine("llamacpp").command(case).argv
        for argument, following in zip(argv[1:], (*argv[2:], "--end"), strict=True):
            if argument.startswith("-"):
                assert flags[argument].takes_value == (not following.startswith("-")), argument


def test_llamacpp_without_a_model_file_is_never_started() -> None:
    case = llama("b10068")
    lost = Launch(shard=case.shard, program=case.program, host=case.host, weights=None, work_dir=case.work_dir)
    with pytest.raises(ValueError, match="needs a model file"):
        engine("llamacpp").command(lost)


# -- llama.cpp over several nodes


def test_only_rank_0_serves_and_the_others_open_one_port_of_their_own() -> None:
    leader, worker = (engine("llamacpp").command(CASES[f"llamacpp-2-rank-{rank}"]) for rank in (0, 1))
    assert (leader.endpoint, worker.endpoint) == ("10.0.0.11:20100", None)
    assert worker.listens == (20200,)
    assert [(each.who, each.host, each.port) for each in leader.waits_for] == [
        ("its own server", "127.0.0.1", 20101),
        ("rank 1 on n1", "10.0.0.12", 20200),
    ]


def test_layers_are_spread_evenly_over_processors_and_by_free_memory_over_gpus() -> None:
    on_cpus, on_gpus = (engine("llamacpp").command(CASES[f"llamacpp-2{kind}-rank-0"]) for kind in ("", "-gpus"))
    assert on_cpus.argv[on_cpus.argv.index("--tensor-split") + 1] == "1,1"
    assert [sidecar.name for sidecar in on_cpus.sidecars] == ["rpc"], "or all layers would go to the other nodes"
    assert "--tensor-split" not in on_gpus.argv
    assert on_gpus.sidecars == ()
    assert on_gpus.argv[on_gpus.argv.index("--rpc") + 1] == "10.0.0.12:20200"


def test_no_process_of_it_finds_gpus_or_adapters_that_are_not_its_own() -> None:
    for name in ("llamacpp-2-rank-0", "llamacpp-2-rank-1"):
        made = engine("llamacpp").command(CASES[name])
        for env in (made.env, *(sidecar.env for sidecar in made.sidecars)):
            assert env["CUDA_VISIBLE_DEVICES"] == env["GGML_VK_VISIBLE_DEVICES"] == ""
        assert all(sidecar.env["GGML_RPC_NO_RDMA"] == "1" for sidecar in made.sidecars)
    assert engine("llamacpp").command(CASES["llamacpp-2-rank-1"]).env["GGML_RPC_NO_RDMA"] == "1"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_build_without_the_other_program_is_refused(rank: int) -> None:
    case = dataclasses.replace(CASES[f"llamacpp-2-rank-{rank}"], worker_program=())
    with pytest.raises(LaunchRefused, match="needs ggml-rpc-server beside /e/llama-server"):
        engine("llamacpp").command(case)


def test_a_build_without_the_backend_is_refused() -> None:
    without = "\n".join(line for line in help_of("b11434").splitlines() if not line.startswith("--rpc"))
    case = dataclasses.replace(CASES["llamacpp-b11434-2-rank-0"], help_text=without, version="b11434")
    with pytest.raises(LaunchRefused, match=r"llama\.cpp \(b11434\) was built without its RPC backend"):
        engine("llamacpp").command(case)


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (ShardPeer(node="n1", address="10.0.0.12", port=0), "the control plane is older than this agent"),
        (ShardPeer(node="n1", address="fd00::12", port=20200), "takes IPv4 addresses alone, and n1 has fd00::12"),
    ],
)
def test_ranks_that_can_not_be_found_are_refused(peer: ShardPeer, words: str) -> None:
    shard = CASES["llamacpp-2-rank-0"].shard
    assert words in (engine("llamacpp").refusal(dataclasses.replace(shard, peers=(shard.peers[0], peer))) or "")


@pytest.mark.parametrize(("rank", "loads"), [(0, True), (1, False)])
def test_rank_0_alone_reads_the_model(rank: int, loads: bool) -> None:
    assert engine("llamacpp").loads_weights(rank) is loads
    assert (CASES[f"llamacpp-2-rank-{rank}"].weights is not None) is loads
