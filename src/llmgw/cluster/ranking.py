"""The nodes that can take a rank of a profile, best first, kept up to date while replicas are placed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from llmgw.cluster.capacity import Capacity, Room
from llmgw.cluster.fitness import Needs, fits
from llmgw.cluster.refusal import Rule


class Pool(NamedTuple):
    """Nodes among which the ranks of a replica can reach one another, and start in the same way."""

    fabric: str
    subnets: tuple[str, ...] = ()
    version: str = ""
    mode: str = ""


ANYWHERE = Pool("")
"""For replicas on a single node."""

_Key = tuple[int, bool, int, int, int, int, int, str]
_Score = tuple[int, int, int, int, int, int, int, tuple[str, ...], Pool]


class Ranking:
    """For one kind of needs, and the nodes that hold one set of weights.

    The key of a node, smaller is better: how often the replica failed there; it lacks the weights; NVLink groups that
    the GPUs lie in; GPUs that are stranded by it; shards of the same model; free GPUs; less free memory; its name. Of
    several nodes each counts, in the same order, and then the fabric's name.
    """

    def __init__(
        self,
        capacity: Capacity,
        needs: Needs,
        basic: Mapping[str, Rule | None],
        pools: Callable[[str], tuple[Pool, ...]],
        holders: frozenset[str],
        stranded: Callable[[int], int],
    ) -> None:
        self._capacity = capacity
        self._needs = needs
        self._basic = basic
        """Which rule a node fails of those that placing something does not change."""
        self._pools = pools
        self._holders = holders
        self._stranded = stranded
        self._spread: Mapping[str, int] = {}
        self._failed_on: Mapping[str, int] = {}
        self._keys: dict[str, _Key] = {}
        self._order: dict[Pool, list[_Key]] = {}
        self._scores: dict[Pool, _Score] = {}
        self._seen = len(capacity.changed)
        for node_id, room in capacity.rooms.items():
            # What most nodes fail in a full cluster comes first.
            if len(room.free) >= needs.gpus and fits(room, needs) and basic[node_id] is None:
                self._keys[node_id] = self._key(node_id, room)
        if needs.nodes == 1:
            self._order[ANYWHERE] = list(self._keys.values())
        else:
            for node_id, key in self._keys.items():
                for pool in pools(node_id):
                    self._order.setdefault(pool, []).append(key)
        for order in self._order.values():
            order.sort()
        self._stale = set(self._order)

    def of_model(self, model: str) -> Ranking:
        """The same, counting the shards of a model that are there already."""
        twin = self._copy()
        twin._spread = self._capacity.spread(model)
        twin._rekey_all(twin._spread)
        return twin

    def after_failures(self, failed_on: Mapping[str, int]) -> Ranking:
        """The same for one replica: by node, how often it failed there."""
        twin = self._copy()
        twin._failed_on = failed_on
        twin._rekey_all(failed_on)
        return twin

    def best(self) -> tuple[Pool, tuple[str, ...]] | None:
        """The nodes for a replica, in the order of their ids, and what joins them; None where there are too few."""
        self._catch_up()
        if self._needs.nodes == 1:
            order = self._order.get(ANYWHERE)
            return (ANYWHERE, (order[0][-1],)) if order else None
        for pool in self._stale:
            self._score(pool)
        self._stale.clear()
        if not self._scores:
            return None
        best = min(self._scores.values())
        return best[-1], best[-2]

    def _copy(self) -> Ranking:
        self._catch_up()
        twin = object.__new__(Ranking)
        twin.__dict__.update(self.__dict__)
        twin._keys = dict(self._keys)
        twin._order = {pool: list(order) for pool, order in self._order.items()}
        twin._scores, twin._stale = dict(self._scores), set(self._stale)
        return twin

    def _rekey_all(self, nodes: Iterable[str]) -> None:
        for node_id in nodes:
            if node_id in self._capacity.rooms:  # A node may have been removed, and what it ran be remembered still.
                self._rekey(node_id)

    def _catch_up(self) -> None:
        changed = self._capacity.changed
        if self._seen < len(changed):
            for node_id in dict.fromkeys(changed[self._seen :]):
                self._rekey(node_id)
            self._seen = len(changed)

    def _rekey(self, node_id: str) -> None:
        if self._basic[node_id] is not None:
            return
        room = self._capacity.rooms[node_id]
        old = self._keys.pop(node_id, None)
        new = self._key(node_id, room) if fits(room, self._needs) else None
        if new is not None:
            self._keys[node_id] = new
        if old == new:
            return
        for pool in self._pools(node_id):
            order = self._order.setdefault(pool, [])
            if old is not None:
                del order[bisect_left(order, old)]
            if new is not None:
                insort(order, new)
            self._stale.add(pool)

    def _key(self, node_id: str, room: Room) -> _Key:
        needs = self._needs
        return (
            self._failed_on.get(node_id, 0),
            node_id not in self._holders,
            room.islands(needs.gpus, needs.together),
            self._stranded(len(room.free)),
            self._spread.get(node_id, 0),
            len(room.free),
            -room.memory_free_bytes,
            node_id,
        )

    def _score(self, pool: Pool) -> None:
        chosen = self._order[pool][: self._needs.nodes]
        if len(chosen) < self._needs.nodes:
            self._scores.pop(pool, None)
            return
        failed, lacking, groups, stranded, same, free, memory, names = zip(*chosen, strict=True)
        nodes = tuple(sorted(names))
        sums = sum(failed), sum(lacking), sum(groups), sum(stranded), sum(same), sum(free), sum(memory)
        self._scores[pool] = (*sums, nodes, pool)
