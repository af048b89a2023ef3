"""Why a replica over several nodes finds no place: fabric by fabric, and on each node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from llmgw.cluster.fitness import Needs
from llmgw.cluster.ranking import Pool
from llmgw.cluster.refusal import NO_FABRIC, FabricRefusal, NodeRefusal, Rule, Verdict, closeness, rank
from llmgw.cluster.topology import Seat
from llmgw.cluster.wording import count, size

_NAMED = 3
"""Fabrics that a summary names one by one, and nodes that stand in the way on each; more are counted."""
_IS = {
    Rule.REVOKED: "revoked",
    Rule.LOST: "lost",
    Rule.SUSPECT: "suspect",
    Rule.DRAINING: "draining",
    Rule.OFFLINE: "not connected",
}
_HAS = (Rule.UNKNOWN, Rule.UNPROBED)


class Candidate(NamedTuple):
    """A node as it was measured, whatever fabric it is on."""

    verdict: Verdict
    has_room: bool
    """What is free there would do."""
    pools: tuple[Pool, ...]
    """With whom it could be joined; empty where it can't take a rank."""


class _Member(NamedTuple):
    """A candidate as one fabric sees it."""

    verdict: Verdict
    has_room: bool
    pool: Pool | None
    problem: str | None
    """What is wrong with its adapters, where that is the first rule that it fails."""


class Spanning:
    """One kind of needs, measured against every fabric. Words are made for what is read alone."""

    def __init__(
        self,
        needs: Needs,
        candidates: Sequence[Candidate],
        fabrics: Mapping[str, Mapping[str, Seat]],
        in_words: Callable[[Verdict], str],
    ) -> None:
        """``candidates``: all nodes, in the order of their ids; ``in_words`` says the rules that are not a fabric's."""
        self._needs = needs
        self._in_words = in_words
        self._none = not candidates
        by_id = {each.verdict.node: each for each in candidates}
        self._fabrics = {
            name: [_member(name, by_id[node_id], seat) for node_id, seat in seats.items()]
            for name, seats in sorted(fabrics.items())
        }
        stated = {node_id for seats in fabrics.values() for node_id in seats}
        self._alone = [each for each in candidates if each.verdict.node not in stated]

    def refusals(self) -> tuple[FabricRefusal, ...]:
        """Of every fabric why not, by name, and last the nodes that are on none."""
        refused = [self._refuse(name, members) for name, members in self._fabrics.items()]
        if self._alone:
            refused.append(self._without_fabric())
        return tuple(refused)

    def summary(self) -> str:
        """The whole in one line."""
        needs, fabrics = self._needs, self._fabrics
        if self._none:
            return "no node is registered"
        if not fabrics:
            return (
                f"no node is on a fabric, and a replica over {needs.nodes} nodes needs one: "
                "state `fabrics` in the files of agents whose adapters reach one another"
            )
        by_nearness = sorted(fabrics, key=lambda name: (_missing(needs, fabrics[name]), name))
        named = sorted(by_nearness if len(by_nearness) <= _NAMED + 1 else by_nearness[:_NAMED])
        said = [f"{name} {self._of_fabric(fabrics[name], whole=place == 0)}" for place, name in enumerate(named)]
        if len(named) < len(fabrics):
            said.append(f"{len(fabrics) - len(named)} more fabrics have no place either")
        return "; ".join(said) + self._nearest(fabrics[by_nearness[0]], by_nearness[0] if len(fabrics) > 1 else "")

    def _words(self, member: _Member) -> str:
        return member.problem if member.problem is not None else self._in_words(member.verdict)

    def _refuse(self, fabric: str, members: Sequence[_Member]) -> FabricRefusal:
        needed = self._needs.nodes
        able = [member for member in members if member.pool is not None]
        groups = Counter(member.pool for member in able)
        nodes = []
        for member in members:
            if member.pool is not None:
                where = _as_one(member.pool) if len(groups) > 1 else f"on {fabric}"
                words = f"could take a rank, but only {groups[member.pool]} of the {needed} nodes needed can {where}"
            else:
                words = self._words(member)
            nodes.append(NodeRefusal(member.verdict.node, words, member.verdict.rule, member.verdict.short))
        summary = f"{fabric} {self._of_fabric(members, whole=True)}{self._nearest(members)}"
        return FabricRefusal(fabric, summary, tuple(nodes), len(able), needed)

    def _without_fabric(self) -> FabricRefusal:
        nodes = []
        for each in self._alone:
            verdict = each.verdict
            if rank(verdict.rule) > rank(Rule.FABRIC):
                words = "is on no fabric: takes replicas of a single node only"
                nodes.append(NodeRefusal(verdict.node, words, Rule.FABRIC))
            else:
                nodes.append(NodeRefusal(verdict.node, self._in_words(verdict), verdict.rule, verdict.short))
        return FabricRefusal(NO_FABRIC, f"{_are(len(nodes))} on no fabric", tuple(nodes), 0, self._needs.nodes)

    def _of_fabric(self, members: Sequence[_Member], *, whole: bool) -> str:
        """``has 1 of 2 nodes with 4 free GPUs``; what they need have is said where ``whole``."""
        needed = self._needs.nodes
        roomy = [member for member in members if member.has_room]
        in_the_way = [member for member in roomy if member.pool is None]
        room = f" {_room(self._needs)}" if whole else ""
        if len(roomy) <= needed:
            words = f"has {len(roomy)} of {needed}" + (f" nodes{room}" if whole else "")
        else:
            words = f"has {count(len(roomy), 'node')}{room} ({needed} needed)"
        if in_the_way:
            return f"{words} but {self._why_not(in_the_way)}"
        pools = list(dict.fromkeys(member.pool for member in roomy if member.pool is not None))
        if len(roomy) >= needed and len(pools) > 1:
            groups = [
                f"{', '.join(member.verdict.node for member in roomy if member.pool == pool)} {_as_one(pool)}"
                for pool in pools
            ]
            words += f" but they can't be joined: {'; '.join(groups)}"
        return words

    def _why_not(self, members: Sequence[_Member]) -> str:
        if len(members) <= _NAMED:
            return " and ".join(self._short(member) for member in members)
        rules = Counter(member.verdict.rule for member in members)
        return " and ".join(
            f"{number} {_plain(rule, number)}" for rule, number in sorted(rules.items(), key=lambda each: rank(each[0]))
        )

    def _short(self, member: _Member) -> str:
        node, rule = member.verdict.node, member.verdict.rule
        if rule in _IS:
            return f"{node} is {_IS[rule]}"
        return f"{node}{'' if rule in _HAS else ':'} {self._words(member)}"

    def _nearest(self, members: Sequence[_Member], fabric: str = "") -> str:
        """The node that would have to change least, of those that are not named yet."""
        rest = [member for member in members if member.pool is None and not member.has_room]
        if not rest:
            return ""
        best = min(rest, key=lambda member: closeness(member.verdict))
        return f"; nearest {best.verdict.node}{f' on {fabric}' if fabric else ''}: {self._words(best)}"


