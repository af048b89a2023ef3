"""The CD of a first boot, read by others than who wrote it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmgw.onboarding.cloud_init import seed_of
from llmgw.onboarding.host_key import fingerprint_of, new_host_key
from llmgw.onboarding.machine import machine
from llmgw.onboarding.seed import seed_image
from tests.onboarding.provisioning import KEY
from tests.onboarding.proxmox.iso import read_iso

NAMES = st.text("abcdefghijklmnopqrstuvwxyz-.", min_size=1, max_size=30).filter(lambda name: name.strip("."))


@given(st.dictionaries(NAMES, st.binary(max_size=9000), min_size=1, max_size=6))
def test_what_is_written_is_read(files: dict[str, bytes]) -> None:
    assert read_iso(seed_image(files)) == ("cidata", files)


def test_the_same_files_are_the_same_image() -> None:
    assert seed_image({"a": b"1", "b": b"2"}) == seed_image({"b": b"2", "a": b"1"})


@pytest.mark.skipif(shutil.which("blkid") is None, reason="there is no blkid on this machine (package util-linux)")
def test_the_label_is_what_cloud_init_looks_for(tmp_path: Path) -> None:
    (tmp_path / "seed.iso").write_bytes(seed_image({"user-data": b"#cloud-config\n"}))
    command = ["blkid", "-p", "-o", "export", tmp_path / "seed.iso"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert "LABEL=cidata" in found
    assert "TYPE=iso9660" in found


def test_the_three_files_of_a_machine() -> None:
    key = new_host_key()
    made = machine(name="llmgw-node04", ip="10.0.0.144/24", ssh_user="ops")
    seed = seed_of(made, (KEY,), ("10.0.0.2",), "BC:24:11:00:AA:01", key)
    assert seed.user_data.startswith("#cloud-config\n")
    user_data = yaml.safe_load(seed.user_data)
    (user,) = user_data["users"]
    assert user["name"] == "ops"
    assert user["ssh_authorized_keys"] == [KEY]
    assert user["sudo"] == "ALL=(ALL) NOPASSWD:ALL"
    assert user["lock_passwd"] is True
    assert user_data["hostname"] == "llmgw-node04"
    assert user_data["package_upgrade"] is False
    assert user_data["ssh_keys"]["ed25519_private"] == key.private
    assert user_data["ssh_deletekeys"] is True
    meta_data = yaml.safe_load(seed.meta_data)
    assert meta_data["local-hostname"] == "llmgw-node04"
    assert meta_data["instance-id"] != yaml.safe_load(seed_of(made, (KEY,), (), "", key).meta_data)["instance-id"]
    network = yaml.safe_load(seed.network_config)
    assert network == {
        "version": 1,
        "config": [
            {
                "type": "physical",
                "name": "eth0",
                "mac_address": "bc:24:11:00:aa:01",
                "subnets": [
                    {
                        "type": "static",
                        "address": "10.0.0.144/24",
                        "gateway": "10.0.0.1",
                        "dns_nameservers": ["10.0.0.2"],
                    }
                ],
            }
        ],
    }


def test_a_host_key_is_one_that_ssh_reads(tmp_path: Path) -> None:
    key = new_host_key()
    file = tmp_path / "key"
    file.write_text(key.private)
    file.chmod(0o600)
    public = subprocess.run(["ssh-keygen", "-y", "-f", file], check=True, capture_output=True, text=True).stdout
    assert public.split()[:2] == key.public.split()
    (tmp_path / "key.pub").write_text(public)
    shown = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "key.pub"], check=True, capture_output=True, text=True)
    assert shown.stdout.split()[1] == fingerprint_of(key.public)
    assert key.private not in repr(key)
