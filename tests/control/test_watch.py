"""Whatever changes, what is made anew for the changed parts alone is what would be made of the whole."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from llmgw.cluster.catalog import Catalog, ModelSpec, Profile
from llmgw.cluster.derived import desired, desired_by_node, routes
from llmgw.cluster.model import (
    Cluster,
    DesiredShard,
    Node,
    NodeState,
    ObservedShard,
    Placement,
    Replica,
    ReplicaState,
    ShardState,
)
from llmgw.control.table import Table
from llmgw.control.watch import Watch
from llmgw.store.base import ApiKey
from tests.control.floor import inventory

PROFILE = Profile(name="p", engine="sim", memory_bytes=1)
NODES = ("n1", "n2", "n3")
IDS = ("a-1", "a-2", "b-1")
INVENTORIES = {fabric: inventory("n", fabric) for fabric in (None, "ib-a", "ib-b")}


def spec_of(model: str, aliases: tuple[str, ...] = ()) -> ModelSpec:
    return ModelSpec(name=model, aliases=aliases, profiles=(PROFILE,))


class World:
    """A cluster of which anything may change at any time, and what is kept up beside it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster(name="c", secret="s", catalog=Catalog(models=(spec_of("a"), spec_of("b"))))
        self.keys: dict[str, ApiKey] = {}
        self.watch, self.table = Watch(), Table(1)
        self.wanted: dict[str, tuple[DesiredShard, ...]] = {}

    def change(self) -> None:
        act = self.random.choices(
            (self.change_node, self.change_replica, self.remove, self.change_catalog, self.change_keys),
            (50, 30, 5, 10, 5),
        )
        act[0]()

    def change_node(self) -> None:
        """One thing about one node, most of them live."""
        draw, id = self.random, self.random.choice(NODES)
        node = self.cluster.nodes.get(id) or Node(
            id=id, state=NodeState.READY, since=0.0, session=1, heard_at_s=5.0, probed=True, inventory=INVENTORIES[None]
        )
        changes: dict[str, Any] = draw.choice(
            (
                {"state": draw.choice(list(NodeState))},
                {"state": NodeState.READY},
                {"session": draw.choice((None, 1, 2))},
                {"heard_at_s": draw.choice((0.0, 5.0, 6.0))},
                {"probed": draw.random() < 0.5},
                {"inventory": INVENTORIES[draw.choice(list(INVENTORIES))]},
                {"shards": self.shards()},
            )
        )
        self.cluster = replace(self.cluster, nodes={**self.cluster.nodes, id: replace(node, **changes)})

    def shards(self) -> tuple[ObservedShard, ...]:
        draw = self.random
        return tuple(
            ObservedShard(id=f"{id}/{rank}", generation=1, state=draw.choice(list(ShardState)), since=0.0)
            for id in IDS
            for rank in range(2)
            if draw.random() < 0.5
        )

    def change_replica(self) -> None:
        draw, id = self.random, self.random.choice(IDS)
        on = draw.sample(NODES, draw.choice((1, 2)))
        states = (ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.STARTING, draw.choice(list(ReplicaState)))
        replica = Replica(
            id=id,
            model=id[0],
            state=draw.choice(states),
            since=0.0,
            generation=draw.choice((1, 1, 2)),
            number=1,
            profile=PROFILE,
            spec=spec_of(id[0], draw.choice(((), ("x",)))),
            placements=tuple(Placement(node=name, port=20000) for name in on),
            endpoint="127.0.0.1:20000",
            lost=draw.random() < 0.3,
        )
        self.cluster = replace(self.cluster, replicas={**self.cluster.replicas, id: replica})

    def remove(self) -> None:
        gone = self.random.choice(NODES + IDS)
        self.cluster = replace(
            self.cluster,
            nodes={id: node for id, node in self.cluster.nodes.items() if id != gone},
            replicas={id: replica for id, replica in self.cluster.replicas.items() if id != gone},
        )

    def change_catalog(self) -> None:
        draw = self.random
        models = sorted(draw.sample("abc", draw.choice((1, 2, 3))))
        specs = [spec_of(model) for model in models]
        specs[0] = replace(specs[0], aliases=draw.choice(((), ("x",), ("x", "y"))))
        self.cluster = replace(
            self.cluster,
            catalog=Catalog(models=tuple(specs)),
            scale={**self.cluster.scale, draw.choice("ab"): draw.choice((0, 1, 2))},
            halting=draw.random() < 0.2,
        )

    def change_keys(self) -> None:
        id, revoked = self.random.choice("kl"), self.random.random() < 0.5
        key = ApiKey(id=id, name=id, hash="ab", created_at=0.0, revoked_at=1.0 if revoked else None)
        self.keys = {**self.keys, id: key}

    def follow(self) -> None:
        version, before = self.table.version, (self.table.routes, self.table.keys)
        changed = self.watch.look(self.cluster)
        is_new = self.table.follow(self.cluster, self.keys, changed.models)
        assert self.table.routes == routes(self.cluster)
        assert [key.id for key in self.table.keys] == [key.id for key in self.keys.values() if key.revoked_at is None]
        assert is_new is (self.table.version > version)
        assert is_new or (self.table.routes, self.table.keys) == before
        for node_id in changed.nodes:
            here = {id: self.cluster.replicas[id] for id in self.watch.here.get(node_id, ())}
            self.wanted[node_id] = desired(replace(self.cluster, replicas=here), node_id)
        for node_id, shards in desired_by_node(self.cluster).items():
            assert self.wanted[node_id] == shards


@pytest.mark.parametrize("seed", range(2))
def test_parts_are_as_the_whole(seed: int) -> None:
    world = World(seed)
    for _ in range(1_000):
        world.change()
        world.follow()
