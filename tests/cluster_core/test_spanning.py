"""Replicas over several nodes: whole and on one fabric, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.cluster.catalog import ModelSpec
from llmgw.cluster.model import (
    PORT_BLOCK,
    Cluster,
    Drain,
    Node,
    NodeState,
    Placement,
    Replica,
    ReplicaState,
)
from llmgw.cluster.news import now_qualifies
from llmgw.cluster.placement import Before, Placed, Planner, Refusal, place
from llmgw.cluster.reconcile import apply, reconcile

from .building import GIB, NOW, cluster, engine, gpu, model, node, only, profile, ready, settled, with_node
from .fabrics import lost, on, port

TWO = model("m", profile(nodes=2, gpus_per_node=4, tensor_parallel=4, pipeline_parallel=2), replicas=2)


def lab(gpus: int = 8) -> list[Node]:
    """4 nodes, 2 fabrics, 8 GPUs each."""
    return [on(f"node0{number}", "ib-a" if number < 3 else "ib-b", gpus=gpus) for number in (1, 2, 3, 4)]


def nodes_of(placed: Placed | Refusal | None) -> tuple[str, ...]:
    assert isinstance(placed, Placed), placed
    return tuple(placement.node for placement in placed.placements)


def why(state: Cluster, spec: ModelSpec) -> str:
    refusal = place(state, spec, NOW)
    assert isinstance(refusal, Refusal), refusal
    return refusal.summary


def test_the_reference_case_is_placed_with_a_replica_on_each_fabric() -> None:
    state = settled(cluster(lab(), [TWO]))
    placed = sorted((replica.fabric or "", replica) for replica in state.replicas.values())
    assert [fabric for fabric, _ in placed] == ["ib-a", "ib-b"]
    for names, (_, replica) in zip((("node01", "node02"), ("node03", "node04")), placed, strict=True):
        assert tuple(placement.node for placement in replica.placements) == names
        assert [placement.gpus for placement in replica.placements] == [(0, 1, 2, 3)] * 2
        leader = replica.placements[0]
        assert leader.address == f"10.0.0.{names[0][-2:]}"
        assert replica.dist_init == f"{leader.address}:{leader.port + 50}"
        assert replica.why == f"on {names[0]}, {names[1]}: waits for its agent to take it up"


def test_after_a_node_is_lost_the_replica_goes_to_the_fabric_that_can_hold_it_whole() -> None:
    state = ready(cluster(lab(), [TWO]))
    state = settled(with_node(state, "node02", heard_at_s=NOW.monotonic_s - 100))
    made = [replica for replica in state.replicas.values() if replica.state is ReplicaState.PLACING]
    assert [replica.fabric for replica in made] == ["ib-b"]
    assert [placement.gpus for placement in made[0].placements] == [(4, 5, 6, 7)] * 2


def test_whole_or_not_at_all_and_never_across_two_fabrics_or_none() -> None:
    spec = model("m", profile(nodes=2, gpus_per_node=4))
    across = [on("n1", "ib-a", gpus=4), on("n2", "ib-b", gpus=4), node("n3", gpus=4), node("n4", gpus=4)]
    state = settled(cluster(across, [spec]))
    assert only(state).placements == ()
    assert only(state).why == ("ib-a has 1 of 2 nodes with 4 free GPUs; ib-b has 1 of 2")
    assert isinstance(place(cluster([node("n3", gpus=4), node("n4", gpus=4)], [spec]), spec, NOW), Refusal)


def test_a_node_on_two_fabrics_joins_either_but_a_replica_keeps_to_one() -> None:
    spec = model("m", profile(nodes=3, gpus_per_node=1))
    between = [on("n1", "ib-a", "ib-b", gpus=2), on("n2", "ib-a", gpus=1), on("n3", "ib-b", gpus=1)]
    assert isinstance(place(cluster(between, [spec]), spec, NOW), Refusal)
    placed = place(cluster([*between, on("n4", "ib-b", gpus=1)], [spec]), spec, NOW)
    assert nodes_of(placed) == ("n1", "n3", "n4")
    assert isinstance(placed, Placed)
    assert placed.fabric == "ib-b"


def test_two_nodes_whose_ports_are_active_in_different_subnets_are_refused_before_launch() -> None:
    """Each port says ACTIVE, and a collective over both would hang at its first step."""
    spec = model("m", profile(nodes=2, gpus_per_node=4))
    apart = [on("n1", "ib-a", gpus=4, subnet=1), on("n2", "ib-a", gpus=4, subnet=2)]
    assert why(cluster(apart, [spec]), spec) == (
        "ib-a has 2 of 2 nodes with 4 free GPUs but they can't be joined: "
        "n1 on subnet fe80:0000:0000:0001, engine 1.0; n2 on subnet fe80:0000:0000:0002, engine 1.0"
    )
    assert nodes_of(place(cluster([*apart, on("n3", "ib-a", gpus=4, subnet=2)], [spec]), spec, NOW)) == ("n2", "n3")


def test_other_versions_or_ways_of_launching_form_no_replica() -> None:
    spec = model("m", profile(nodes=2))
    old = on("n1", "ib-a", engines=(replace(engine("sim"), version="0.9"),))
    assert why(cluster([old, on("n2", "ib-a")], [spec]), spec).endswith(
        "n1 on subnet fe80:0000:0000:0001, engine 0.9; n2 on subnet fe80:0000:0000:0001, engine 1.0"
    )
    first, second = on("n1", "ib-a"), on("n2", "ib-a")
    assert first.inventory is not None
    assert second.inventory is not None
    modes = [
        replace(first, inventory=replace(first.inventory, launch_modes={"sim": "mp"})),
        replace(second, inventory=replace(second.inventory, launch_modes={"sim": "ray"})),
    ]
    assert "engine 1.0, launched with mp; n2" in why(cluster(modes, [spec]), spec)
    stated = model("m", profile(nodes=2, launch_mode="mp"))
    assert nodes_of(place(cluster(modes, [stated]), stated, NOW)) == ("n1", "n2")


def test_profiles_are_tried_in_order_also_over_nodes() -> None:
    spec = model("m", profile("wide", nodes=2, gpus_per_node=4), profile("one", gpus_per_node=4))
    assert nodes_of(place(cluster(lab(4), [spec]), spec, NOW)) == ("node01", "node02")
    islands = [on("n1", "ib-a", gpus=4), on("n2", "ib-b", gpus=4)]
    assert nodes_of(place(cluster(islands, [spec]), spec, NOW)) == ("n1",)


def test_a_replica_without_gpus_spans_nodes_by_memory() -> None:
    spec = model("m", profile(nodes=2, memory_bytes=8 * GIB), replicas=2)
    state = settled(cluster([on(f"n{number}", "ib-a") for number in (1, 2)], [spec]))
    placed = [replica for replica in state.replicas.values() if replica.placements]
    assert [[each.memory_bytes for each in replica.placements] for replica in placed] == [[8 * GIB] * 2]
    (waits,) = (replica.why for replica in state.replicas.values() if not replica.placements)
    assert waits == (
        "ib-a has 0 of 2 nodes with 8 GiB of free memory; "
        "nearest n1: 7.5 GiB of memory free of the 15.5 GiB that replicas may have, 8 GiB needed"
    )


def test_preferences_hold_over_the_nodes_of_a_replica_too() -> None:
    spec = model("m", profile(nodes=2, gpus_per_node=4), source="/m")
    assert nodes_of(place(cluster(lab(), [spec]), spec, NOW)) == ("node01", "node02")
    odd = [
        replace(at, inventory=at.inventory and replace(at.inventory, gpus=at.inventory.gpus[:5])) for at in lab()[:2]
    ]
    assert nodes_of(place(cluster([*odd, *lab()[2:]], [spec]), spec, NOW)) == ("node03", "node04")
    linked = [gpu(index, nvlink_group=index // 4) for index in range(8)]
    pairs = [gpu(index, nvlink_group=index // 2) for index in range(8)]
    nodes = [on("n1", "ib-a", gpus=pairs), on("n2", "ib-a", gpus=pairs)]
    nodes += [on("n3", "ib-b", gpus=linked), on("n4", "ib-b", gpus=pairs)]
    assert nodes_of(place(cluster(nodes, [spec]), spec, NOW)) == ("n3", "n4")
    held = model("m", profile("p", "sim", nodes=2, gpus_per_node=4))
    state = settled(cluster(lab(), [held]))
    assert nodes_of(place(state, held, NOW)) == ("node03", "node04")


def test_a_replica_that_failed_goes_back_to_its_nodes_where_they_still_fit_together() -> None:
    state = cluster(lab(), [TWO])
    assert nodes_of(Planner(state).find(TWO, Before(("node04", "node03")))) == ("node03", "node04")
    assert nodes_of(Planner(state).find(TWO, Before(("node01", "node03")))) == ("node01", "node02")
    assert nodes_of(Planner(state).find(TWO, Before(("node03",)))) == ("node01", "node02")
    assert nodes_of(Planner(state).find(TWO, Before(("node03", "node03")))) == ("node01", "node02")
    placed = Planner(state).find(TWO, Before(("node03", "node04"), taken_port=20000))
    assert placed is not None
    assert [placement.port for placement in placed.placements] == [20100, 20100]
    assert placed.dist_init == "10.0.0.03:20150"


def test_an_ipv6_leader_is_written_in_brackets() -> None:
    first, second = on("n1", "ib-a"), on("n2", "ib-a")
    assert first.inventory is not None
    first = replace(first, inventory=replace(first.inventory, mgmt_addr="fd00::1"))
    placed = place(cluster([first, second]), model("m", profile(nodes=2)), NOW)
    assert isinstance(placed, Placed)
    assert placed.dist_init == "[fd00::1]:20050"


def test_what_is_released_can_be_placed_again() -> None:
    state = settled(cluster(lab(), [model("m", TWO.profiles[0], replicas=4)]))
    spec = state.catalog.models[0]
    planner = Planner(state)
    assert planner.find(spec) is None
    first = min(state.replicas.values(), key=lambda replica: replica.fabric or "")
    planner.release(first)
    placed = planner.find(spec)
    assert placed is not None
    assert placed.placements == first.placements
    assert planner.find(spec) is None


def test_a_node_that_is_to_be_emptied_takes_nothing_before_it_is_judged_so() -> None:
    spec = model("m", profile(nodes=2, gpus_per_node=4))
    nodes = [on("n1", "ib-a", gpus=4), on("n2", "ib-a", gpus=4)]
    state = cluster(nodes, [spec], drains={"n2": Drain(node="n2", since=NOW.wall_s, why="for new cables")})
    planner = Planner(state)
    assert planner.find(spec) is None
    refusal = planner.refusal(spec)
    assert refusal.summary == "ib-a has 2 of 2 nodes with 4 free GPUs but n2 is draining"
    assert [refused.words for refused in refusal.profiles[0].fabrics[0].nodes] == [
        "could take a rank, but only 1 of the 2 nodes needed can on ib-a",
        "draining since 2023-11-14 22:13:20 UTC: for new cables",
    ]


def test_a_node_that_came_back_under_another_name_leaves_no_place_on_its_fabric_behind() -> None:
    """What is stated of the old name counts for nothing: there is one node to join, not two."""
    spec = model("m", profile(nodes=2, gpus_per_node=4))
    ghost = lost(on("old-name", "ib-a", gpus=4, subnet=2))
    state = cluster([ghost, on("n1", "ib-a", gpus=4), on("n2", "ib-a", gpus=4, subnet=None)], [spec])
    assert nodes_of(place(replace(state, grace_until_s=5000.0), spec, NOW)) == ("n1", "n2")
    alone = cluster([ghost, on("n1", "ib-a", gpus=4)], [spec])
    assert why(alone, spec) == "ib-a has 2 of 2 nodes with 4 free GPUs but old-name is lost"


def test_a_node_taken_away_between_plan_and_launch_keeps_the_replica_from_the_routes() -> None:
    """The plan was good when it was made; the replica must not be called ready on what is left."""
    state = settled(cluster(lab(), [TWO]))
    state = settled(with_node(state, "node02", heard_at_s=NOW.monotonic_s - 100))
    placed = [replica for replica in state.replicas.values() if not replica.lost and replica.placements]
    assert {placement.node for replica in placed for placement in replica.placements} == {"node03", "node04"}
    assert all(replica.state is ReplicaState.PLACING for replica in placed)


def test_a_node_qualifies_for_what_spans_nodes_once_it_is_on_a_fabric() -> None:
    spec = model("m", profile(nodes=2, gpus_per_node=4))
    off, down = node("n1", gpus=4), on("n1", "ib-a", gpus=4, hcas=(port("mlx5_0", "DOWN"), port("mlx5_1")))
    fits = cluster([on("n1", "ib-a", gpus=4)], [spec])
    for lacking in (off, down):
        assert now_qualifies(cluster([lacking], [spec]), fits, "n1", NOW) == ("node n1 now qualifies for m",)


# -- any cluster

FABRICS = ("ib-a", "ib-b")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes = []
    for number in range(draw(st.integers(1, 6))):
        on_fabrics = draw(st.sets(st.sampled_from(FABRICS), max_size=2))
        groups = draw(st.sampled_from(((None,) * 8, (0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 0, 1, None, 2, 2, 2))))
        count = draw(st.integers(0, 8))
        at = on(
            f"n{number}",
            *sorted(on_fabrics),
            subnet=draw(st.sampled_from((1, 1, 1, 2, None))),
            gpus=[gpu(index, nvlink_group=groups[index], numa_node=index // 4) for index in range(count)],
            memory_gib=draw(st.sampled_from((8, 16))),
            ports=draw(st.sampled_from(("20000-29999", "20000-20299"))),
            weights=draw(st.sampled_from(((), ("/m",)))),
        )
        assert at.inventory is not None
        at = replace(at, inventory=replace(at.inventory, labels={"rack": draw(st.sampled_from(("r1", "r2")))}))
        if draw(st.integers(0, 6)) == 0:
            at = replace(at, state=draw(st.sampled_from((NodeState.LOST, NodeState.SUSPECT))), session=None)
        nodes.append(at)
    models = []
    for name in ("a", "b", "c"):
        profiles = []
        for number in range(draw(st.integers(1, 2))):
            gpus = draw(st.sampled_from((0, 1, 2, 3, 4, 8)))
            profiles.append(
                profile(
                    f"p{number}",
                    nodes=draw(st.sampled_from((1, 1, 2, 3))),
                    gpus_per_node=gpus,
                    tensor_parallel=draw(st.sampled_from((1, 2, max(gpus, 1)))),
                    memory_bytes=draw(st.sampled_from((None, 3 * GIB))),
                    node_selector=draw(st.sampled_from(({}, {"rack": "r1"}))),
                )
            )
        models.append(model(name, *profiles, source="/m", replicas=draw(st.integers(0, 3))))
    return cluster(nodes, models, grace_until_s=5000.0)


def placed_well(
    state: Cluster, placements: tuple[Placement, ...], spec: ModelSpec, name: str, fabric: str | None
) -> None:
    """The rules of one replica: as many ranks and GPUs as stated, on one fabric, on nodes that may."""
    stated = next(each for each in spec.profiles if each.name == name)
    assert len(placements) == stated.nodes == len({placement.node for placement in placements})
    assert [placement.node for placement in placements] == sorted(placement.node for placement in placements)
    subnets = set()
    for placement in placements:
        at = state.nodes[placement.node]
        assert at.state is NodeState.READY
        assert at.inventory is not None
        assert len(set(placement.gpu_uuids)) == len(placement.gpus) == stated.gpus_per_node
        assert placement.address == at.inventory.mgmt_addr
        if stated.nodes > 1:
            assert fabric in [each.name for each in at.inventory.fabrics]
            subnets |= {hca.gid[:19] for hca in at.inventory.hcas if hca.gid is not None}
    assert len(subnets) <= 1
    assert (fabric is not None) is (stated.nodes > 1)


@settings(deadline=None, max_examples=60)
@given(clusters())
def test_no_plan_mixes_fabrics_or_subnets_or_rounds_gpus_or_shares_anything(state: Cluster) -> None:
    after = apply(state, reconcile(state, NOW))
    assert apply(state, reconcile(state, NOW)) == after
    turned = replace(state, nodes=dict(reversed(list(state.nodes.items()))))
    assert apply(turned, reconcile(turned, NOW)).replicas == after.replicas
    held: set[tuple[str, str]] = set()
    ports: set[tuple[str, int]] = set()
    memory: dict[str, int] = {}
    for replica in after.replicas.values():
        if replica.placements:
            assert replica.profile is not None
            assert replica.spec is not None
            placed_well(after, replica.placements, replica.spec, replica.profile.name, replica.fabric)
        else:
            assert replica.why
        for placement in replica.placements:
            taken = {(placement.node, uuid) for uuid in placement.gpu_uuids}
            assert not taken & held
            held |= taken
            assert (placement.node, placement.port // PORT_BLOCK) not in ports
            ports.add((placement.node, placement.port // PORT_BLOCK))
            memory[placement.node] = memory.get(placement.node, 0) + placement.memory_bytes
    for name, used_bytes in memory.items():
        inventory = after.nodes[name].inventory
        assert inventory is not None
        assert used_bytes <= inventory.memory_bytes


@settings(deadline=None, max_examples=60)
@given(clusters(), st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 9)), max_size=14))
def test_a_planner_that_has_placed_and_released_answers_as_a_new_one_would(
    state: Cluster, turns: list[tuple[int, bool, int]]
) -> None:
    """What it keeps between answers (rankings, what is full, rooms) never shows."""
    planner = Planner(state)
    for number, (which, takes, pick) in enumerate(turns):
        spec = state.catalog.models[which]
        if takes:
            placed = planner.find(spec)
            fresh = Planner(state)
            assert fresh.find(spec) == placed
            if placed is None:
                assert planner.summary(spec) == planner.refusal(spec).summary == fresh.refusal(spec).summary
                continue
            state = with_replica(state, spec, placed, f"{spec.name}-{number}")
        elif state.replicas:
            gone = sorted(state.replicas)[pick % len(state.replicas)]
            planner.release(state.replicas[gone])
            left = {key: replica for key, replica in state.replicas.items() if key != gone}
            state = replace(state, replicas=left)


def with_replica(state: Cluster, spec: ModelSpec, placed: Placed, name: str) -> Cluster:
    replica = Replica(
        id=name,
        model=spec.name,
        state=ReplicaState.PLACING,
        since=0.0,
        generation=1,
        profile=placed.profile,
        placements=placed.placements,
    )
    return replace(state, replicas={**state.replicas, name: replica})


@settings(deadline=None, max_examples=60)
@given(clusters())
def test_the_chosen_nodes_are_the_best_that_trying_all_would_find(state: Cluster) -> None:
    """In the documented order of preferences, against every set of as many nodes."""
    for spec in state.catalog.models:
        for stated in spec.profiles:
            placed = Planner(state).find(spec, profiles=[stated])
            fit = []
            for names in combinations(sorted(state.nodes), stated.nodes):
                found = Planner(with_only(state, names)).find(spec, profiles=[stated])
                fit += [found] if found is not None else []
            assert (placed is None) is (not fit)
            if placed is not None:
                assert preference(state, placed) == min(preference(state, each) for each in fit)


def with_only(state: Cluster, names: Iterable[str]) -> Cluster:
    """The others are there, but may take nothing."""
    others = {
        name: at if name in names or at.state is NodeState.LOST else replace(at, state=NodeState.SUSPECT)
        for name, at in state.nodes.items()
    }
    return replace(state, nodes=others)


def preference(state: Cluster, placed: Placed) -> tuple[object, ...]:
    """Nothing else is placed, and sim needs no weights, so that two of the preferences are alike for all."""
    sizes = {each.gpus_per_node for spec in state.catalog.models for each in spec.profiles}

    def stranded(free: int) -> int:
        return sum(free for size in sizes if size > free)

    groups = strands = free = memory = 0
    for placement in placed.placements:
        inventory = state.nodes[placement.node].inventory
        assert inventory is not None
        linked = [each.nvlink_group for each in inventory.gpus if each.uuid in placement.gpu_uuids]
        groups += len(set(linked) - {None}) + linked.count(None)
        before, taken = len(inventory.gpus), len(placement.gpus)
        strands += stranded(before - taken) - stranded(before) if taken else before
        free += before
        memory += inventory.memory_bytes
    nodes = tuple(placement.node for placement in placed.placements)
    return groups, strands, free, -memory, nodes, placed.fabric
