from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.discovery.infiniband import (
    Rate,
    check_fabrics,
    find_hcas,
    parse_gid,
    parse_numbered,
    parse_rate,
    port_problem,
    read_hcas,
    warn_about_hcas,
    with_rates,
)
from llmgw.agent.discovery.settings import DiscoveryRefused
from llmgw.cluster.model import Fabric, Hca

from .machines import write_port, write_tree


def test_a_good_port_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", numa_node="1")
    assert read_hcas(tmp_path) == (
        Hca(
            name="mlx5_0",
            port=1,
            state="ACTIVE",
            phys_state="LinkUp",
            link_layer="InfiniBand",
            rate_gbps=400.0,
            gid="fe80:0000:0000:0000:b83f:d203:0012:3456",
            numa_node=1,
        ),
    )
    assert warn_about_hcas((), read_hcas(tmp_path), tmp_path) == ()


async def test_a_machine_without_infiniband(tmp_path: Path) -> None:
    assert await find_hcas(tmp_path / "infiniband") == ()
    (tmp_path / "file").write_text("")
    assert await find_hcas(tmp_path / "file") == ()


def test_ports_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for port in (10, 2, 1):
        write_port(tmp_path, "mlx5_0", port=port)
    write_port(tmp_path, "mlx4_0")
    assert [(hca.name, hca.port) for hca in read_hcas(tmp_path)] == [
        ("mlx4_0", 1),
        ("mlx5_0", 1),
        ("mlx5_0", 2),
        ("mlx5_0", 10),
    ]


@pytest.mark.parametrize(
    ("state", "phys_state", "rate", "words"),
    [
        ("2: INIT", "5: LinkUp", "400 Gb/sec (4X NDR)", "cable in, no subnet manager has swept: start opensm"),
        ("1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)", "down (Polling): no cable, or nothing at its other end"),
        ("1: DOWN", "3: Disabled", "2.5 Gb/sec (1X SDR)", "down: the port is disabled"),
        ("3: ARMED", "5: LinkUp", "400 Gb/sec (4X NDR)", "not usable in state ARMED (LinkUp)"),
        ("5: ACTIVE_DEFER", "5: LinkUp", "400 Gb/sec (4X NDR)", "not usable in state ACTIVE_DEFER (LinkUp)"),
        ("4: ACTIVE", "5: LinkUp", "100 Gb/sec (1X NDR)", "runs at 1X (100 Gb/s): a bad cable"),
        ("nonsense", "5: LinkUp", "", "its state reads 'nonsense'"),
    ],
)
def test_what_is_wrong_with_a_port_is_said_in_words(
    tmp_path: Path, state: str, phys_state: str, rate: str, words: str
) -> None:
    write_port(tmp_path, "mlx5_3", state=state, phys_state=phys_state, rate=rate)
    (hca,) = read_hcas(tmp_path)
    assert hca.problem is not None
    assert hca.problem.startswith(words)
    assert warn_about_hcas((), (hca,), tmp_path) == (f"mlx5_3 port 1: {hca.problem}",)


