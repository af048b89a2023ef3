"""GPUs that are close to each other, and nodes that can reach one another."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.cluster.model import Gpu, Hca
from llmgw.cluster.topology import choose_gpus, islands, networks, seats

from .building import gpu
from .fabrics import on, port


def gpus(groups: tuple[int | None, ...], numa: tuple[int | None, ...] | None = None) -> list[Gpu]:
    return [
        gpu(index, nvlink_group=group, numa_node=numa[index] if numa is not None else None)
        for index, group in enumerate(groups)
    ]


def indices(chosen: tuple[Gpu, ...]) -> tuple[int, ...]:
    return tuple(each.index for each in chosen)


@pytest.mark.parametrize(
    ("groups", "wanted", "chosen"),
    [
        ((0, 0, 0, 0, 1, 1, 1, 1), 4, (0, 1, 2, 3)),
        ((0, 0, 0, 1, 1, 1, 1), 4, (3, 4, 5, 6)),
        ((0, 0, 0, 0, 1, 1), 2, (4, 5)),
        ((0, 0, 0, 1, 1), 4, (0, 1, 2, 3)),
        ((None, None, None), 2, (0, 1)),
        ((None, None, 0, 0), 2, (2, 3)),
        ((0, 0, None, 1), 1, (2,)),
        ((0, 0, 0, 1, 1), 1, (3,)),
        ((0, 0), 0, ()),
    ],
)
def test_gpus_are_taken_from_one_nvlink_group_where_one_suffices(
    groups: tuple[int | None, ...], wanted: int, chosen: tuple[int, ...]
) -> None:
    assert indices(choose_gpus(gpus(groups), wanted)) == chosen


def test_each_tensor_parallel_group_stays_inside_an_nvlink_group_and_in_a_row() -> None:
    """Ranks count up through a tensor-parallel group first: 0, 2 and 1, 3 are joined here."""
    assert indices(choose_gpus(gpus((0, 1, 0, 1)), 4, together=2)) == (0, 2, 1, 3)
    assert indices(choose_gpus(gpus((0, 0, 0, 1, 1, 1)), 4, together=2)) == (0, 1, 3, 4)
    assert indices(choose_gpus(gpus((0, 0, 1, 1, 2, 2)), 4, together=4)) == (0, 1, 2, 3)


def test_where_nvlink_does_not_decide_one_numa_node_does() -> None:
    none = (None,) * 8
    halves = (0, 0, 0, 0, 1, 1, 1, 1)
    assert indices(choose_gpus(gpus(none, halves)[1:], 4)) == (4, 5, 6, 7)
    assert indices(choose_gpus(gpus(none, halves)[2:], 2)) == (2, 3)
    pairs = (0, 0, 1, 1, 2, 2, 3, 3)
    assert indices(choose_gpus(gpus(pairs, halves)[2:], 4)) == (4, 5, 6, 7)
    assert indices(choose_gpus(gpus((0,) * 8, halves)[1:], 4)) == (4, 5, 6, 7)


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.one_of(st.none(), st.integers(0, 1))), max_size=8)
)
def test_the_choice_of_gpus_is_exact_and_does_not_hang_on_their_order(
    joined: list[tuple[int | None, int | None]],
) -> None:
    all_gpus = gpus(tuple(group for group, _ in joined), tuple(numa for _, numa in joined))
    groups = [group for group, _ in joined]
    for wanted in range(len(all_gpus) + 1):
        for together in (0, 1, 2, 4):
            chosen = choose_gpus(all_gpus, wanted, together)
            assert len(set(chosen)) == wanted
            shuffled = random.Random(wanted).sample(all_gpus, len(all_gpus))
            assert choose_gpus(shuffled, wanted, together) == chosen
            touched = {each.nvlink_group for each in chosen}
            if any(group is not None and groups.count(group) >= wanted for group in groups) and wanted > 1:
                assert len(touched) == 1
                assert None not in touched
            count = len(touched - {None}) + sum(each.nvlink_group is None for each in chosen)
            assert islands(tuple(all_gpus), wanted, together) == count


STATES = [
    ("ACTIVE", None),
    ("unknown", None),
    ("DOWN", "adapter mlx5_0 port 1 is DOWN (down (Polling): no cable, or nothing at its other end)"),
    ("INIT", "adapter mlx5_0 port 1 is INIT"),
    ("ARMED", "adapter mlx5_0 port 1 is ARMED"),
    ("ACTIVE_DEFER", "adapter mlx5_0 port 1 is ACTIVE_DEFER"),
]


@pytest.mark.parametrize(("state", "words"), STATES)
def test_a_port_that_is_known_not_to_be_active_keeps_a_node_off_its_fabric(state: str, words: str | None) -> None:
    problem = "down (Polling): no cable, or nothing at its other end" if state == "DOWN" else None
    at = on("n1", "ib-a", hcas=(port("mlx5_0", state, problem=problem), port("mlx5_1")))
    assert at.inventory is not None
    (seat,) = seats(at.inventory)
    assert (seat.fabric, seat.problem) == ("ib-a", words)


def test_all_that_is_wrong_with_a_fabric_is_said() -> None:
    at = on("n1", "ib-b", hcas=(port("mlx5_1", "DOWN"), port("mlx5_1", "INIT", port=2)))
    assert at.inventory is not None
    (seat,) = seats(at.inventory)
    words = "adapter mlx5_0 is not there; adapter mlx5_1 port 1 is DOWN; adapter mlx5_1 port 2 is INIT"
    assert seat.problem == words


def network_of(*ports: tuple[Hca, Hca]) -> list[frozenset[str]]:
    members = {}
    for number, pair in enumerate(ports):
        at = on(f"n{number}", "ib", hcas=pair)
        assert at.inventory is not None
        members[at.id] = seats(at.inventory)[0]
    found = networks(members)
    return [found[name] for name in members]


def pair(first: int | None, second: int | None) -> tuple[Hca, Hca]:
    return port("mlx5_0", subnet=first), port("mlx5_1", subnet=second)


def test_ports_in_different_subnets_are_not_one_network_though_both_are_active() -> None:
    a, b, c = network_of(pair(1, 1), pair(2, 2), pair(1, 1))
    assert a == c != b
    assert a == {"fe80:0000:0000:0001"}


def test_rails_with_a_subnet_each_are_one_network() -> None:
    a, b, c = network_of(pair(1, 2), pair(2, 1), pair(1, 1))
    assert a == b != c


def test_who_does_not_say_its_subnet_is_counted_to_the_only_one_there_is() -> None:
    a, b, c = network_of(pair(1, 1), pair(None, None), pair(None, 1))
    assert a == b == c
    assert len(set(network_of(pair(None, None), pair(None, None)))) == 1


def test_and_to_none_where_there_are_several() -> None:
    a, b, unsaid = network_of(pair(1, 1), pair(2, 2), pair(None, None))
    assert len({a, b, unsaid}) == 3


def test_infiniband_and_ethernet_are_not_one_network_and_any_spelling_of_a_gid_is_read() -> None:
    ether = port("mlx5_0", link_layer="Ethernet"), port("mlx5_1", link_layer="Ethernet")
    short = port("mlx5_0", gid="fe80::1:2:c903:ef:5ed1"), port("mlx5_1", gid="FE80::1:2:c903:ef:5ed2")
    broken = port("mlx5_0", gid="not a GID"), port("mlx5_1")
    a, b, c, d = network_of(pair(1, 1), ether, short, broken)
    assert a == c == d != b
