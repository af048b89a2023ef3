"""The matrix of ``nvidia-smi topo -m``, in the forms that drivers of several years print it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.discovery.gpus import nvlink_groups
from llmgw.agent.discovery.topology_text import GpuLinks, parse_topology

from .machines import FIXTURES, fixture


def groups(name: str) -> list[int | None]:
    links = parse_topology(fixture(f"topo/{name}"))
    found = nvlink_groups({index: one.nvlink_peers for index, one in links.items()})
    return [found.get(index) for index in sorted(links)]


@pytest.mark.parametrize(
    ("name", "nvlink", "numa"),
    [
        ("h100x8.txt", [0] * 8, [0] * 4 + [1] * 4),
        ("rtx5090x2.txt", [None, None], [0, 0]),
        ("a40x4_bridged.txt", [0, 0, 1, 1], [0, 0, 1, 1]),
        ("v100x8_mesh.txt", [0] * 8, [None] * 8),
        ("single.txt", [None], [0]),
        ("vm_no_affinity.txt", [0, 0], [None, None]),
        ("a100x4_mig.txt", [None, 0, 0, 0], [None] * 4),
        ("blanks.txt", [0] * 4, [0] * 4),
    ],
)
def test_groups_and_numa_nodes(name: str, nvlink: list[int | None], numa: list[int | None]) -> None:
    assert groups(name) == nvlink
    links = parse_topology(fixture(f"topo/{name}"))
    assert [links[index].numa_node for index in sorted(links)] == numa


def test_only_direct_links_are_peers() -> None:
    links = parse_topology(fixture("topo/v100x8_mesh.txt"))
    assert links[0] == GpuLinks(nvlink_peers=(1, 2, 3, 4))
    assert links[7] == GpuLinks(nvlink_peers=(3, 4, 5, 6))


def test_adapters_and_the_legend_are_no_gpus() -> None:
    assert list(parse_topology(fixture("topo/h100x8.txt"))) == list(range(8))


@pytest.mark.parametrize("name", [path.name for path in sorted((FIXTURES / "nvidia_smi").iterdir())])
def test_nothing_else_that_nvidia_smi_prints_is_a_matrix(name: str) -> None:
    assert parse_topology(fixture(f"nvidia_smi/{name}")) == {}


_PIECES = st.sampled_from(
    ["GPU0", "GPU1", "GPU9", "NIC0", " X ", "X", "NV4", "SYS", "\t", "\t\t", "  ", "\n", "0", "N/A"]
)


@given(st.text() | st.lists(_PIECES).map("".join))
def test_no_text_raises(text: str) -> None:
    for index, links in parse_topology(text).items():
        assert index not in links.nvlink_peers
