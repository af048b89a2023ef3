"""``models`` of ``server.yaml``: the keys of a model and of its profiles, their rules, and the catalog they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from llmgw.cluster.catalog import ModelSpec, Profile, SimOptions
from llmgw.config.check import Remark
from llmgw.config.faults import KeyPath
from llmgw.config.shape import (
    Alias,
    Count,
    Duration,
    Engine,
    Filled,
    Item,
    LabelKey,
    LabelValue,
    Launching,
    ModelName,
    ModelTask,
    ProfileName,
    Section,
    Size,
    Source,
    Text,
    count,
    whole,
)


class SimFile(Section):
    TITLE = "sim"

    load_time: Duration = 0.0
    first_token: Duration = 0.0
    token_interval: Duration = 0.0
    fault: Filled | None = None


class ProfileFile(Section):
    TITLE = "a profile"
    WORDS: ClassVar[Mapping[str, str]] = {
        "gpus": "gpus_per_node",
        "gpu": "gpus_per_node",
        "tp": "tensor_parallel",
        "tensor_parallel_size": "tensor_parallel",
        "pp": "pipeline_parallel",
        "pipeline_parallel_size": "pipeline_parallel",
        "extra_args": "args",
        "selector": "node_selector",
        "labels": "node_selector",
        "ram": "memory",
        "ctx_size": "context",
        "max_model_len": "context",
        "backend": "engine",
    }

    name: ProfileName | None = None
    engine: Engine = Field(description="what runs it: llamacpp, vllm, sglang or sim")
    nodes: Annotated[int, count(1, 1024)] = 1
    gpus_per_node: Annotated[int, count(0, 64)] = 0
    tensor_parallel: Annotated[int, count(1, 65536)] | None = None
    pipeline_parallel: Annotated[int, count(1, 65536)] | None = None
    memory: Size | None = None
    context: Count | None = None
    parallel: Annotated[int, count(1, 65536)] | None = None
    max_concurrency: Annotated[int, count(1, 1_000_000)] | None = None
    launch_mode: Launching | None = None
    node_selector: dict[LabelKey, Item[LabelValue]] = Field(default_factory=dict)
    args: list[Item[Text]] = Field(default_factory=list)
    sim: SimFile | None = None


class ModelFile(Section):
    TITLE = "a model"
    WORDS: ClassVar[Mapping[str, str]] = {
        "id": "name",
        "alias": "aliases",
        "model": "source",
        "path": "source",
        "url": "source",
        "weights": "source",
        "profile": "profiles",
        "count": "replicas",
        "type": "task",
    }

    name: ModelName = Field(description="what clients ask for")
    aliases: list[Item[Alias]] = Field(default_factory=list)
    task: ModelTask = "generate"
    source: Source | None = None
    replicas: Annotated[int, count(0, 10_000)] = 1
    profiles: Annotated[list[Item[ProfileFile]], Field(min_length=1)] = Field(
        description="a list of ways to run it, tried in order"
    )


def model_rules(models: list[ModelFile]) -> Iterator[Remark]:
    """What is wrong between values that are right by themselves."""
    yield from _names(models)
    for index, model in enumerate(models):
        if not whole(model) or not whole(model.profiles):
            continue
        path: KeyPath = ("models", index)
        if whole(model.source) and model.source is None:
            yield from _source(model.profiles, path)
        yield from _profile_names(model.profiles, path)
        for position, profile in enumerate(model.profiles):
            if whole(profile):
                yield from _profile(profile, (*path, "profiles", position))


def _names(models: list[ModelFile]) -> Iterator[Remark]:
    """Each name and alias means one model. Names come first: an alias that takes a model's name is the one at fault."""
    taken: dict[str, str] = {}
    for index, model in enumerate(models):
        if not whole(model) or not whole(model.name):
            continue
        if model.name in taken:
            expected = "a name that no other model has"
            yield Remark(path=("models", index, "name"), expected=expected, hint=taken[model.name])
        taken.setdefault(model.name, f"it is the name of models[{index}]")
    for index, model in enumerate(models):
        if not whole(model) or not whole(model.aliases):
            continue
        for position, alias in enumerate(model.aliases):
            if not whole(alias):
                continue
            if alias in taken:
                expected = "an alias that is no model's name, nor an alias already"
                yield Remark(path=("models", index, "aliases", position), expected=expected, hint=taken[alias])
            taken.setdefault(alias, f"it is an alias of models[{index}]")


def _source(profiles: list[ProfileFile], path: KeyPath) -> Iterator[Remark]:
    real = [
        profile.engine for profile in profiles if whole(profile) and whole(profile.engine) and profile.engine != "sim"
    ]
    if real:
        expected = "`source`: where its weights come from, such as hf://ORG/NAME or file:///PATH"
        hint = f"`{real[0]}` needs weights; only a model whose profiles are all `sim` has none"
        yield Remark(path=(*path, "source"), expected=expected, found="no such key in a model", hint=hint)


