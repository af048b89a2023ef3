from __future__ import annotations

import ipaddress
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.discovery.network import Management, find_management, parse_server, source_address
from llmgw.agent.discovery.settings import DiscoverySettings
from llmgw.link.addresses import Address, interface_name, parse_addresses, read_addresses

NO_SUCH_NAME = "no-such-host.invalid"


def test_the_kernel_lists_loopback_with_its_interface() -> None:
    loopback = [address for address in read_addresses() if address.ip == "127.0.0.1"]
    assert [interface_name(address.interface_index) for address in loopback] == ["lo"]


async def test_the_route_to_a_control_plane_decides() -> None:
    found = await find_management(DiscoverySettings(servers=("https://127.0.0.1:7443",)))
    assert (found.address, found.interface, found.warnings) == ("127.0.0.1", "lo", ())


@pytest.mark.skipif(not source_address("::1", 7443), reason="no IPv6 loopback here")
async def test_also_over_ipv6() -> None:
    found = await find_management(DiscoverySettings(servers=("https://[::1]:7443",)))
    assert (found.address, found.interface) == ("::1", "lo")


async def test_localhost_by_name_is_taken_at_its_word() -> None:
    found = await find_management(DiscoverySettings(servers=("https://localhost:7443",)))
    assert ipaddress.ip_address(found.address).is_loopback
    assert found.warnings == ()


async def test_the_first_server_that_resolves_counts() -> None:
    servers = (f"https://{NO_SUCH_NAME}:7443", "https://127.0.0.1:7443")
    found = await find_management(DiscoverySettings(servers=servers))
    assert (found.address, found.interface) == ("127.0.0.1", "lo")


async def test_no_server_that_resolves_makes_a_guess_and_says_so() -> None:
    found = await find_management(DiscoverySettings(servers=(f"https://{NO_SUCH_NAME}:7443",)))
    (warning,) = found.warnings
    assert f"the name {NO_SUCH_NAME} can't be resolved" in warning
    assert f"the management address {found.address} is a guess" in warning
    ipaddress.ip_address(found.address)


async def test_a_machines_own_name_on_loopback_is_not_where_others_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's 127.0.1.1 line in /etc/hosts makes it."""
    name = socket.gethostname()
    if not all(entry[4][0].startswith("127.") for entry in socket.getaddrinfo(name, 7443, socket.AF_INET)):
        pytest.skip(f"{name} does not resolve to loopback here")
    found = await find_management(DiscoverySettings(servers=(f"https://{name}:7443",)))
    assert f"the name {name.lower()} resolves to loopback here (see /etc/hosts)" in found.warnings[0]


async def test_nothing_is_sent_to_find_a_route() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert source_address("127.0.0.1", port) == "127.0.0.1"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(1)


async def test_without_servers_there_is_an_address_all_the_same() -> None:
    found = await find_management(DiscoverySettings())
    ipaddress.ip_address(found.address)
    assert found.warnings == ()


async def test_stated_values_win() -> None:
    settings = DiscoverySettings(servers=("https://192.0.2.1:7443",), mgmt_addr="127.0.0.1", mgmt_interface="lo")
    found = await find_management(settings)
    assert (found.address, found.interface, found.warnings) == ("127.0.0.1", "lo", ())


async def test_an_interface_of_a_stated_address_is_found_out() -> None:
    found = await find_management(DiscoverySettings(mgmt_addr="127.0.0.1"))
    assert (found.address, found.interface, found.warnings) == ("127.0.0.1", "lo", ())


async def test_a_stated_interface_gives_its_address() -> None:
    found = await find_management(DiscoverySettings(mgmt_interface="lo"))
    assert (found.address, found.interface, found.warnings) == ("127.0.0.1", "lo", ())


async def test_a_stated_address_that_the_machine_lacks_is_said() -> None:
    found = await find_management(DiscoverySettings(mgmt_addr="203.0.113.9"))
    assert found.address == "203.0.113.9"
    (warning,) = found.warnings
    assert warning.startswith("mgmt_addr 203.0.113.9 is not an address of this machine (it has: ")
    assert "127.0.0.1" in warning


