"""Which options a virtual machine of Proxmox has, and what each may say: as its own tables do, for those in use."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

_DNS_NAME = re.compile(
    r"(?=.{1,63}$)[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*"
)
_MAC = r"[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}"
_VOLUME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*:\S+")
_URLENCODED = re.compile(r"[-%a-zA-Z0-9_.!~*'()]*")
_DRIVE_KEYS = {
    "media": r"cdrom|disk",
    "import-from": r"\S+",
    "discard": r"on|ignore",
    "size": r"\d+[KMGT]?",
    "ssd": r"[01]",
    "iothread": r"[01]",
    "cache": r"none|writethrough|writeback|unsafe|directsync",
    "format": r"raw|qcow2|vmdk",
    "backup": r"[01]",
}
_EFI_KEYS = {"efitype": r"2m|4m", "pre-enrolled-keys": r"[01]", "size": r"\d+[KMGT]?", "format": r"raw|qcow2"}


class BadParameter(Exception):
    def __init__(self, name: str, words: str) -> None:
        super().__init__(f"{name}: {words}")
        self.name = name
        self.words = words


def check(options: dict[str, str], *, api: bool) -> None:
    """Raises BadParameter for the first that Proxmox would not take."""
    for name, value in options.items():
        checker = _checker(name)
        if checker is None:
            raise BadParameter(
                name, "property is not defined in schema and the schema does not allow additional properties"
            )
        if name == "sshkeys" and api and not _URLENCODED.fullmatch(value):
            raise BadParameter(name, "invalid format - invalid urlencoded string")
        words = checker(value)
        if words is not None:
            raise BadParameter(name, words)


def drive(value: str) -> tuple[str, dict[str, str]]:
    """A drive's volume (or ``STORAGE:SIZE``, or ``none``) and its properties."""
    volume, *rest = value.split(",")
    volume = volume.removeprefix("file=")
    return volume, dict(part.partition("=")[::2] for part in rest)


def _checker(name: str) -> Callable[[str], str | None] | None:
    if name in _PLAIN:
        return _PLAIN[name]
    kind = re.fullmatch(r"([a-z]+)(\d+)", name)
    if kind is None:
        return None
    limit = {"scsi": 30, "ide": 3, "sata": 5, "virtio": 15, "net": 31, "ipconfig": 31, "serial": 3, "hostpci": 15}
    if kind[1] not in limit or int(kind[2]) > limit[kind[1]]:
        return None
    return _NUMBERED[kind[1]]


def _matches(pattern: str, words: str = "value does not match the regex pattern") -> Callable[[str], str | None]:
    whole = re.compile(pattern)
    return lambda value: None if whole.fullmatch(value) else words


def _whole(least: int, most: int) -> Callable[[str], str | None]:
    def checker(value: str) -> str | None:
        if not re.fullmatch(r"-?\d+", value):
            return f"type check ('integer') failed - got '{value}'"
        if int(value) < least:
            return f"value must have a minimum value of {least}"
        return None if int(value) <= most else f"value must have a maximum value of {most}"

    return checker


_boolean = _matches(r"[01]|on|off|yes|no|true|false", "type check ('boolean') failed")


def _one_of(*values: str) -> Callable[[str], str | None]:
    return lambda value: (
        None if value in values else f"value '{value}' does not have a value in the enumeration '{', '.join(values)}'"
    )


def _address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _addresses(value: str) -> str | None:
    if all(_address(each) for each in re.split(r"[,; ]+", value)):
        return None
    return "invalid format - value does not look like a valid IP address"


def _drive(value: str, keys: dict[str, str] | None = None) -> str | None:
    volume, properties = drive(value)
    if volume != "none" and not _VOLUME.fullmatch(volume) and not volume.startswith("/"):
        return "invalid format - format error\nfile: invalid format - unable to parse volume ID"
    return _properties(properties, keys or _DRIVE_KEYS)


def _properties(given: dict[str, str], keys: dict[str, str]) -> str | None:
    for key, value in given.items():
        if key not in keys:
            return f"invalid format - format error\n{key}: property is not defined in schema"
        if not re.fullmatch(keys[key], value):
            return f"invalid format - format error\n{key}: value '{value}' can't be"
    return None


