"""Why a replica over several nodes finds no place: fabric by fabric, and on each node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as it was measured, whatever fabric it is on."""

    verdict: Verdict
    words: str
    lacks: Rule | None
    """The rule of what is free there that it fails; None: there would be room."""
    pools: tuple[Pool, ...]
    """With whom it could be joined; empty where it can't take a rank."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A candidate as one fabric sees it."""

    node: str
    rule: Rule
    short: int
    words: str
    has_room: bool
    pool: Pool | None

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.node, self.rule, self.short)


def refuse_fabrics(
    needs: Needs, candidates: Sequence[Candidate], fabrics: Mapping[str, Mapping[str, Seat]]
) -> tuple[tuple[FabricRefusal, ...], str]:
    """Of every fabric why not, and the whole in one line. ``candidates`` are all nodes, in the order of their ids."""
    if not candidates:
        return (), "no node is registered"
    by_fabric = {
        name: [_member(name, each, seats[each.verdict.node]) for each in candidates if each.verdict.node in seats]
        for name, seats in sorted(fabrics.items())
    }
    refused = [_refuse(needs, name, members) for name, members in by_fabric.items()]
    alone = [each for each in candidates if not any(each.verdict.node in seats for seats in fabrics.values())]
    if alone:
        refused.append(_without_fabric(needs, alone))
    return tuple(refused), _summary(needs, by_fabric)


def _member(fabric: str, candidate: Candidate, seat: Seat) -> _Member:
    verdict, words = candidate.verdict, candidate.words
    if seat.problem is not None and rank(verdict.rule) > rank(Rule.FABRIC):
        verdict, words = Verdict(verdict.node, Rule.FABRIC), seat.problem
    pool = next((pool for pool in candidate.pools if pool.fabric == fabric), None)
    return _Member(verdict.node, verdict.rule, verdict.short, words, candidate.lacks is None, pool)


def _refuse(needs: Needs, fabric: str, members: Sequence[_Member]) -> FabricRefusal:
    able = [member for member in members if member.pool is not None]
    groups = Counter(member.pool for member in able)
    nodes = []
    for member in members:
        words = member.words
        if member.pool is not None:
            where = _as_one(member.pool) if len(groups) > 1 else f"on {fabric}"
            words = f"could take a rank, but only {groups[member.pool]} of the {needs.nodes} nodes needed can {where}"
        nodes.append(NodeRefusal(member.node, words, member.rule, member.short))
    words = f"{fabric} {_of_fabric(needs, members, whole=True)}"
    return FabricRefusal(fabric, words + _nearest(members), tuple(nodes), len(able), needs.nodes)


def _without_fabric(needs: Needs, alone: Sequence[Candidate]) -> FabricRefusal:
    nodes = []
    for each in alone:
        verdict, words = each.verdict, each.words
        if rank(verdict.rule) > rank(Rule.FABRIC):
            verdict, words = Verdict(verdict.node, Rule.FABRIC), "is on no fabric: takes replicas of a single node only"
        nodes.append(NodeRefusal(verdict.node, words, verdict.rule, verdict.short))
    return FabricRefusal(NO_FABRIC, f"{_are(len(alone))} on no fabric", tuple(nodes), 0, needs.nodes)


def _are(number: int) -> str:
    return f"{count(number, 'node')} {'is' if number == 1 else 'are'}"


def _summary(needs: Needs, fabrics: Mapping[str, Sequence[_Member]]) -> str:
    if not fabrics:
        return (
            f"no node is on a fabric, and a replica over {needs.nodes} nodes needs one: "
            "state `fabrics` in the files of agents whose adapters reach one another"
        )
    by_nearness = sorted(fabrics, key=lambda name: (_missing(needs, fabrics[name]), name))
    named = sorted(by_nearness if len(by_nearness) <= _NAMED + 1 else by_nearness[:_NAMED])
    said = [f"{name} {_of_fabric(needs, fabrics[name], whole=place == 0)}" for place, name in enumerate(named)]
    if len(named) < len(fabrics):
        said.append(f"{len(fabrics) - len(named)} more fabrics have no place either")
    return "; ".join(said) + _nearest(fabrics[by_nearness[0]], by_nearness[0] if len(fabrics) > 1 else "")


def _missing(needs: Needs, members: Sequence[_Member]) -> tuple[int, int, int]:
    """How far a fabric is from a fit, smaller is nearer: nodes that are missing, then what the nearest is short of."""
    able = Counter(member.pool for member in members if member.pool is not None)
    rest = [closeness(member.verdict)[:2] for member in members if member.pool is None]
    return (needs.nodes - max(able.values(), default=0), *min(rest, default=(0, 0)))


def _of_fabric(needs: Needs, members: Sequence[_Member], *, whole: bool) -> str:
    """``has 1 of 2 nodes with 4 free GPUs``; what they need have is said where ``whole``."""
    roomy = [member for member in members if member.has_room]
    in_the_way = [member for member in roomy if member.pool is None]
    room = f" {_room(needs)}" if whole else ""
    if len(roomy) <= needs.nodes:
        words = f"has {len(roomy)} of {needs.nodes}" + (f" nodes{room}" if whole else "")
    else:
        words = f"has {count(len(roomy), 'node')}{room} ({needs.nodes} needed)"
    if in_the_way:
        return f"{words} but {_why_not(in_the_way)}"
    pools = list(dict.fromkeys(member.pool for member in roomy if member.pool is not None))
    if len(roomy) >= needs.nodes and len(pools) > 1:
        groups = [
            f"{', '.join(member.node for member in roomy if member.pool == pool)} {_as_one(pool)}" for pool in pools
        ]
        words += f" but they can't be joined: {'; '.join(groups)}"
    return words


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


def _why_not(members: Sequence[_Member]) -> str:
    if len(members) <= _NAMED:
        return " and ".join(_short(member) for member in members)
    rules = Counter(member.rule for member in members)
    said = [
        f"{number} {_plain(rule, number)}" for rule, number in sorted(rules.items(), key=lambda each: rank(each[0]))
    ]
    return " and ".join(said)


def _short(member: _Member) -> str:
    if member.rule in _IS:
        return f"{member.node} is {_IS[member.rule]}"
    return f"{member.node} {member.words}" if member.rule in _HAS else f"{member.node}: {member.words}"


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


def _nearest(members: Sequence[_Member], fabric: str = "") -> str:
    """The node that would have to change least, of those that are not named yet."""
    rest = [member for member in members if member.pool is None and not member.has_room]
    if not rest:
        return ""
    best = min(rest, key=lambda member: closeness(member.verdict))
    return f"; nearest {best.node}{f' on {fabric}' if fabric else ''}: {best.words}"
