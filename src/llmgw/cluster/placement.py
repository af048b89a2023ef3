"""Where a replica may go, which place is best, and why not where it may not. See docs/placement.md."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from llmgw.cluster.capacity import Capacity
from llmgw.cluster.catalog import Catalog, ModelSpec, Profile
from llmgw.cluster.fitness import (
    Needs,
    basic_rule,
    failed_rule,
    fits,
    held_by_none,
    impossible,
    in_words,
    launch_mode,
    needs,
    short_by,
    source_needed,
)
from llmgw.cluster.lifecycle import AWAY, FAILURES_GIVEN_UP, judged
from llmgw.cluster.model import DIST_INIT_OFFSET, Cluster, Instant, Node, Placement, Replica
from llmgw.cluster.ranking import ANYWHERE, Pool, Ranking
from llmgw.cluster.refusal import (
    FabricRefusal,
    NodeRefusal,
    ProfileRefusal,
    Refusal,
    Rule,
    Verdict,
    of_model,
    summary_of_model,
    summary_of_nodes,
)
from llmgw.cluster.spanning import Candidate, Spanning
from llmgw.cluster.topology import Seat, networks

__all__ = [
    "Before",
    "FabricRefusal",
    "NodeRefusal",
    "Placed",
    "Planner",
    "ProfileRefusal",
    "Refusal",
    "place",
]

_ANYWHERE = (ANYWHERE,)


@dataclass(frozen=True, slots=True)
class Placed:
    """A place for every rank, in the order of ranks, which is that of the nodes' ids."""

    profile: Profile
    placements: tuple[Placement, ...]
    fabric: str | None = None
    """What the nodes share; None where there is one."""
    dist_init: str | None = None
    """host:port on the leader at which the ranks meet; None where there is one."""


@dataclass(frozen=True, slots=True)
class Before:
    """Where a replica's last generation ran, or a plan had it run: preferred, if it still fits there. One that failed
    there too often is tried where it has failed least."""

    nodes: tuple[str, ...] = ()
    """By rank."""
    taken_port: int = 0
    """Block that was found taken on one of the nodes; 0: none was."""
    failed_on: Mapping[str, int] = field(default_factory=dict)
    """By node, how often in a row it failed there."""

    @classmethod
    def of(cls, replica: Replica) -> Before:
        """For the next generation of a replica."""
        nodes = tuple(placement.node for placement in replica.placements or replica.previous)
        return cls(nodes, replica.taken_port, replica.failed_on)

    @property
    def failed_too_often(self) -> bool:
        return any(self.failed_on.get(node_id, 0) >= FAILURES_GIVEN_UP for node_id in self.nodes)

    def failures(self, nodes: Iterable[str]) -> int:
        return sum(self.failed_on.get(node_id, 0) for node_id in nodes)


def place(cluster: Cluster, spec: ModelSpec, now: Instant) -> Placed | Refusal:
    """Where one more replica of the model would go now. Nodes are judged by their silence up to ``now``."""
    nodes = {node.id: judged(cluster, node, now) for node in cluster.nodes.values()}
    return Planner(replace(cluster, nodes=nodes)).place(spec)


