"""The options of a machine: what they mean, and what they can't."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmgw.onboarding.machine import BadOption, authorized_keys, machine, pci_address, slow_cpu
from llmgw.onboarding.making import disks, frame, mark_of, new_mac, new_mark
from tests.onboarding.provisioning import KEY
from tests.onboarding.proxmox import schema


def test_the_number_is_the_last_octet_and_the_gateway_the_first_address() -> None:
    made = machine(name="llmgw-node04", ip="10.0.0.144/24")
    assert (made.vmid, str(made.gateway), made.host) == (144, "10.0.0.1", "10.0.0.144")
    assert (made.cores, made.memory_mib, made.disk_gib, made.cpu) == (4, 8192, 40, "host")
    assert (made.storage, made.bridge, made.vlan, made.ssh_user) == ("local-lvm", "vmbr0", None, "llmgw")
    assert str(machine(name="a", ip="10.0.9.144/22").gateway) == "10.0.8.1"
    assert machine(name="a", ip="10.0.0.144/24", dns="10.0.0.2, 10.0.0.3").dns == ("10.0.0.2", "10.0.0.3")


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--ip", {"ip": "10.0.0.144"}),
        ("--ip", {"ip": "10.0.0.300/24"}),
        ("--ip", {"ip": "10.0.0.0/24"}),
        ("--ip", {"ip": "10.0.0.255/24"}),
        ("--ip", {"ip": "10.0.0.144/32"}),
        ("--ip", {"ip": "127.0.0.144/8"}),
        ("--ip", {"ip": "fd00::1/64"}),
        ("--vmid", {"ip": "10.0.0.44/24"}),
        ("--vmid", {"vmid": 99}),
        ("--vmid", {"vmid": 10**9}),
        ("--gateway", {"gateway": "10.0.1.1"}),
        ("--gateway", {"gateway": "10.0.0.144"}),
        ("--gateway", {"gateway": "router"}),
        ("--gateway", {"ip": "10.0.0.129/25", "vmid": 100}),
        ("--dns", {"dns": "resolver.lab"}),
        ("--name", {"name": "node_4"}),
        ("--name", {"name": "-node"}),
        ("--name", {"name": "n" * 64}),
        ("--name", {"name": "ca"}),
        ("--cores", {"cores": 0}),
        ("--memory", {"memory_mib": 32}),
        ("--disk", {"disk_gib": 1}),
        ("--vlan", {"vlan": 4095}),
        ("--bridge", {"bridge": "vmbr0,firewall=1"}),
        ("--storage", {"storage": "local-lvm:99"}),
        ("--cpu", {"cpu": "host --smm"}),
        ("--ssh-user", {"ssh_user": "root"}),
        ("--ssh-user", {"ssh_user": "Op"}),
        ("--gpu", {"gpus": ("41:zz",)}),
    ],
)
def test_what_can_not_be_meant_is_refused_by_its_name(option: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BadOption) as refused:
        machine(**{"name": "llmgw-node04", "ip": "10.0.0.144/24", **changes})
    assert refused.value.option == option


@given(
    st.integers(1, 254),
    st.integers(8, 30),
    st.integers(1, 512),
    st.one_of(st.none(), st.integers(1, 4094)),
    st.sampled_from(["host", "x86-64-v3", "EPYC-Genoa"]),
    st.lists(st.sampled_from(["41:00", "0000:41:00.1", "c1:00.0"]), max_size=2),
)
def test_proxmox_takes_the_options_of_every_machine(
    last: int, prefix: int, cores: int, vlan: int | None, cpu: str, gpus: list[str]
) -> None:
    address = ipaddress.IPv4Interface(f"10.20.30.{last}/{prefix}")
    try:
        made = machine(name="n1", ip=str(address), vmid=500, cores=cores, vlan=vlan, cpu=cpu, gpus=tuple(gpus))
    except BadOption:
        assume(False)
    mark = new_mark(made.name, "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIH")
    options = frame(made, mac=new_mac(), dns=("10.0.0.2", "10.0.0.3"), description=str(mark))
    passed = {f"hostpci{number}": f"{gpu},pcie=1" for number, gpu in enumerate(made.gpus)}
    schema.check({**options, **disks(made, image="local:import/a.qcow2", passed=passed)}, api=True)
    assert mark_of(options["description"]) == mark
    assert options["ciupgrade"] == "0"
    assert ("efidisk0" in disks(made, image="/x", passed={})) == bool(made.gpus)


def test_a_description_of_anybody_else_is_no_mark() -> None:
    for text in ("", "mail server", "llmgw-node04: a node of llmgw", "n: being made by llmgw, run 12, host key x"):
        assert mark_of(text) is None


def test_a_cpu_that_may_hide_its_vectors_is_warned_of() -> None:
    assert slow_cpu("host") is None
    assert slow_cpu("host,flags=+aes") is None
    words = slow_cpu("x86-64-v2-AES")
    assert words is not None
    assert "AVX2" in words
    assert "five times" in words


def test_keys_that_are_let_in() -> None:
    text = f'# the lab\n{KEY}\n\ncommand="backup" {KEY}\n{KEY}\n'
    assert authorized_keys(text, "f") == (KEY,)
    with pytest.raises(BadOption, match="holds a private key"):
        authorized_keys("-----BEGIN OPENSSH PRIVATE KEY-----\n", "id_ed25519")
    with pytest.raises(BadOption, match="nobody could get into the machine"):
        authorized_keys("# none\n", "f")


def test_addresses_of_devices() -> None:
    assert pci_address("41:00.0") == "0000:41:00.0"
    assert pci_address("0001:C1:00") == "0001:c1:00"