def _profile_names(profiles: list[ProfileFile], path: KeyPath) -> Iterator[Remark]:
    seen: dict[str, int] = {}
    for position, profile in enumerate(profiles):
        if not whole(profile) or profile.name is None or not whole(profile.name):
            continue
        if seen.setdefault(profile.name, position) != position:
            expected = "a name that no other profile of this model has"
            hint = f"profiles[{seen[profile.name]}] has it already"
            yield Remark(path=(*path, "profiles", position, "name"), expected=expected, hint=hint)


def _profile(profile: ProfileFile, path: KeyPath) -> Iterator[Remark]:
    if not whole(profile.engine):
        return
    for key, engine in (("sim", "sim"), ("launch_mode", "vllm")):
        value = getattr(profile, key)
        if value is not None and whole(value) and profile.engine != engine:
            hint = f"this profile's engine is `{profile.engine}`"
            yield Remark(path=(*path, key), expected=f"`{key}` only where the engine is `{engine}`", hint=hint)
    if not whole(profile.gpus_per_node):
        return
    if profile.gpus_per_node:
        yield from _parallelism(profile, path)
    elif profile.memory is None and profile.engine != "sim":
        expected = "`memory`, since there is no `gpus_per_node`: a profile without GPUs is placed by memory"
        found, hint = "neither of the two", "such as memory: 4GiB, for weights and context together"
        yield Remark(path=(*path, "memory"), expected=expected, found=found, hint=hint)


def _parallelism(profile: ProfileFile, path: KeyPath) -> Iterator[Remark]:
    if not whole(profile.nodes, profile.tensor_parallel, profile.pipeline_parallel):
        return
    gpus = profile.nodes * profile.gpus_per_node
    tensor, pipeline = parallelism(profile)
    if tensor * pipeline != gpus:
        key = "tensor_parallel" if profile.tensor_parallel is not None else "pipeline_parallel"
        expected = (
            f"tensor_parallel × pipeline_parallel = nodes × gpus_per_node = {profile.nodes} × {profile.gpus_per_node}"
        )
        hint = f"leave both out for {profile.gpus_per_node} × {profile.nodes}"
        yield Remark(path=(*path, key), expected=expected, found=f"{tensor} × {pipeline}", hint=hint)


def parallelism(profile: ProfileFile) -> tuple[int, int]:
    """Tensor and pipeline parallel. Left out: tensor within a node, pipeline across; or what the other one leaves."""
    tensor, pipeline = profile.tensor_parallel, profile.pipeline_parallel
    if not profile.gpus_per_node:
        return tensor or 1, pipeline or 1
    gpus = profile.nodes * profile.gpus_per_node
    if tensor is None and pipeline is None:
        return profile.gpus_per_node, profile.nodes
    if tensor is None:
        assert pipeline is not None
        return max(1, gpus // pipeline), pipeline
    return tensor, pipeline if pipeline is not None else max(1, gpus // tensor)


def model_spec(file: ModelFile) -> ModelSpec:
    """A model with nothing wrong in it, as the catalog holds it."""
    names = _given_names(file.profiles)
    return ModelSpec(
        name=file.name,
        profiles=tuple(_spec(profile, name) for profile, name in zip(file.profiles, names, strict=True)),
        source=file.source,
        aliases=tuple(file.aliases),
        task=file.task,
        replicas=file.replicas,
    )


def _given_names(profiles: list[ProfileFile]) -> list[str]:
    """A profile without a name is called after its engine; a second one ``vllm-2``, and so on."""
    taken = {profile.name for profile in profiles}
    names = []
    for profile in profiles:
        name, number = profile.name or profile.engine, 1
        while profile.name is None and name in taken:
            number += 1
            name = f"{profile.engine}-{number}"
        taken.add(name)
        names.append(name)
    return names


def _spec(file: ProfileFile, name: str) -> Profile:
    tensor, pipeline = parallelism(file)
    return Profile(
        name=name,
        engine=file.engine,
        nodes=file.nodes,
        gpus_per_node=file.gpus_per_node,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        memory_bytes=file.memory,
        context=file.context,
        parallel=file.parallel,
        max_concurrency=file.max_concurrency,
        launch_mode=file.launch_mode,
        node_selector=dict(file.node_selector),
        args=tuple(file.args),
        sim=_sim(file.sim),
    )


def _sim(file: SimFile | None) -> SimOptions | None:
    if file is None:
        return None
    return SimOptions(
        load_time_s=file.load_time,
        first_token_s=file.first_token,
        token_interval_s=file.token_interval,
        fault=file.fault,
    )
