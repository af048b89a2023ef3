"""The widest command holds every flag that an adapter can write."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from llmgw.cluster.catalog import Profile, Task
from llmgw.engines import llamacpp, llamacpp_rpc, ray, sglang, sim, vllm
from llmgw.engines import widest as widest_module
from llmgw.engines.base import Command, Launch
from llmgw.engines.flags import FLAG
from llmgw.engines.registry import ENGINES
from llmgw.engines.vllm import Vllm
from llmgw.engines.widest import Passed, widest

HERE = Path(__file__).parent
MODULES: dict[str, tuple[ModuleType, ...]] = {
    "llamacpp": (llamacpp, llamacpp_rpc),
    "vllm": (vllm, ray),
    "sglang": (sglang,),
    "sim": (sim,),
}
NOT_OURS = {"--pooling", "--flash-attn", "--dtype", "--fault", "-m"}
"""What the cases of golden files have as ``args``, which are the operator's own; and what belongs to Python."""


def by_name(engine: str, version: str = "") -> dict[str, Passed]:
    return {f"{flag.program} {flag.name}".strip(): flag for flag in widest(ENGINES[engine], version)}


def names(engine: str, version: str = "") -> set[str]:
    flags = widest(ENGINES[engine], version)
    return {flag.name for flag in flags} | {name for flag in flags for name in flag.instead}


def written_in(module: ModuleType) -> Iterator[str]:
    """Every flag that stands in a module's code by itself, but for those that profiles may not set."""
    tree = ast.parse(inspect.getsource(module))
    spared = [
        node for node in tree.body if isinstance(node, ast.Assign) and "_RESERVED" in ast.unparse(node.targets[0])
    ]
    skipped = {id(inner) for node in spared for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            name = node.value.partition("=")[0]
            if FLAG.fullmatch(name):
                yield name


@pytest.mark.parametrize("engine", MODULES)
def test_every_flag_in_the_adapters_code_is_in_it(engine: str) -> None:
    in_code = {flag for module in MODULES[engine] for flag in written_in(module)} - {"--help"}
    assert in_code, "the code was not read"
    assert in_code - names(engine) == set()


@pytest.mark.parametrize("engine", MODULES)
def test_every_flag_of_the_golden_command_lines_is_in_it(engine: str) -> None:
    known = names(engine) | names(engine, "0.9.2") if engine == "vllm" else names(engine)
    seen = set()
    for path in HERE.glob("golden*/**/*.json"):
        if path.name.startswith(f"{engine}-") or path.stem == engine:
            shown = json.loads(path.read_text())
            for argv in [shown["argv"], *(sidecar["argv"] for sidecar in shown.get("sidecars", ()))]:
                seen |= {argument for argument in argv if FLAG.fullmatch(argument)}
    assert seen, "there are no golden files of it"
    assert seen - known - NOT_OURS == set()


def test_every_field_of_a_profile_is_tried() -> None:
    tried = {key for options in widest_module._PROFILE for _, changes in options for key in changes}
    # What it is called and where it may run; and ``args``, which are the operator's own.
    no_options = {"name", "engine", "engine_version", "node_selector", "args"}
    assert {field.name for field in dataclasses.fields(Profile)} == tried | no_options


def test_every_task_is_tried() -> None:
    tried = {changes["task"] for options in widest_module._SHARD for _, changes in options if "task" in changes}
    assert tried == set(get_args(Task))


class OddlyOptioned(Vllm):
    """Writes flags that hardly any replica gets."""

    def command(self, launch: Launch) -> Command:
        command = super().command(launch)
        profile = launch.shard.profile
        argv = [*command.argv]
        if launch.shard.rank > 0 and profile.context and profile.parallel and profile.launch_mode == "mp":
            argv += ["--odd", "1"]
        if argv and launch.cores == 1 and launch.shard.task == "rerank":
            argv += [name for name in ("--newest", "--newer", "--old") if name in launch.flags][:1]
        return dataclasses.replace(command, argv=tuple(argv))


def test_a_flag_for_an_odd_replica_is_found_and_it_is_said_which() -> None:
    found = {flag.name: flag for flag in widest(OddlyOptioned())}
    assert "--odd" not in names("vllm")
    assert found["--odd"].when.startswith("over 2 nodes")
    assert found["--odd"].when.endswith("launch_mode mp, with a context, with parallel, ranks above 0")
    assert found["--odd"].values == {"1"}
    assert found["--newest"].instead == ("--newer", "--old")
    assert found["--newest"].when == "task rerank"


def test_what_is_passed_instead() -> None:
    found = by_name("llamacpp")
    assert found["--no-ui"].instead == ("--no-webui",)
    assert found["--device"].instead == ("--n-gpu-layers",)
    assert found["--fit"].asked
    assert found["--fit"].instead == ()
    assert not found["--ctx-size"].asked
    assert by_name("vllm")["--runner"].instead == ("--task",)


def test_what_only_several_nodes_get_is_in_it() -> None:
    found = by_name("vllm")
    assert found["--headless"].when.endswith("ranks above 0")
    assert {"ray start --head", "ray start --address", "ray health-check --address"} <= set(found)
    assert "--rpc" in by_name("llamacpp")
    assert "ggml-rpc-server --port" in by_name("llamacpp")
    assert "--dist-init-addr" in by_name("sglang")


def test_values_tell_how_a_flag_is_passed() -> None:
    found = by_name("vllm")
    assert found["--headless"].values == {None}
    assert found["--distributed-executor-backend"].values == {"mp", "ray"}
    assert found["--host"].when == ""


def test_what_a_file_passes_counts_too() -> None:
    assert by_name("sglang")["--api-key"].values == {'"key"'}


def test_an_older_version_gets_other_flags() -> None:
    old = by_name("vllm", "0.9.2")
    assert "--task" in old
    assert "--nnodes" not in old
    assert "ray start --head" in old
