"""Command lines, compared whole with files: a change of any flag shows in the diff."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from llmgw.cluster.catalog import Profile, SimOptions, Task
from llmgw.engines.base import Launch
from llmgw.engines.registry import engine
from llmgw.engines.sim import RENDEZVOUS_VARIABLE

from .shards import help_of, launch, shard

GOLDEN = Path(__file__).parent / "golden"


def llama(build: str, *, task: Task = "generate", gpus: int = 0, cores: int = 8, **options: object) -> Launch:
    profile = Profile(name="p", engine="llamacpp", gpus_per_node=gpus, **options)  # type: ignore[arg-type]
    help_text = help_of(build) if build else ""
    return launch(shard(profile, task=task, gpus=gpus), help_text=help_text, cores=cores)


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
    "llamacpp-newer": llama("b11434", context=8192, parallel=4),
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
    shown = {
        "argv": list(command.argv),
        "env": dict(command.env),
        "endpoint": command.endpoint,
        "files": dict(command.files),
    }
    path = GOLDEN / f"{name}.json"
    if os.environ.get("LLMGW_GOLDEN") == "write":
        path.write_text(json.dumps(shown, indent=2) + "\n")
    assert shown == json.loads(path.read_text())


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_key_is_never_an_argument_and_only_the_rank_that_serves_has_it(name: str) -> None:
    case = CASES[name]
    command = engine(case.shard.profile.engine).command(case)
    assert not any(case.shard.api_key in argument for argument in command.argv)
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
    for case in (llama(build, context=1, parallel=2), llama(build, gpus=1, task="embed"), llama(build, task="rerank")):
        argv = engine("llamacpp").command(case).argv
        for argument, following in zip(argv[1:], (*argv[2:], "--end"), strict=True):
            if argument.startswith("-"):
                assert flags[argument].takes_value == (not following.startswith("-")), argument


def test_llamacpp_without_a_model_file_is_never_started() -> None:
    case = llama("b10068")
    lost = Launch(shard=case.shard, program=case.program, host=case.host, weights=None, work_dir=case.work_dir)
    with pytest.raises(ValueError, match="needs a model file"):
        engine("llamacpp").command(lost)
