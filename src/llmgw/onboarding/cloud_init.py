"""What a new machine reads at its first boot: its user, keys, address, name, machine id and host key."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from llmgw.onboarding.host_key import HostKey
from llmgw.onboarding.machine import Machine

_INTERFACE = "eth0"

# An image that was booted before brings the id of the machine that it was: two nodes with one id are taken for one.
# systemd made a new one where the image had none. The journal is told, or what follows goes where nobody looks.
_FRESH_MACHINE_ID = (
    "test -e /run/systemd/first-boot && exit; "
    "tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id || exit; "
    "test -f /var/lib/dbus/machine-id && ln -sf /etc/machine-id /var/lib/dbus/machine-id; "
    "systemctl --no-block try-restart systemd-journald.service"
)

# The data is taken away after the first boot, since the host key is in it. What was set up by it is to stay as it is.
_KEEP = "# The data of the first boot is gone on purpose: keep what came of it.\nmanual_cache_clean: true\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """The three files of a NoCloud seed."""

    user_data: str
    meta_data: str
    network_config: str

    def files(self) -> Mapping[str, bytes]:
        return {
            "user-data": self.user_data.encode(),
            "meta-data": self.meta_data.encode(),
            "network-config": self.network_config.encode(),
        }


def seed_of(machine: Machine, keys: tuple[str, ...], dns: tuple[str, ...], mac: str, host_key: HostKey) -> Seed:
    """The seed of ``machine``. ``keys`` are let in as its ssh user; ``mac`` is that of its one network card."""
    return Seed(
        user_data="#cloud-config\n" + _yaml(_user_data(machine, keys, host_key)),
        meta_data=_yaml({"instance-id": f"{machine.name}-{secrets.token_hex(8)}", "local-hostname": machine.name}),
        network_config=_yaml(_network_config(machine, dns, mac)),
    )


def _user_data(machine: Machine, keys: tuple[str, ...], host_key: HostKey) -> Mapping[str, object]:
    return {
        "hostname": machine.name,
        "preserve_hostname": False,
        "manage_etc_hosts": False,
        "users": [
            {
                "name": machine.ssh_user,
                "gecos": "llmgw",
                "groups": ["adm"],
                "shell": "/bin/bash",
                "sudo": "ALL=(ALL) NOPASSWD:ALL",
                "lock_passwd": True,
                "ssh_authorized_keys": list(keys),
            }
        ],
        "disable_root": True,
        "ssh_pwauth": False,
        "ssh_deletekeys": True,
        "ssh_keys": {
            "ed25519_private": host_key.private,
            "ed25519_public": f"{host_key.public} root@{machine.name}",
        },
        # An upgrade at the first boot holds the locks of apt for minutes, and is nobody's decision here.
        "package_update": False,
        "package_upgrade": False,
        # There always: any other would be generated first.
        "locale": "C.UTF-8",
        "bootcmd": [["cloud-init-per", "instance", "llmgw-machine-id", "sh", "-c", _FRESH_MACHINE_ID]],
        "write_files": [
            {"path": "/etc/hosts", "permissions": "0644", "content": _hosts(machine)},
            {"path": "/etc/cloud/cloud.cfg.d/99-llmgw.cfg", "permissions": "0644", "content": _KEEP},
        ],
    }


def _hosts(machine: Machine) -> str:
    # Its own name is its address, not 127.0.1.1: what runs over several nodes would wait for peers on the loopback.
    return (
        "127.0.0.1 localhost\n"
        f"{machine.host} {machine.name}\n"
        "::1 localhost ip6-localhost ip6-loopback\n"
        "ff02::1 ip6-allnodes\n"
        "ff02::2 ip6-allrouters\n"
    )


def _network_config(machine: Machine, dns: tuple[str, ...], mac: str) -> Mapping[str, object]:
    # Version 1, by the card's own address: it is what all images of the last years take, whichever renderer they have.
    subnet = {
        "type": "static",
        "address": str(machine.address),
        "gateway": str(machine.gateway),
        "dns_nameservers": list(dns),
    }
    card = {"type": "physical", "name": _INTERFACE, "mac_address": mac.lower(), "subnets": [subnet]}
    return {"version": 1, "config": [card]}


class _Dumper(yaml.SafeDumper):
    """Text of several lines as such: people read these files."""


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(data: Mapping[str, object]) -> str:
    dumped: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=4096, allow_unicode=True)
    return dumped
