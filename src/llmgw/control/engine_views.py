"""Engines as the admin API shows them: each version of each, how it stands, and how far every node is with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from llmgw.cluster.lifecycle import AWAY
from llmgw.cluster.model import Cluster, EngineHistory, EngineOnNode, Node
from llmgw.control.times import rfc3339

_Key = tuple[str, str, bool]
"""Name, version, and whether it is a program that the node's own file names."""

NOT_REPORTED = "not reported"
"""State of a version that a node should have and has said nothing of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNodeView:
    """How far a node is with a version."""

    node: str
    state: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One version of an engine, on all nodes."""

    name: str
    version: str
    standing: str
    """``in effect``; ``previous``: kept, to go back to; ``rolled back``: the file's, which is not in effect; ``older``:
    replicas still ran on it when the file changed; ``own program``: named in the node's own file; ``built in``; or
    ``unlisted``: not in the file."""
    why: str
    """Of one that is rolled back."""
    source: str | None
    since: str | None
    """Of the one in effect: since when."""
    installed: int
    """Nodes on which it can be used."""
    wanted: int
    """Nodes that have it or should, lost ones aside."""
    replicas: int
    """Replicas that run on it."""
    nodes: tuple[EngineNodeView, ...]


def engine_views(cluster: Cluster) -> list[EngineView]:
    """By name; of each engine first the version in effect, then those that are kept, then what nodes have besides."""
    reported, running = _reported(cluster), _running(cluster)
    keys = dict.fromkeys([*_listed(cluster), *sorted(reported)])
    by_name = sorted(keys, key=lambda key: key[0])
    return [_view(cluster, key, reported.get(key, {}), running[key]) for key in by_name]


def _listed(cluster: Cluster) -> Iterator[_Key]:
    for spec in cluster.catalog.engines:
        yield spec.name, spec.version, False
        history = cluster.engines.get(spec.name)
        if history is not None:
            for build in (history.kept, *history.older):
                if build is not None:
                    yield build.name, build.version, False


def _reported(cluster: Cluster) -> dict[_Key, dict[str, EngineOnNode]]:
    found: dict[_Key, dict[str, EngineOnNode]] = {}
    for node_id, node in sorted(cluster.nodes.items()):
        for engine in node.engines:
            found.setdefault((engine.name, engine.version, engine.named), {})[node_id] = engine
    return found


def _running(cluster: Cluster) -> Counter[_Key]:
    """By what the node of its first rank has: a program of that node's own stands in for every version."""
    running: Counter[_Key] = Counter()
    for replica in cluster.replicas.values():
        if replica.profile is not None and replica.placements:
            name, version = replica.profile.engine, replica.profile.engine_version
            node = cluster.nodes.get(replica.placements[0].node)
            engine = node.engine(name, version) if node is not None else None
            running[(name, version, False) if engine is None else (name, engine.version, engine.named)] += 1
    return running


def _view(cluster: Cluster, key: _Key, reported: dict[str, EngineOnNode], replicas: int) -> EngineView:
    name, version, named = key
    history = cluster.engines.get(name)
    standing = _standing(cluster, key, history)
    build = history.build(version) if history is not None and not named else None
    nodes = {node: EngineNodeView(node=node, state=each.state, words=each.words) for node, each in reported.items()}
    if standing == "in effect":
        for node in cluster.nodes.values():
            if node.id not in nodes and _should_have(node, name):
                nodes[node.id] = EngineNodeView(node=node.id, state=NOT_REPORTED, words="has said nothing of it yet")
    there = {node.id for node in cluster.nodes.values() if node.state not in AWAY}
    return EngineView(
        name=name,
        version=version,
        standing=standing,
        why=history.rolled_back if history is not None and standing == "rolled back" else "",
        source=build.source if build is not None else None,
        since=rfc3339(history.since) if history is not None and standing == "in effect" else None,
        installed=sum(engine.usable and node in there for node, engine in reported.items()),
        wanted=len(nodes.keys() & there),
        replicas=replicas,
        nodes=tuple(nodes[node] for node in sorted(nodes)),
    )


def _should_have(node: Node, name: str) -> bool:
    return node.probed and all(engine.name != name or not engine.named for engine in node.engines)


def _standing(cluster: Cluster, key: _Key, history: EngineHistory | None) -> str:
    name, version, named = key
    if name == "sim":
        return "built in"
    if named:
        return "own program"
    effective = cluster.catalog.engine(name)
    if effective is None:
        return "unlisted"
    if effective.version == version:
        return "in effect"
    if history is not None and history.kept is not None and history.kept.version == version:
        return "rolled back" if history.rolled_back else "previous"
    return "older" if history is not None and history.build(version) is not None else "unlisted"