def _member(fabric: str, candidate: Candidate, seat: Seat) -> _Member:
    verdict = candidate.verdict
    if seat.problem is not None and rank(verdict.rule) > rank(Rule.FABRIC):
        return _Member(Verdict(verdict.node, Rule.FABRIC), candidate.has_room, None, seat.problem)
    pool = next((pool for pool in candidate.pools if pool.fabric == fabric), None)
    return _Member(verdict, candidate.has_room, pool, None)


def _are(number: int) -> str:
    return f"{count(number, 'node')} {'is' if number == 1 else 'are'}"


def _missing(needs: Needs, members: Sequence[_Member]) -> tuple[int, int, int]:
    """How far a fabric is from a fit, smaller is nearer: nodes that are missing, then what the nearest is short of."""
    able = Counter(member.pool for member in members if member.pool is not None)
    rest = [closeness(member.verdict)[:2] for member in members if member.pool is None]
    return (needs.nodes - max(able.values(), default=0), *min(rest, default=(0, 0)))


def _room(needs: Needs) -> str:
    """``with 4 free GPUs and 8 GiB of free memory``."""
    parts = []
    if needs.gpus:
        parts.append(f"{needs.gpus} free {'GPU' if needs.gpus == 1 else 'GPUs'}")
    if needs.memory_bytes:
        parts.append(f"{size(needs.memory_bytes, up=True)} of free memory")
    if not parts:
        parts.append("a free block of ports")
    if needs.held is not None:
        parts.append(f"the weights of {needs.held}")
    return f"with {' and '.join(parts)}"


def _plain(rule: Rule, number: int) -> str:
    if rule in _IS:
        return f"{'is' if number == 1 else 'are'} {_IS[rule]}"
    said = {
        Rule.UNKNOWN: "not yet described",
        Rule.UNPROBED: "not yet probed for engines",
        Rule.LABELS: "with other labels",
        Rule.ENGINE: "without a usable engine",
        Rule.FABRIC: "with adapters that can't be used",
    }
    return said.get(rule, rule.value)


def _as_one(pool: Pool) -> str:
    """What the nodes of a pool have in common, and others on the fabric have not."""
    parts = (
        [f"on {'subnet' if len(pool.subnets) == 1 else 'subnets'} {' and '.join(pool.subnets)}"]
        if (pool.subnets)
        else ["on a subnet that is not known"]
    )
    parts += [f"engine {pool.version}"] if pool.version else []
    parts += [f"launched with {pool.mode}"] if pool.mode else []
    return ", ".join(parts)