def _net(value: str) -> str | None:
    model, *rest = value.split(",")
    if not re.fullmatch(rf"(virtio|e1000|e1000e|rtl8139|vmxnet3)(={_MAC})?", model):
        return "invalid format - format error\nmodel: can't be"
    properties = dict(part.partition("=")[::2] for part in rest)
    return _properties(
        properties, {"bridge": r"[A-Za-z][A-Za-z0-9_.-]*", "tag": r"\d{1,4}", "firewall": "[01]", "mtu": r"\d+"}
    )


def _ipconfig(value: str) -> str | None:
    given = dict(part.partition("=")[::2] for part in value.split(","))
    if set(given) - {"ip", "gw", "ip6", "gw6"}:
        return "invalid format - format error"
    if "gw" in given and not _address(given["gw"]):
        return "invalid format - format error\ngw: not a valid IPv4 address"
    if given.get("ip", "dhcp") != "dhcp":
        try:
            ipaddress.IPv4Interface(given["ip"])
        except ValueError:
            return "invalid format - format error\nip: value does not look like a valid IPv4 address"
        if "/" not in given["ip"]:
            return "invalid format - format error\nip: value does not look like a valid IPv4 network configuration"
    return None


def _hostpci(value: str) -> str | None:
    first, *rest = value.split(",")
    if not re.fullmatch(
        r"(host=)?(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?|mapping=[A-Za-z][A-Za-z0-9_-]+", first
    ):
        return "invalid format - format error"
    return _properties(
        dict(part.partition("=")[::2] for part in rest), {"pcie": "[01]", "rombar": "[01]", "x-vga": "[01]"}
    )


_PLAIN: dict[str, Callable[[str], str | None]] = {
    "name": lambda value: None if _DNS_NAME.fullmatch(value) else "value does not look like a valid DNS name",
    "description": lambda value: None if len(value) <= 8192 else "value may only be 8192 characters long",
    "tags": _matches(r"[a-z0-9_][a-z0-9_.+-]*(?:[;, ][a-z0-9_][a-z0-9_.+-]*)*", "invalid format"),
    "ostype": _one_of("other", "win10", "win11", "l24", "l26", "solaris"),
    "cpu": _matches(r"(cputype=)?[A-Za-z0-9._-]+(,[a-z-]+=\S+)*", "invalid format"),
    "cores": _whole(1, 8192),
    "sockets": _whole(1, 8192),
    "memory": _whole(16, 1 << 40),
    "balloon": _whole(0, 1 << 40),
    "onboot": _boolean,
    "agent": _matches(r"(enabled=)?[01](,[a-z_]+=\w+)*"),
    "scsihw": _one_of("lsi", "lsi53c810", "virtio-scsi-pci", "virtio-scsi-single", "megasas", "pvscsi"),
    "vga": _matches(r"(type=)?(cirrus|qxl|qxl2|std|vmware|serial[0-3]|none|virtio|virtio-gl)(,memory=\d+)?"),
    "ciuser": lambda value: None,
    "cipassword": lambda value: None,
    "ciupgrade": _boolean,
    "citype": _one_of("configdrive2", "nocloud", "opennebula"),
    "cicustom": _matches(r"(meta|network|user|vendor)=[^,]+(,(meta|network|user|vendor)=[^,]+)*"),
    "nameserver": _addresses,
    "searchdomain": lambda value: None,
    "sshkeys": lambda value: None,
    "machine": _matches(r"(type=)?(pc|q35|pc-i440fx-\S+|pc-q35-\S+)"),
    "bios": _one_of("seabios", "ovmf"),
    "boot": _matches(r"(legacy=)?[acdn]{1,4}|order=[a-z]+\d+(;[a-z]+\d+)*"),
    "efidisk0": lambda value: _drive(value, _EFI_KEYS),
    "delete": _matches(r"[a-z]+\d*(,[a-z]+\d*)*"),
}  # fmt: skip
_NUMBERED: dict[str, Callable[[str], str | None]] = {
    "scsi": _drive,
    "ide": _drive,
    "sata": _drive,
    "virtio": _drive,
    "net": _net,
    "ipconfig": _ipconfig,
    "serial": _matches(r"/dev/.+|socket"),
    "hostpci": _hostpci,
}