async def test_a_stated_interface_that_the_machine_lacks_is_said() -> None:
    settings = DiscoverySettings(servers=("https://127.0.0.1:7443",), mgmt_interface="ib7")
    found = await find_management(settings)
    assert (found.address, found.interface) == ("127.0.0.1", "lo")
    assert found.warnings[0].startswith("mgmt_interface ib7 is not an interface of this machine (it has: lo")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("https://10.0.0.140:7443", ("10.0.0.140", 7443)),
        ("https://control.example", ("control.example", 7443)),
        ("https://[fd00::1]:8443/", ("fd00::1", 8443)),
        ("control:9000", ("control", 9000)),
        ("https://host:99999", None),
        ("https://[broken", None),
        ("", None),
    ],
)
def test_addresses_of_control_planes(text: str, parsed: tuple[str, int] | None) -> None:
    assert parse_server(text) == parsed


def test_the_own_address_of_a_point_to_point_link() -> None:
    body = struct.pack("=BBBBL", socket.AF_INET, 32, 0, 0, 7)
    body += struct.pack("=HH4s", 8, 1, bytes([10, 0, 0, 2])) + struct.pack("=HH4s", 8, 2, bytes([10, 0, 0, 1]))
    message = struct.pack("=LHHLL", 16 + len(body), 20, 0, 1, 0) + body
    done = struct.pack("=LHHLL", 20, 3, 0, 1, 0) + bytes(4)
    assert parse_addresses(message + done) == ([Address("10.0.0.1", 7)], True)
    assert parse_addresses(message) == ([Address("10.0.0.1", 7)], False)
    for cut in range(len(message)):
        parse_addresses(message[:cut])


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda rest: struct.pack("=LHH", 60, 20, 0) + rest))
def test_no_datagram_raises(data: bytes) -> None:
    for address in parse_addresses(data)[0]:
        ipaddress.ip_address(address.ip)


@given(st.text())
def test_no_server_raises(text: str) -> None:
    parse_server(text)


def test_addresses_leave_no_descriptors_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_addresses()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_address_is_that_of_the_way_to_the_control_plane_whatever_changes() -> None:
    """The ranks of a replica find one another by it: it is given up for another one only, never for a guess. Where
    there are several cards, it is that of the one by which the control plane is reached."""
    command = ["unshare", "--net", sys.executable, str(Path(__file__).with_name("in_a_network.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in done.stderr:
        pytest.skip("needs network namespaces")
    steps = {step: rest for step, *rest in map(json.loads, done.stdout.splitlines())}
    assert steps == {
        "up": [None, "10.77.9.11", "one", []],
        "still up": [False, "10.77.9.11", "one", []],
        "down": [
            False,
            "10.77.9.11",
            "one",
            ["there is no route to 10.77.9.1: the management address 10.77.9.11 is kept"],
        ],
        "up again": [False, "10.77.9.11", "one", []],
        "moved": [True, "10.77.9.12", "one", []],
        "three cards": [None, "10.99.0.11", "three", []],
        "by the second": [True, "10.88.0.11", "two", []],
        "by the third again": [True, "10.99.0.11", "three", []],
    }, done.stderr


async def test_the_address_of_a_stated_interface_is_kept_while_it_has_none() -> None:
    known = Management("10.0.0.5", "ib9")
    found = await find_management(DiscoverySettings(mgmt_interface="ib9"), known)
    assert (found.address, found.interface) == ("10.0.0.5", "ib9")
    assert found.warnings == (
        "mgmt_interface ib9 has no address at the moment: the management address 10.0.0.5 is kept",
    )


async def test_an_address_is_kept_while_the_servers_name_can_not_be_resolved() -> None:
    settings = DiscoverySettings(servers=(f"https://{NO_SUCH_NAME}:7443",))
    found = await find_management(settings, Management("127.0.0.1", "lo"))
    assert found.address == "127.0.0.1"
    assert found.warnings[0].endswith(": the management address 127.0.0.1 is kept")
