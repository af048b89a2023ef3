"""Command lines of vLLM and SGLang, over one node and several: compared whole with files, and with their help."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmgw.cluster.catalog import EngineName, LaunchMode, Profile, Task
from llmgw.cluster.model import PORT_BLOCK
from llmgw.engines import sglang, vllm
from llmgw.engines.base import Command, EngineUnhealthy, Launch, LaunchRefused
from llmgw.engines.flags import read_flags
from llmgw.engines.registry import ENGINES

from .shards import flags_of, help_with, launch, shard, whole_help

GOLDEN = Path(__file__).parent / "golden_gpu"
VLLM, SGLANG = ENGINES["vllm"], ENGINES["sglang"]
PROGRAMS: Mapping[EngineName, tuple[str, ...]] = {
    "vllm": ("/opt/vllm/bin/vllm",),
    "sglang": ("/opt/sglang/bin/python", "-m", "sglang.launch_server"),
}
HELP: Mapping[EngineName, str] = {
    "vllm": help_with(flags_of("vllm_0.32.0")),
    "sglang": help_with(flags_of("sglang_0.5.23")),
}
OLD_VLLM = flags_of("vllm_0.32.0") - {"--nnodes", "--node-rank", "--runner", "--shutdown-timeout"} | {
    "--task",
    "--disable-log-requests",
}


def case(
    name: EngineName,
    rank: int = 0,
    *,
    nodes: int = 1,
    gpus: int = 8,
    task: Task = "generate",
    launch_mode: LaunchMode | None = None,
    changed: Mapping[str, Any] | None = None,
    **options: Any,
) -> Launch:
    """A rank as the agent of its node launches it. ``changed`` are fields of the Launch."""
    options = {"tensor_parallel": gpus, "pipeline_parallel": nodes, **options}
    profile = Profile(name="p", engine=name, nodes=nodes, gpus_per_node=gpus, launch_mode=launch_mode, **options)
    plain = shard(profile, task=task, gpus=gpus)
    several = {"dist_init": "10.0.0.11:20150", "fabric": "ib-a"} if nodes > 1 else {}
    placed = dataclasses.replace(plain.placement, port=20100 + rank * PORT_BLOCK)
    ranked = dataclasses.replace(plain, id=f"small-abcde/{rank}", rank=rank, placement=placed, **several)  # type: ignore[arg-type]
    fields: dict[str, Any] = {"program": PROGRAMS[name], "host": f"10.0.0.{11 + rank}", "weights": "/models/small"}
    fields["help_text"] = HELP[name]
    if nodes > 1:
        fields |= {"interface": "eno1", "hcas": ("mlx5_0:1", "mlx5_1:1"), "sidecar_program": ("/opt/vllm/bin/ray",)}
    return dataclasses.replace(launch(ranked), **fields | dict(changed or {}))


CASES: Mapping[str, Launch] = {
    "vllm-1": case("vllm"),
    "vllm-1-of-everything": case("vllm", context=8192, parallel=64, args=("--dtype", "bfloat16")),
    "vllm-embed": case("vllm", task="embed", gpus=1),
    "vllm-rerank": case("vllm", task="rerank", gpus=1),
    "vllm-old-embed": case(
        "vllm", task="embed", gpus=1, changed={"version": "0.9.2", "help_text": help_with(OLD_VLLM)}
    ),
    "vllm-mp-2-rank-0": case("vllm", 0, nodes=2, context=8192, parallel=64),
    "vllm-mp-2-rank-1": case("vllm", 1, nodes=2, context=8192, parallel=64),
    "vllm-mp-4-rank-3": case("vllm", 3, nodes=4, tensor_parallel=32, pipeline_parallel=1),
    "vllm-ray-2-rank-0": case("vllm", 0, nodes=2, launch_mode="ray", context=8192),
    "vllm-ray-2-rank-1": case("vllm", 1, nodes=2, launch_mode="ray", context=8192),
    "vllm-old-2-rank-0": case("vllm", 0, nodes=2, changed={"version": "0.10.2", "help_text": help_with(OLD_VLLM)}),
    "vllm-0.31-1": case("vllm", changed={"version": "0.31.0+cpu", "help_text": whole_help("vllm-0.31.0")}),
    "vllm-0.31-cpu": case(
        "vllm",
        gpus=0,
        tensor_parallel=1,
        memory_bytes=8 * 2**30,
        changed={"version": "0.31.0+cpu", "help_text": whole_help("vllm-0.31.0")},
    ),
    "vllm-0.17-1": case("vllm", changed={"version": "0.17.1"}),
    "vllm-cpu": case("vllm", gpus=0, tensor_parallel=1, memory_bytes=16 * 2**30, changed={"weights_bytes": 2**30}),
    "vllm-cpu-2-rank-0": case("vllm", 0, nodes=2, gpus=0, tensor_parallel=1, memory_bytes=8 * 2**30),
    "vllm-cpu-2-rank-1": case("vllm", 1, nodes=2, gpus=0, tensor_parallel=1, memory_bytes=8 * 2**30),
    "sglang-cpu": case(
        "sglang", gpus=0, tensor_parallel=1, memory_bytes=8 * 2**30, changed={"node_memory_bytes": 24 * 2**30}
    ),
    "sglang-1": case("sglang"),
    "sglang-1-of-everything": case("sglang", context=8192, parallel=64, args=("--dtype", "bfloat16")),
    "sglang-embed": case("sglang", task="embed", gpus=1),
    "sglang-2-rank-0": case("sglang", 0, nodes=2, context=8192, parallel=64),
    "sglang-2-rank-1": case("sglang", 1, nodes=2, context=8192, parallel=64),
    "sglang-4-rank-3": case("sglang", 3, nodes=4, tensor_parallel=32, pipeline_parallel=1),
}


def command(of: Launch) -> Command:
    adapter = ENGINES[of.shard.profile.engine]
    assert adapter.refusal(of.shard) is None
    return adapter.command(of)


@pytest.mark.parametrize("name", CASES)
def test_command_line_is_the_golden_one(name: str) -> None:
    shown = dataclasses.asdict(command(CASES[name]))
    path = GOLDEN / f"{name}.json"
    if os.environ.get("LLMGW_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(shown, indent=2) + "\n")
    assert json.loads(json.dumps(shown)) == json.loads(path.read_text())


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


def command_lines(of: Command) -> Iterator[tuple[str, ...]]:
    yield of.argv
    for sidecar in of.sidecars:
        yield sidecar.argv
        yield sidecar.ready_argv


@pytest.mark.parametrize("name", CASES)
def test_the_key_is_in_no_argument_and_only_rank_0_has_it(name: str) -> None:
    key = CASES[name].shard.api_key
    made = command(CASES[name])
    assert not any(key in argument for argv in command_lines(made) for argument in argv)
    assert not any(key in value for sidecar in made.sidecars for value in sidecar.env.values())
    given = [value for value in (*made.env.values(), *made.files.values()) if key in value]
    assert len(given) == (CASES[name].shard.rank == 0)


@pytest.mark.parametrize("name", CASES)
def test_only_rank_0_serves(name: str) -> None:
    endpoint = command(CASES[name]).endpoint
    assert endpoint == ("10.0.0.11:20100" if CASES[name].shard.rank == 0 else None)


@pytest.mark.parametrize("name", [name for name in CASES if "-old-" not in name])
def test_every_flag_is_in_the_engines_help(name: str) -> None:
    made = command(CASES[name])
    flags = flags_of({"vllm": "vllm_0.32.0", "sglang": "sglang_0.5.23"}[CASES[name].shard.profile.engine])
    engine_flags = made.argv[len(CASES[name].program) :]
    assert [flag for flag in engine_flags if flag.startswith("-") and flag not in flags] == []
    ray_flags = [flag for sidecar in made.sidecars for flag in sidecar.argv if flag.startswith("-")]
    assert [flag for flag in ray_flags if flag not in flags_of("ray_2.60.0")] == []


@pytest.mark.parametrize("build", ["vllm-0.31.0", "vllm-0.32.0", "sglang-0.5.23"])
def test_every_flag_is_in_the_whole_help_of_a_real_build_and_has_a_value_where_it_takes_one(build: str) -> None:
    name = build.partition("-")[0]
    flags = read_flags(whole_help(build))
    for of in (each for each in CASES.values() if each.shard.profile.engine == name):
        version = "" if name == "sglang" else build.partition("-")[2]
        argv = command(dataclasses.replace(of, help_text=whole_help(build), version=version)).argv[len(of.program) :]
        for argument, following in itertools.pairwise((*argv, "--end")):
            if argument.startswith("-"):
                assert flags[argument].takes_value == (not following.startswith("-")), argument


@pytest.mark.parametrize("name", [name for name in CASES if "-rank-" in name])
def test_every_port_lies_in_the_ranks_own_block_or_is_where_the_ranks_meet(name: str) -> None:
    made = command(CASES[name])
    first = CASES[name].shard.placement.port
    ports = set()
    for argv in command_lines(made):
        for flag, value in itertools.pairwise(argv):
            if flag.endswith("-port") or flag == "--port":
                ports.add(int(value))
    ports |= {int(made.env["VLLM_PORT"])} if "VLLM_PORT" in made.env else set()
    meeting = {20150}
    assert ports - meeting
    assert all(first <= port < first + PORT_BLOCK for port in ports - meeting)


@pytest.mark.parametrize("name", [name for name in CASES if "-rank-" in name])
def test_ranks_on_several_nodes_are_pinned_to_their_fabric(name: str) -> None:
    made = command(CASES[name])
    for env in [*([made.env] if made.argv else []), *(sidecar.env for sidecar in made.sidecars)]:
        # Exactly these: without the equals sign mlx5_1 would take mlx5_10 and mlx5_11 too.
        assert env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
        assert env["NCCL_SOCKET_IFNAME"] == "=eno1"
        assert env["GLOO_SOCKET_IFNAME"] == env["TP_SOCKET_IFNAME"] == "eno1"
        gpus = range(CASES[name].shard.profile.gpus_per_node)
        assert env["CUDA_VISIBLE_DEVICES"] == ",".join(f"GPU-{index:04d}" for index in gpus)


@pytest.mark.parametrize("name", ["vllm-1", "sglang-1"])
def test_one_node_needs_no_fabric_and_no_meeting_place(name: str) -> None:
    made = command(CASES[name])
    assert not any(variable.startswith(("NCCL_", "GLOO_")) for variable in made.env)
    assert not any("20150" in argument for argument in made.argv)


@pytest.mark.parametrize("engine_name", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"interface": None}, "the interface of this node's management address is not known"),
        ({"hcas": ()}, "no adapter of fabric ib-a is ACTIVE on this node"),
        ({"weights": None}, "needs a model, and none was given"),
    ],
)
def test_what_would_hang_or_serve_something_else_is_not_started(
    engine_name: EngineName, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(LaunchRefused, match=words):
        ENGINES[engine_name].command(case(engine_name, 1, nodes=2, changed=changed))


# -- vLLM's two ways over several nodes


@pytest.mark.parametrize(
    ("profile_says", "node_says", "version", "flags", "mode"),
    [
        (None, None, "0.32.0+cpu", None, "mp"),
        (None, None, "0.11.1", None, "mp"),
        (None, None, "0.11.0", None, "ray"),
        (None, None, "", OLD_VLLM, "ray"),
        (None, None, "", None, "mp"),
        (None, "ray", "0.32.0", None, "ray"),
        ("mp", "ray", "0.32.0", None, "mp"),
        ("ray", "mp", "0.32.0", None, "ray"),
        ("ray", None, "0.9.2", None, "ray"),
    ],
)
def test_the_launch_mode_is_the_profiles_else_the_nodes_else_the_versions(
    profile_says: LaunchMode | None,
    node_says: LaunchMode | None,
    version: str,
    flags: frozenset[str] | None,
    mode: LaunchMode,
) -> None:
    changed: dict[str, Any] = {"version": version, "launch_mode": node_says}
    if flags is not None:
        changed["help_text"] = help_with(flags)
    made = command(case("vllm", nodes=2, launch_mode=profile_says, changed=changed))
    assert made.argv[made.argv.index("--distributed-executor-backend") + 1] == mode
    assert bool(made.sidecars) == (mode == "ray")


@pytest.mark.parametrize("changed", [{"version": "0.11.0"}, {"version": "", "help_text": help_with(OLD_VLLM)}])
@pytest.mark.parametrize("profile_says", ["mp", None])
def test_a_mode_that_the_version_lacks_is_refused(changed: dict[str, Any], profile_says: LaunchMode | None) -> None:
    asked = case("vllm", nodes=2, launch_mode=profile_says, changed={**changed, "launch_mode": "mp"})
    with pytest.raises(LaunchRefused, match=r"launch_mode mp over 2 nodes needs vLLM 0\.11\.1 or newer"):
        VLLM.command(asked)


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(LaunchRefused, match="launch_mode slurm is none of vLLM's: set it to mp or ray"):
        VLLM.command(case("vllm", nodes=2, changed={"launch_mode": "slurm"}))


def test_a_help_that_was_cut_short_proves_no_flag_missing() -> None:
    """``vllm serve --help`` prints the names of groups only."""
    made = command(case("vllm", nodes=2, changed={"help_text": "usage: vllm serve\n\n  Frontend\n  ModelConfig\n"}))
    assert "--nnodes" in made.argv


def test_ray_without_ray_is_refused() -> None:
    with pytest.raises(LaunchRefused, match=r"engines\.vllm\.ray_bin"):
        VLLM.command(case("vllm", nodes=2, launch_mode="ray", changed={"sidecar_program": ()}))


def test_with_ray_only_rank_0_runs_an_engine() -> None:
    head, worker = (command(CASES[f"vllm-ray-2-rank-{rank}"]) for rank in (0, 1))
    assert head.argv
    assert head.env["RAY_ADDRESS"] == "10.0.0.11:20150", "not the cluster of another replica on the same node"
    assert worker.argv == ()
    assert "--head" in head.sidecars[0].argv
    assert "--head" not in worker.sidecars[0].argv
    for number, made in enumerate((head, worker)):
        argv = made.sidecars[0].argv
        ip = argv[argv.index("--node-ip-address") + 1]
        assert ip == made.sidecars[0].env["VLLM_HOST_IP"] == f"10.0.0.{11 + number}"


def test_an_ipv6_meeting_place() -> None:
    asked = case("vllm", 1, nodes=2)
    there = dataclasses.replace(asked, shard=dataclasses.replace(asked.shard, dist_init="[fd00::11]:20150"))
    argv = command(there).argv
    assert argv[argv.index("--master-addr") + 1] == "fd00::11"


# -- on processors


def cache_gib(**options: Any) -> str:
    options = {"gpus": 0, "tensor_parallel": 1, **options}
    return command(case("vllm", **options)).env["VLLM_CPU_KVCACHE_SPACE"]


def test_vllms_cache_is_what_the_memory_leaves_beside_weights_and_processes() -> None:
    """In whole GiB, since nothing else can be said to every version; without, it would take most of the machine."""
    gib = 2**30
    assert cache_gib(memory_bytes=16 * gib, changed={"weights_bytes": 5 * gib}) == "8"
    assert cache_gib(memory_bytes=16 * gib, tensor_parallel=2, changed={"weights_bytes": 5 * gib}) == "4"
    assert cache_gib(memory_bytes=16 * gib, nodes=2, changed={"weights_bytes": 10 * gib}) == "8"
    assert cache_gib(memory_bytes=2 * gib) == "1"
    assert cache_gib() == "4"


def test_replicas_on_one_machine_do_not_bind_to_the_same_processors() -> None:
    made = command(case("vllm", gpus=0, tensor_parallel=1, changed={"cores": 8}))
    assert (made.env["VLLM_CPU_OMP_THREADS_BIND"], made.env["OMP_NUM_THREADS"]) == ("nobind", "7")
    assert command(case("vllm", gpus=0, tensor_parallel=2, changed={"cores": 8})).env["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in command(CASES["vllm-1"]).env


@pytest.mark.parametrize(("profile_says", "node_says"), [("ray", None), (None, "ray")])
def test_ray_without_gpus_is_refused(profile_says: LaunchMode | None, node_says: str | None) -> None:
    asked = case("vllm", nodes=2, gpus=0, tensor_parallel=1, launch_mode=profile_says)
    with pytest.raises(LaunchRefused, match="launch_mode ray needs GPUs, and profile 'p' has none"):
        VLLM.command(dataclasses.replace(asked, launch_mode=node_says))


def test_an_old_vllm_has_no_way_over_several_nodes_without_gpus() -> None:
    asked = case("vllm", nodes=2, gpus=0, tensor_parallel=1, changed={"version": "0.10.2"})
    with pytest.raises(LaunchRefused, match=r"needs vLLM 0\.11\.1 or newer, and this node has 0\.10\.2: upgrade it$"):
        VLLM.command(asked)


def test_sglang_takes_no_more_of_the_machine_than_it_was_given() -> None:
    argv = command(CASES["sglang-cpu"]).argv
    assert argv[argv.index("--mem-fraction-static") + 1] == "0.250", "6 of the 24 GiB: its processes take 2"
    assert "--mem-fraction-static" not in command(CASES["sglang-1"]).argv
    unknown = command(case("sglang", gpus=0, tensor_parallel=1, memory_bytes=2**33)).argv
    assert "--mem-fraction-static" not in unknown


@pytest.mark.parametrize(("version", "there"), [("0.32.0+cpu", True), ("0.18.0", True), ("0.17.1", False)])
def test_vllm_finishes_requests_where_it_can(version: str, there: bool) -> None:
    assert ("--shutdown-timeout" in command(case("vllm", changed={"version": version})).argv) == there


# -- refusals


def refused(name: EngineName, *, task: Task = "generate", **options: Any) -> str | None:
    return ENGINES[name].refusal(case(name, task=task, **options).shard)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 0, "nodes": 2, "tensor_parallel": 1, "pipeline_parallel": 1}, "is no multiple of its 2 nodes"),
        ({"gpus": 0, "tensor_parallel": 2}, None),
        ({"gpus": 8, "tensor_parallel": 4}, "tensor_parallel 4 × pipeline_parallel 1 = 4 GPUs, and nodes 1"),
        ({"gpus": 4, "nodes": 3, "tensor_parallel": 4, "pipeline_parallel": 2}, "nodes 3 × gpus_per_node 4 = 12"),
        (
            {"gpus": 3, "nodes": 2, "tensor_parallel": 2, "pipeline_parallel": 3},
            "a tensor-parallel group of 2 would lie across nodes of 3 GPUs",
        ),
        ({"task": "speech"}, "not speech"),
        ({"args": ("--port", "1")}, "--port is not the profile's to set"),
        ({"args": ("--host=0.0.0.0",)}, "--host is not the profile's to set"),
        ({"args": ("--api-key", "k")}, "each replica has a key of its own"),
        ({"args": ("--nnodes", "2")}, "decide"),
        ({"args": ("--node-ra", "2")}, "--node-ra is not the profile's to set"),
        ({"args": ("--tensor-parallel-size", "2")}, "`tensor_parallel`"),
        ({"args": ("--config", "/etc/x.yaml")}, "one by one"),
        ({"args": ("--dtype bfloat16",)}, '["--dtype", "bfloat16"]'),
        ({"args": ("--dtype", "bfloat16", "--trust-remote-code", "--quantization=fp8")}, None),
    ],
)
def test_refusals(name: EngineName, options: dict[str, Any], words: str | None) -> None:
    said = refused(name, **options)
    assert (said is None) == (words is None), said
    assert words is None or words in (said or "")


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("vllm", ("--max_model_len", "1"), "--max_model_len is not the profile's to set: the profile's `context`"),
        ("vllm", ("-tp", "2"), "`tensor_parallel`"),
        ("vllm", ("--data-parallel-size", "2"), "`replicas` decide"),
        ("vllm", ("--headless",), "`launch_mode` decide"),
        ("sglang", ("--tp", "2"), "--tp is not the profile's to set: the profile's `tensor_parallel`"),
        ("sglang", ("--dp", "2"), "`replicas` decide"),
        ("sglang", ("--context-length", "1"), "the profile's `context` decides"),
        ("sglang", ("--model", "x"), "`source` decides"),
    ],
)
def test_other_spellings_of_what_is_decided_are_refused_too(
    name: EngineName, args: tuple[str, ...], words: str
) -> None:
    assert words in (refused(name, args=args) or "")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_no_flag_is_refused_as_the_beginning_of_another(name: EngineName) -> None:
    """Every flag that the help defines may be set, unless it is one of those that are decided."""
    reserved = {"vllm": vllm._RESERVED, "sglang": sglang._RESERVED}[name]
    build = {"vllm": "vllm_0.32.0", "sglang": "sglang_0.5.23"}[name]
    for flag in sorted(flags_of(build)):
        assert (refused(name, args=(flag,)) is not None) == (flag in reserved), flag


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_what_is_reserved_is_there_to_be_set(name: EngineName) -> None:
    reserved = {"vllm": vllm._RESERVED, "sglang": sglang._RESERVED}[name]
    gone = {"--task"}
    build = {"vllm": "vllm_0.32.0", "sglang": "sglang_0.5.23"}[name]
    assert {flag for flag in reserved if flag.startswith("--")} - flags_of(build) <= gone


def test_several_nodes_without_a_meeting_place() -> None:
    for name in ("vllm", "sglang"):
        asked = case(name, nodes=2).shard
        said = ENGINES[name].refusal(dataclasses.replace(asked, dist_init=None))
        assert said is not None
        assert "the address where their ranks meet did not come with it" in said


def test_a_launch_mode_is_vllms_alone() -> None:
    assert "only vllm has" in (refused("sglang", nodes=2, launch_mode="mp") or "")


# -- what they say


@pytest.mark.parametrize(
    ("name", "output", "version"),
    [
        ("vllm", "INFO Triton is installed, but no driver was found\n0.32.0+cpu\n", "0.32.0+cpu"),
        ("vllm", "0.11.1\n", "0.11.1"),
        ("vllm", "vllm: error\n", None),
        ("sglang", "sglang version: 0.5.23\ngit revision: abc\n", "0.5.23"),
        ("sglang", "usage: sglang\n", None),
    ],
)
def test_versions(name: str, output: str, version: str | None) -> None:
    assert ENGINES[name].read_version(output) == version


def test_a_dead_vllm_is_told_from_a_busy_sglang() -> None:
    with pytest.raises(EngineUnhealthy, match="engine process is dead"):
        VLLM.read_health(503, b"")
    assert SGLANG.read_health(503, b"") == "starting, or too busy to answer one token"
    for adapter in (VLLM, SGLANG):
        assert adapter.read_health(200, b"") is None
        with pytest.raises(EngineUnhealthy, match="/health answered 500: oh"):
            adapter.read_health(500, b'{"error": {"message": "oh"}}')


def test_a_token_proves_the_shard() -> None:
    answer = b'{"model": "small", "choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}'
    for adapter, name in ((VLLM, "vllm"), (SGLANG, "sglang")):
        asked = case(name, nodes=2).shard  # type: ignore[arg-type]
        assert adapter.readiness(asked).path == "/v1/completions"
        assert adapter.read_readiness(asked, 200, answer) is None
        assert "401" in (adapter.read_readiness(asked, 401, b'{"error": "Unauthorized"}') or "")


def test_the_fixtures_are_whole() -> None:
    assert "--help" in read_flags(HELP["vllm"])
    assert len(flags_of("vllm_0.32.0")) > 400
    assert len(flags_of("sglang_0.5.23")) > 550
