"""Values that the store's tests write, and strategies for values of any dataclass."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from hypothesis import strategies as st

from llmgw.cluster.catalog import EngineSpec, ModelSpec, Profile
from llmgw.cluster.model import (
    Cpu,
    Drain,
    EngineHistory,
    EngineOnNode,
    EngineState,
    Exit,
    Gpu,
    Inventory,
    Move,
    MoveState,
    Node,
    NodeState,
    ObservedShard,
    Placement,
    Replica,
    ReplicaState,
    ShardState,
    StoryLine,
    Vitals,
)
from llmgw.store.base import ApiKey, Event
from llmgw.store.identities import Certificate, Revocation, Token

GIB = 2**30


def node(id: str = "llmgw-node01", **changes: Any) -> Node:
    """A node in the middle of its session, with everything that a node can have."""
    whole = Node(
        id=id,
        state=NodeState.READY,
        since=1_764_439_403.25,
        why="heard",
        address="10.0.0.11:51034",
        agent_version="0.1.0",
        session=7,
        heard_at_s=1234.5,
        probed=True,
        inventory=Inventory(
            hostname=id,
            os="Debian GNU/Linux 12",
            kernel="6.1.0",
            libc="glibc 2.36",
            cpu=Cpu(model="AMD EPYC 9554", architecture="x86_64", cores=64, extensions=("avx2", "fma")),
            memory_bytes=512 * GIB,
            mgmt_addr="10.0.0.11",
            gpus=(Gpu(index=0, uuid="GPU-0", name="H100", memory_bytes=80 * GIB), _SILENT_GPU),
            labels={"rack": "a3", "größe": "groß"},
        ),
        vitals=Vitals(memory_bytes=1, memory_available_bytes=1, disk_bytes=1, disk_free_bytes=1),
        engines=(EngineOnNode(name="llamacpp", version="b10991", state=EngineState.INSTALLED, since=5.0),),
        shards=(ObservedShard(id="m-abcde/0", generation=1, state=ShardState.READY, since=1.0),),
        weights=("hf://org/name",),
    )
    return dataclasses.replace(whole, **changes)


_SILENT_GPU = Gpu(index=1, uuid="GPU-1", name="?", memory_bytes=None, problem="GPU is lost")


def replica(id: str = "m-abcde", **changes: Any) -> Replica:
    profile = Profile(name="cpu", engine="llamacpp", memory_bytes=2 * GIB, args=("--no-webui",))
    whole = Replica(
        id=id,
        model="m",
        state=ReplicaState.READY,
        since=1_764_439_500.0,
        why="answered one token",
        generation=3,
        profile=profile,
        spec=ModelSpec(name="m", profiles=(profile,), source="hf://org/name", aliases=("m-latest",)),
        placements=(Placement(node="llmgw-node01", gpus=(0,), gpu_uuids=("GPU-0",), port=20_100),),
        restarts=2,
        failures=1,
        failed_on={"llmgw-node01": 1},
        retry_at=1_764_439_600.0,
        last_exit=Exit(signal="SIGKILL", last_lines=("loading", "out of memory")),
        story=tuple(StoryLine(at=float(i), generation=3, state="starting", why=f"line {i}") for i in range(3)),
    )
    return dataclasses.replace(whole, **changes)


def drain(node: str = "llmgw-node01", **changes: Any) -> Drain:
    move = Move(
        replica="m-abcde",
        model="m",
        state=MoveState.STARTING,
        why="loading",
        targets=("llmgw-node02",),
        replacement="m-fghij",
        failed_on={"llmgw-node02": 3},
        since=5.0,
        seconds={"pending": 0.5},
    )
    whole = Drain(node=node, since=4.0, in_flight_s=60.0, allow_downtime=("x",), wait=True, moves=(move,))
    return dataclasses.replace(whole, **changes)


def engine(name: str = "llamacpp", **changes: Any) -> EngineHistory:
    whole = EngineHistory(
        name="llamacpp",
        spec=EngineSpec(name="llamacpp", version="b10991", source="https://mirror/l.tar.gz", sha256="ab" * 32),
        previous=EngineSpec(name="llamacpp", version="b10068", source="index", package="skulk"),
        rolled_back="m-abcde failed 3 times in a row",
        since=6.0,
        older=(EngineSpec(name="llamacpp", version="b9000"),),
    )
    return dataclasses.replace(whole, name=name, **changes)


def event(number: int, subject: str = "llmgw-node01", **changes: Any) -> Event:
    """Its id sorts by ``number``."""
    whole = Event(
        id=f"{number:026}", at=float(number), kind="node.ready", subject=subject, words="is ready", data={"n": "1"}
    )
    return dataclasses.replace(whole, **changes)


def key(id: str = "key-abcde", **changes: Any) -> ApiKey:
    return dataclasses.replace(ApiKey(id=id, name="ci", hash="ab" * 32, created_at=1.5, models=("m",)), **changes)


def certificate(serial: str = "0a", node: str = "llmgw-node01", **changes: Any) -> Certificate:
    whole = Certificate(
        serial=serial,
        node=node,
        source="renewal",
        state="next",
        issued_at=1_764_439_403.5,
        not_after=1_764_525_803.5,
        chain="01",
        previous="02",
        key_hash="ab" * 32,
        issuer="0123456789ab",
        machine="f" * 16,
        first_used_at=1_764_439_404.0,
    )
    return dataclasses.replace(whole, **changes)


def token(id: str = "abcdefgh", **changes: Any) -> Token:
    whole = Token(
        id=id, node="llmgw-node01", hash="cd" * 32, created_at=1.5, expires_at=901.5, labels={"größe": "groß"}
    )
    return dataclasses.replace(whole, **changes)


def revocation(subject: str = "llmgw-node01", **changes: Any) -> Revocation:
    return dataclasses.replace(Revocation(kind="node", subject=subject, at=5.5, why="stolen"), **changes)


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type with every field drawn, defaults or not."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{field.name: anything(hints[field.name]) for field in dataclasses.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(anything, arguments))
    if origin is tuple:
        return st.lists(anything(arguments[0]), max_size=2).map(tuple)
    if origin in (dict, Mapping):
        return st.dictionaries(anything(arguments[0]), anything(arguments[1]), max_size=2)
    return _PLAIN[kind]


_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    int: st.integers(min_value=-(2**60), max_value=2**60),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    types.NoneType: st.none(),
}
