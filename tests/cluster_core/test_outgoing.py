"""Drains, rolls and restarts in any order, with anything going wrong between: what must hold, holds, and they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from llmgw.cluster import rolling
from llmgw.cluster.catalog import ModelSpec, Profile
from llmgw.cluster.model import DrainState, MoveState, NodeState, ReplicaState, ShardState
from llmgw.cluster.reconcile import apply
from tests.exploring import examples

from .building import model, profile
from .lab import Lab, on_fabric

NAMES = ("n1", "n2", "n3", "n4")
FABRICS = {"n1": ("ib-a",), "n2": ("ib-a", "ib-b"), "n3": ("ib-b",), "n4": ("ib-b",)}
PROFILES = (
    profile("one", gpus_per_node=1),
    profile("two", gpus_per_node=2),
    profile("wide", nodes=2, gpus_per_node=1, tensor_parallel=2),
    profile("cpu", memory_bytes=1 << 30),
)


@st.composite
def catalogs(draw: st.DrawFn) -> tuple[ModelSpec, ...]:
    def one(name: str) -> ModelSpec:
        chosen: Profile = draw(st.sampled_from(PROFILES))
        changed = replace(chosen, context=draw(st.sampled_from((None, 4096))))
        return model(name, changed, replicas=draw(st.integers(0, 3)))

    return tuple(one(name) for name in draw(st.sampled_from((("a",), ("a", "b"), ("b",)))))


names = st.sampled_from(NAMES)
options = st.fixed_dictionaries(
    {},
    optional={
        "wait": st.booleans(),
        "force": st.booleans(),
        "allow_downtime": st.sampled_from(((), ("a",), ("b",))),
        "in_flight_s": st.sampled_from((1.0, 60.0)),
    },
)


def drains(lab: Lab, name: str, chosen: dict[str, object]) -> None:
    lab.drain(name, **chosen)


def undrains(lab: Lab, name: str) -> None:
    if name in lab.state.drains:
        lab.undrain(name)


def edits(lab: Lab, specs: tuple[ModelSpec, ...]) -> None:
    lab.edit(*specs)


def restarts(lab: Lab, name: str, allow_downtime: bool) -> None:
    lab.state = apply(lab.state, rolling.restart(lab.state, name, allow_downtime, lab.now))
    lab.settle()


def scales(lab: Lab, name: str, replicas: int) -> None:
    lab.state = replace(lab.state, scale={**lab.state.scale, name: replicas})
    lab.settle()


def goes_on(lab: Lab, ticks: int) -> None:
    for _ in range(ticks):
        lab.tick()


def crashes(lab: Lab, name: str, pick: int) -> None:
    engines = [engine for _, engine in sorted(lab.engines[name].items()) if engine.state is not ShardState.STOPPING]
    if engines and lab.state.nodes[name].session is not None:
        engines[pick % len(engines)].state = ShardState.FAILED
        lab.tick()


def breaks(lab: Lab, context: int | None) -> None:
    """From now on what is started with that context does not get ready; None: everything does."""
    lab.broken = lambda shard: context is not None and shard.profile.context == context


def cuts(lab: Lab, name: str, lost: bool) -> None:
    if lab.state.nodes[name].session is not None:
        if lost:
            lab.cut(name)
            goes_on(lab, 40)
        else:
            lab.cut(name)


def connects(lab: Lab, name: str) -> None:
    if lab.state.nodes[name].session is None:
        lab.connect(name)


def agent_restarts(lab: Lab, name: str) -> None:
    lab.restart_agent(name)


def control_restarts(lab: Lab, ticks: int) -> None:
    lab.restart_control()
    goes_on(lab, ticks)
    lab.come_back()


def streams(lab: Lab, number: int) -> None:
    """Requests begin at whatever may be sent to, or all that are in flight end."""
    door = lab.doors["gw"]
    for replica in sorted(door.may_send):
        door.in_flight[replica] = number
    if not number:
        door.in_flight.clear()
    lab.settle()


def acknowledges(lab: Lab, does: bool) -> None:
    lab.doors["gw"].acknowledges = does


Act = tuple[Callable[..., None], tuple[object, ...]]
acts: st.SearchStrategy[Act] = st.one_of(
    st.tuples(st.just(goes_on), st.tuples(st.integers(1, 6))),
    st.tuples(st.just(goes_on), st.tuples(st.integers(1, 20))),
    st.tuples(st.just(drains), st.tuples(names, options)),
    st.tuples(st.just(drains), st.tuples(names, options)),
    st.tuples(st.just(undrains), st.tuples(names)),
    st.tuples(st.just(edits), st.tuples(catalogs())),
    st.tuples(st.just(restarts), st.tuples(st.sampled_from("ab"), st.booleans())),
    st.tuples(st.just(scales), st.tuples(st.sampled_from("ab"), st.integers(0, 3))),
    st.tuples(st.just(crashes), st.tuples(names, st.integers(0, 5))),
    st.tuples(st.just(breaks), st.tuples(st.sampled_from((None, 4096)))),
    st.tuples(st.just(cuts), st.tuples(names, st.booleans())),
    st.tuples(st.just(connects), st.tuples(names)),
    st.tuples(st.just(agent_restarts), st.tuples(names)),
    st.tuples(st.just(control_restarts), st.tuples(st.integers(0, 3))),
    st.tuples(st.just(streams), st.tuples(st.integers(0, 3))),
    st.tuples(st.just(acknowledges), st.tuples(st.booleans())),
)


stories = {
    "catalog": catalogs(),
    "gpus": st.tuples(*[st.integers(0, 3)] * len(NAMES)),
    "steps": st.lists(acts, min_size=8, max_size=40),
}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(**stories)
def test_drains_and_rolls_keep_what_must_hold_and_end(
    catalog: tuple[ModelSpec, ...], gpus: tuple[int, ...], steps: list[Act]
) -> None:
    play(catalog, gpus, steps)


def play(catalog: tuple[ModelSpec, ...], gpus: tuple[int, ...], steps: list[Act]) -> None:
    nodes = [on_fabric(name, *FABRICS[name], gpus=number) for name, number in zip(NAMES, gpus, strict=True)]
    lab = Lab(nodes, catalog)
    lab.run()
    for act, arguments in steps:
        act(lab, *arguments)
    heal(lab)
    for name, drain in lab.state.drains.items():
        if lab.state.nodes[name].state is NodeState.DRAINED:
            assert drain.state is DrainState.DONE
        else:
            assert any(move.state is MoveState.BLOCKED and move.why for move in drain.moves), drain
    for replica in lab.state.replicas.values():
        held_back = "not started, as" in replica.why and replica.state is ReplicaState.PREPARING
        assert held_back or replica.state in (ReplicaState.READY, ReplicaState.UNPLACED), replica
        assert replica.replaces is None, replica


def heal(lab: Lab) -> None:
    lab.broken = lambda shard: False
    for name in NAMES:
        connects(lab, name)
    door = lab.doors["gw"]
    door.connected = door.known = door.acknowledges = True
    door.in_flight.clear()
    lab.run()