def test_a_state_that_can_not_be_read_is_unknown_and_stops_no_other_port(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_1")
    broken = write_port(tmp_path, "mlx5_0")
    (broken / "state").unlink()
    (broken / "state").mkdir()
    first, second = read_hcas(tmp_path)
    assert (first.state, first.problem) == ("unknown", "its state can't be read (Is a directory)")
    assert (second.state, second.problem) == ("ACTIVE", None)


def test_a_guest_whose_driver_lacks_most_files(tmp_path: Path) -> None:
    write_tree(tmp_path, {"mlx5_0/ports/1/state": "4: ACTIVE\n", "mlx5_1/fw_ver": "28.39\n", "stray": ""})
    virtual, bare = read_hcas(tmp_path)
    assert (virtual.state, virtual.phys_state, virtual.link_layer) == ("ACTIVE", "unknown", "unknown")
    assert (virtual.rate_gbps, virtual.gid, virtual.numa_node, virtual.problem) == (None, None, None, None)
    assert bare.problem == "the kernel shows no ports"


def test_numa_node_of_minus_one_is_unknown(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", numa_node="-1")
    assert read_hcas(tmp_path)[0].numa_node is None


@pytest.mark.parametrize(
    ("state", "phys_state", "usable", "words"),
    [
        ("4: ACTIVE", "5: LinkUp", True, None),
        ("1: DOWN", "2: Polling", False, "takes part in no replica over several nodes on fabric ib-a"),
        ("5: ACTIVE_DEFER", "5: LinkUp", False, "takes part in no replica over several nodes on fabric ib-a"),
        ("2: INIT", "5: LinkUp", False, "takes part in no replica over several nodes on fabric ib-a"),
        (None, "5: LinkUp", True, "fabric ib-a is taken on trust here, unverified"),
    ],
)
def test_what_follows_from_a_port_of_a_fabric_is_said(
    tmp_path: Path, state: str | None, phys_state: str, usable: bool, words: str | None
) -> None:
    """Good, failed, failed, failed, and unverified where the state can't be read."""
    port = write_port(tmp_path, "mlx5_0", state=state or "", phys_state=phys_state)
    if state is None:
        (port / "state").unlink()
        (port / "state").mkdir()
    hcas = read_hcas(tmp_path)
    assert (hcas[0].state in ("ACTIVE", "unknown")) is usable
    warnings = warn_about_hcas((Fabric(name="ib-a", hcas=("mlx5_0",)),), hcas, tmp_path)
    if words is None:
        assert warnings == ()
    else:
        (warning,) = warnings
        assert warning.startswith("mlx5_0 port 1: ")
        assert warning.endswith(words)


def test_a_fabric_of_any_number_of_adapters_is_fine(tmp_path: Path) -> None:
    for number in range(9):
        write_port(tmp_path, f"mlx5_{number}")
    hcas = read_hcas(tmp_path)
    names = tuple(hca.name for hca in hcas)
    for fabrics in ((names[:1], names[1:]), (names[:2], names[2:4]), (names,)):
        stated = tuple(Fabric(name=f"ib-{number}", hcas=own) for number, own in enumerate(fabrics))
        check_fabrics(stated, hcas, tmp_path)
        assert warn_about_hcas(stated, hcas, tmp_path) == ()


def test_switches_are_no_adapters(tmp_path: Path) -> None:
    write_port(tmp_path, "sw0")
    write_tree(tmp_path, {"sw0/node_type": "2: switch\n"})
    assert read_hcas(tmp_path) == ()


def test_roce_prefers_a_gid_that_routes(tmp_path: Path) -> None:
    gids = {
        0: "fe80:0000:0000:0000:b83f:d2ff:fe12:3456",
        1: "fe80:0000:0000:0000:b83f:d2ff:fe12:3456",
        2: "0000:0000:0000:0000:0000:ffff:0a01:0203",
        3: "0000:0000:0000:0000:0000:ffff:0a01:0203",
        10: ":".join(["0000"] * 8),
    }
    port = write_port(tmp_path, "mlx5_0", link_layer="Ethernet", gids=gids)
    write_tree(port / "gid_attrs/types", {"0": "IB/RoCE v1\n", "1": "RoCE v2\n", "2": "IB/RoCE v1\n", "3": "RoCE v2\n"})
    (hca,) = read_hcas(tmp_path)
    assert (hca.link_layer, hca.gid) == ("Ethernet", gids[3])


def test_an_ethernet_port_that_is_down_is_warned_about_only_where_a_fabric_names_it(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", state="1: DOWN", phys_state="3: Disabled", link_layer="Ethernet")
    hcas = read_hcas(tmp_path)
    assert warn_about_hcas((), hcas, tmp_path) == ()
    assert len(warn_about_hcas((Fabric(name="roce", hcas=("mlx5_0",)),), hcas, tmp_path)) == 1


def test_a_fabric_that_names_an_adapter_the_machine_lacks_is_refused(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0")
    write_port(tmp_path, "mlx5_1")
    hcas = read_hcas(tmp_path)
    check_fabrics((Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_1")),), hcas, tmp_path)
    stated = (Fabric(name="ib-a", hcas=("mlx5_0", "mlx5_7")), Fabric(name="ib-b", hcas=("mlx5_10",)))
    with pytest.raises(DiscoveryRefused) as refused:
        check_fabrics(stated, hcas, tmp_path)
    words = str(refused.value)
    assert "fabric ib-a names the adapter mlx5_7, which is not under" in words
    assert "fabric ib-b names the adapter mlx5_10" in words
    assert "(it has mlx5_0, mlx5_1)" in words
    assert words.endswith("hangs at its first all-reduce")
    with pytest.raises(DiscoveryRefused, match="it has none"):
        check_fabrics(stated, (), tmp_path)


def test_rates_of_fabrics_are_measured_unless_stated(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", rate="400 Gb/sec (4X NDR)")
    write_port(tmp_path, "mlx5_1", rate="200 Gb/sec (4X HDR)")
    write_port(tmp_path, "mlx5_2", rate="2.5 Gb/sec (1X SDR)", state="1: DOWN")
    hcas = read_hcas(tmp_path)
    both = ("mlx5_0", "mlx5_1", "mlx5_2")
    fabrics = (Fabric(name="a", hcas=both), Fabric(name="b", hcas=both, rate_gbps=400), Fabric(name="c", hcas=("x",)))
    assert [fabric.rate_gbps for fabric in with_rates(fabrics, hcas)] == [200, 400, None]
    assert "mlx5_1 port 1 runs at 200 Gb/s, but fabric b states 400" in warn_about_hcas(fabrics, hcas, tmp_path)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200 Gb/sec (4X HDR)", Rate(200, 4)),
        ("2.5 Gb/sec (1X SDR)", Rate(2.5, 1)),
        ("100 Gb/sec (4X EDR)\n", Rate(100, 4)),
        ("1200 Gb/sec (12X NDR)", Rate(1200, 12)),
        ("40 Gb/sec", Rate(40, None)),
        ("0 Gb/sec (4X)", None),
        ("", None),
    ],
)
def test_rates(text: str, rate: Rate | None) -> None:
    assert parse_rate(text) == rate


@given(st.text(), st.text(), st.text())
def test_no_text_raises(one: str, two: str, three: str) -> None:
    parse_numbered(one)
    rate = parse_rate(two)
    assert rate is None or rate.gbps > 0
    parse_gid(three)
    port_problem(one, two, three, rate)