class Planner:
    """Places replicas one after another, each on what the ones before it left."""

    def __init__(self, cluster: Cluster) -> None:
        self._nodes = cluster.nodes
        self._drains = cluster.drains
        self._capacity = Capacity(cluster)
        self._sizes = _sizes(cluster.catalog)
        self._needs: dict[tuple[int, str | None], tuple[Profile, Needs]] = {}
        self._basic: dict[tuple[str, str, tuple[tuple[str, str], ...]], _BasicRules] = {}
        self._seats: dict[str, dict[str, Seat]] | None = None
        self._networks: dict[str, dict[str, frozenset[str]]] = {}
        self._holders: dict[str, frozenset[str]] = {}
        self._same: dict[frozenset[str], frozenset[str]] = {}
        self._rankings: dict[tuple[Needs, frozenset[str]], Ranking] = {}
        self._of_model: dict[tuple[Needs, frozenset[str]], tuple[str, Ranking]] = {}
        self._full: set[Needs] = set()
        """What there is no more room for. That stands for every further replica until something is released."""
        self._summaries: dict[Needs, tuple[int, str]] = {}
        """Why not, and after how many changes that was so."""

    def place(self, spec: ModelSpec, before: Before | None = None) -> Placed | Refusal:
        """The first profile that can be placed, on the best node; or why none can. What is placed is taken."""
        return self.find(spec, before) or self.refusal(spec)

    def find(
        self, spec: ModelSpec, before: Before | None = None, *, profiles: Sequence[Profile] | None = None
    ) -> Placed | None:
        """As ``place``, without the words. ``profiles``: to be tried in place of the model's."""
        for profile in spec.profiles if profiles is None else profiles:
            placed = self._find(spec, profile, before)
            if placed is not None:
                for placement in placed.placements:
                    self._capacity.take(spec.name, placement)
                return placed
        return None

    def find_first(self, specs: Sequence[ModelSpec], before: Before | None = None) -> tuple[ModelSpec, Placed] | None:
        """As ``find``, for the first of the specs that can be placed."""
        for spec in specs:
            placed = self.find(spec, before)
            if placed is not None:
                return spec, placed
        return None

    def release(self, replica: Replica) -> None:
        """Give back all that a replica of the cluster holds, as if it had stopped."""
        self._capacity.give_back(replica)
        self._full.clear()

    def hold(self, replica: Replica) -> None:
        """Take back what was released, before anything else was placed."""
        for placement in replica.placements:
            if placement.node in self._capacity.rooms:
                self._capacity.take(replica.model, placement)

    def holds_weights(self, spec: ModelSpec, placed: Placed) -> bool:
        """True where nothing need be fetched: each node holds the model's source, or none is needed."""
        source = source_needed(spec, placed.profile)
        return source is None or all(each.node in self._holding(source) for each in placed.placements)

    def refusal(self, spec: ModelSpec, profiles: Sequence[Profile] | None = None) -> Refusal:
        """Why no profile of the model can be placed, as things stand after all that has been placed. Only if so."""
        tried = spec.profiles if profiles is None else profiles
        return of_model(spec.name, [self._profile_refusal(spec, profile) for profile in tried])

    def summary(self, spec: ModelSpec, profiles: Sequence[Profile] | None = None) -> str:
        """``refusal(spec).summary``, without putting every node in words."""
        tried = spec.profiles if profiles is None else profiles
        return summary_of_model([(profile.name, self._profile_summary(spec, profile)) for profile in tried])

    # -- finding a place

    def _find(self, spec: ModelSpec, profile: Profile, before: Before | None) -> Placed | None:
        asked = self._needs_of(spec, profile)
        if asked in self._full or self._never(profile, asked) is not None:
            return None
        before = before or Before()
        pool = self._still_fits(asked, before.nodes) if len(before.nodes) == asked.nodes else None
        stays = (
            self._placed(profile, pool, tuple(sorted(before.nodes)), before.taken_port) if pool is not None else None
        )
        if stays is not None and not before.failed_too_often:
            return stays
        ranking = self._ranking(spec, profile, asked)
        best = (ranking.after_failures(before.failed_on) if before.failed_on else ranking).best()
        if best is None:
            self._full.add(asked)
            return None
        if stays is not None and before.failures(best[1]) >= before.failures(before.nodes):
            return stays
        return self._placed(profile, *best)

    def _still_fits(self, asked: Needs, nodes: tuple[str, ...]) -> Pool | None:
        """What joins the nodes, where they can take the replica together."""
        for node_id in nodes:
            room = self._capacity.rooms.get(node_id)
            if room is None or not fits(room, asked) or self._basic_rules(asked)[node_id] is not None:
                return None
        if asked.nodes == 1:
            return ANYWHERE
        if len(set(nodes)) < len(nodes):
            return None
        return min(set.intersection(*(set(self._pools_of(asked, node_id)) for node_id in nodes)), default=None)

    def _placed(self, profile: Profile, pool: Pool, nodes: tuple[str, ...], after_port: int = 0) -> Placed:
        rooms = self._capacity.rooms
        placements = tuple(rooms[node_id].placement(node_id, profile, after_port) for node_id in nodes)
        if len(nodes) == 1:
            return Placed(profile, placements)
        return Placed(profile, placements, pool.fabric, dist_init(placements[0]))

    def _ranking(self, spec: ModelSpec, profile: Profile, asked: Needs) -> Ranking:
        source = source_needed(spec, profile)
        key = asked, self._holding(source) if source is not None else frozenset()
        ranking = self._rankings.get(key)
        if ranking is None:
            basic, pools = self._basic_rules(asked), partial(self._pools_of, asked)
            stranded = self._stranding(asked.gpus)
            ranking = self._rankings[key] = Ranking(self._capacity, asked, basic, pools, key[1], stranded)
        if not self._capacity.spread(spec.name):
            return ranking
        model, of_model = self._of_model.get(key, ("", ranking))
        if model != spec.name:
            of_model = ranking.of_model(spec.name)
            self._of_model[key] = spec.name, of_model
        return of_model

    def _stranding(self, gpus: int) -> Callable[[int], int]:
        """By how many GPUs are free on a node: how many more are stranded there once a shard has ``gpus`` of them.

        Stranded are free GPUs that are too few for a profile of the catalog, counted for each size that they are too
        few for. What needs no GPUs strands all that are free.
        """
        known: dict[int, int] = {}
        sizes = sorted(self._sizes | {gpus})

        def stranded(free: int) -> int:
            return sum(free for size in sizes if size > free)

        def more(free: int) -> int:
            if free not in known:
                known[free] = stranded(free - gpus) - stranded(free) if gpus else free
            return known[free]

        return more

    # -- what is asked, and who may

    def _needs_of(self, spec: ModelSpec, profile: Profile) -> Needs:
        key = id(profile), spec.source
        if key not in self._needs:
            self._needs[key] = profile, needs(spec, profile)
        return self._needs[key][1]

    def _never(self, profile: Profile, asked: Needs) -> str | None:
        words = impossible(profile)
        if words is None and asked.held is not None and not self._holding(asked.held):
            return held_by_none(asked.held)
        return words

    def _holding(self, source: str) -> frozenset[str]:
        """The nodes that hold a source."""
        if source not in self._holders:
            rooms = self._capacity.rooms.items()
            holders = frozenset(node_id for node_id, room in rooms if source in room.weights)
            self._holders[source] = self._same.setdefault(holders, holders)
        return self._holders[source]

    def _basic_rules(self, asked: Needs) -> _BasicRules:
        key = asked.engine, asked.version, asked.selector
        if key not in self._basic:
            self._basic[key] = _BasicRules(self._nodes, self._drains, asked)
        return self._basic[key]

    def _pools_of(self, asked: Needs, node_id: str) -> tuple[Pool, ...]:
        """Where a node that passes the basic rules can be a rank."""
        if asked.nodes == 1:
            return _ANYWHERE
        node = self._nodes[node_id]
        engine = node.engine(asked.engine, asked.version)
        version, mode = engine.version if engine is not None else "", launch_mode(node, asked)
        return tuple(
            Pool(seat.fabric, tuple(sorted(self._networks_of(seat.fabric)[node_id])), version, mode)
            for seat in self._capacity.rooms[node_id].seats
            if seat.problem is None and node_id in self._networks_of(seat.fabric)
        )

    def _fabrics(self) -> Mapping[str, Mapping[str, Seat]]:
        """By fabric, the seats of all nodes that state it."""
        if self._seats is None:
            found: dict[str, dict[str, Seat]] = {}
            for node_id, room in self._capacity.rooms.items():
                for seat in room.seats:
                    found.setdefault(seat.fabric, {})[node_id] = seat
            self._seats = found
        return self._seats

    def _networks_of(self, fabric: str) -> Mapping[str, frozenset[str]]:
        if fabric not in self._networks:
            seats = self._fabrics()[fabric].items()
            self._networks[fabric] = networks(
                {node_id: seat for node_id, seat in seats if self._nodes[node_id].state not in AWAY}
            )
        return self._networks[fabric]

    # -- why not

    def _profile_refusal(self, spec: ModelSpec, profile: Profile) -> ProfileRefusal:
        asked = self._needs_of(spec, profile)
        never = self._never(profile, asked)
        if never is not None:
            return ProfileRefusal(profile.name, never)
        if asked.nodes > 1:
            spanning = self._spanning(asked)
            return ProfileRefusal(profile.name, spanning.summary(), fabrics=spanning.refusals())
        verdicts = self._measured(asked)
        refused = tuple(
            NodeRefusal(verdict.node, self._in_words(asked, verdict), verdict.rule, verdict.short)
            for verdict in verdicts
        )
        summary = summary_of_nodes(verdicts, partial(self._in_words, asked))
        return ProfileRefusal(profile.name, summary, refused)

    def _profile_summary(self, spec: ModelSpec, profile: Profile) -> str:
        asked = self._needs_of(spec, profile)
        never = self._never(profile, asked)
        if never is not None:
            return never
        as_of = len(self._capacity.changed)
        if self._summaries.get(asked, (-1, ""))[0] != as_of:
            if asked.nodes > 1:
                words = self._spanning(asked).summary()
            else:
                words = summary_of_nodes(self._measured(asked), partial(self._in_words, asked))
            self._summaries[asked] = as_of, words
        return self._summaries[asked][1]

    def _measured(self, asked: Needs) -> list[Verdict]:
        """Which rule each node fails."""
        basic = self._basic_rules(asked)
        verdicts = []
        for node_id, room in self._capacity.rooms.items():
            rule = basic[node_id] or failed_rule(room, asked) or Rule.ALONE
            assert rule is not Rule.ALONE or asked.nodes > 1, f"{node_id} can take it"
            verdicts.append(Verdict(node_id, rule, short_by(room, asked, rule)))
        return verdicts

    def _spanning(self, asked: Needs) -> Spanning:
        rooms = self._capacity.rooms
        candidates = [
            Candidate(
                verdict,
                fits(rooms[verdict.node], asked),
                self._pools_of(asked, verdict.node) if verdict.rule is Rule.ALONE else (),
            )
            for verdict in self._measured(asked)
        ]
        return Spanning(asked, candidates, self._fabrics(), partial(self._in_words, asked))

    def _in_words(self, asked: Needs, verdict: Verdict) -> str:
        drain = self._drains.get(verdict.node)
        room = self._capacity.rooms[verdict.node]
        return in_words(self._nodes[verdict.node], room, asked, verdict.rule, drain)


class _BasicRules(dict[str, Rule | None]):
    """By node, the first failed of the rules that placing something does not change. Worked out when asked for."""

    def __init__(self, nodes: Mapping[str, Node], drains: Container[str], asked: Needs) -> None:
        super().__init__()
        self._nodes, self._drains, self._asked = nodes, drains, asked

    def __missing__(self, node_id: str) -> Rule | None:
        rule = self[node_id] = basic_rule(self._nodes[node_id], self._asked, self._drains)
        return rule


def dist_init(leader: Placement) -> str:
    """Where the ranks of a replica meet: on its leader, inside the leader's block of ports."""
    host = f"[{leader.address}]" if ":" in leader.address else leader.address
    return f"{host}:{leader.port + DIST_INIT_OFFSET}"


def _sizes(catalog: Catalog) -> frozenset[int]:
    """How many GPUs shards of the catalog's profiles ask for."""
    return frozenset(profile.gpus_per_node for spec in catalog.models for profile in spec.profiles)
