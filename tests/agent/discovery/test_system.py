from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.discovery.files import Unreadable, read
from llmgw.agent.discovery.system import (
    boot_id,
    machine_fingerprint,
    parse_os_release,
    read_kernel,
    read_libc,
    read_os_release,
    warn_about_identity,
)

from .machines import MACHINE_ID, fixture, write_machine, write_tree


@pytest.mark.parametrize(
    ("name", "pretty", "identity", "has_apt"),
    [
        ("debian12", "Debian GNU/Linux 12 (bookworm)", "debian", True),
        ("ubuntu2404", "Ubuntu 24.04.3 LTS", "ubuntu", True),
        ("rocky9", "Rocky Linux 9.6 (Blue Onyx)", "rocky", False),
        ("arch", "Arch Linux", "arch", False),
        ("alpine", "Alpine Linux 3.20.3", "alpine", False),
    ],
)
def test_os_release(name: str, pretty: str, identity: str, has_apt: bool) -> None:
    found = parse_os_release(fixture(f"os_release/{name}"))
    assert (found.pretty, found.id, found.has_apt) == (pretty, identity, has_apt)


def test_os_release_quotes_and_likeness() -> None:
    found = parse_os_release(
        'NAME=\'It\'\nPRETTY_NAME="A \\"quoted\\" \\$name"\nID_LIKE="rhel centos"\nVERSION_ID="9.6'
    )
    assert found.pretty == 'A "quoted" $name'
    assert found.id_like == ("rhel", "centos")


def test_os_release_in_its_second_place(tmp_path: Path) -> None:
    write_tree(tmp_path, {"usr/lib/os-release": fixture("os_release/arch")})
    assert read_os_release(tmp_path).pretty == "Arch Linux"
    assert read_os_release(tmp_path / "nowhere").pretty == "unknown"


def test_libc() -> None:
    assert re.fullmatch(r"(glibc|musl) [0-9.]+", read_libc(Path("/")))


def test_libc_of_alpine(tmp_path: Path) -> None:
    write_tree(
        tmp_path, {"lib/ld-musl-x86_64.so.1": "", "lib/apk/db/installed": "P:zlib\nV:1.3-r0\n\nP:musl\nV:1.2.5-r1\n\n"}
    )
    assert read_libc(tmp_path) == "musl 1.2.5"


def test_kernel_without_its_file_is_that_of_uname(tmp_path: Path) -> None:
    assert read_kernel(write_machine(tmp_path)) == "6.8.0-60-generic"
    assert read_kernel(tmp_path / "nowhere") == os.uname().release


def test_the_fingerprint_stays_differs_between_machines_and_hides_the_machine_id(tmp_path: Path) -> None:
    one = write_machine(tmp_path / "one")
    fingerprint = machine_fingerprint(one)
    assert re.fullmatch("[0-9a-f]{64}", fingerprint)
    assert MACHINE_ID not in fingerprint
    assert machine_fingerprint(write_machine(tmp_path / "same", os_release="arch")) == fingerprint
    other = write_tree(write_machine(tmp_path / "other"), {"etc/machine-id": MACHINE_ID[::-1]})
    assert machine_fingerprint(other) != fingerprint
    assert warn_about_identity(one) == ()


@pytest.mark.parametrize("text", [None, "", "uninitialized\n", "0" * 32 + "\n", "not a machine id"])
def test_a_machine_without_machine_id_falls_back_and_says_so(text: str | None, tmp_path: Path) -> None:
    root = write_machine(tmp_path)
    (root / "etc/machine-id").unlink()
    if text is not None:
        write_tree(root, {"etc/machine-id": text})
    seen = []
    for files, source in (
        ({}, "hostname and boot"),
        ({"sys/class/net/eth0/address": "52:54:00:12:34:56\n", "sys/class/net/eth0/device/x": ""}, "network adapters"),
        ({"sys/class/dmi/id/product_uuid": "4C4C4544-0042-3510-8056-B4C04F4E4D32\n"}, "DMI product UUID"),
    ):
        write_tree(root, files)
        (warning,) = warn_about_identity(root)
        assert source in warning
        assert "systemd-machine-id-setup" in warning
        seen.append(machine_fingerprint(root))
    assert len(set(seen)) == 3
    write_tree(root, {"var/lib/dbus/machine-id": MACHINE_ID})
    assert warn_about_identity(root) == ()


def test_bridges_and_tunnels_do_not_tell_machines_apart(tmp_path: Path) -> None:
    nic = {"sys/class/net/eth0/address": "52:54:00:12:34:56\n", "sys/class/net/eth0/device/x": ""}
    root = write_tree(tmp_path, nic)
    before = machine_fingerprint(root)
    write_tree(root, {"sys/class/net/docker0/address": "02:42:ac:11:00:01\n"})
    assert machine_fingerprint(root) == before


def test_boot_id(tmp_path: Path) -> None:
    assert boot_id(write_machine(tmp_path / "a")) == "b892dadb-9748-4aba-b667-7724d6579ce8"
    assert boot_id(write_tree(tmp_path / "b", {"proc/stat": "cpu 1 2\nbtime 1764400000\n"})) == "booted-at-1764400000"
    assert boot_id(tmp_path / "c") == "unknown"
    assert boot_id() == boot_id()


@given(st.text())
def test_no_text_raises(text: str) -> None:
    assert parse_os_release(text).pretty


def test_odd_files_are_no_exception(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe ok\n")
    (tmp_path / "loop").symlink_to("loop")
    assert read(tmp_path / "bytes") == "\ufffd\ufffd ok"
    assert read(tmp_path / "fifo") == ""
    assert read(tmp_path / "none") == Unreadable("no such file", missing=True)
    for name in ("loop", ".", "bytes/x", "nul\0"):
        assert isinstance(read(tmp_path / name), Unreadable)
