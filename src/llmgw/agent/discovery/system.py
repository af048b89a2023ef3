"""The operating system, and what tells this machine and this boot apart from others."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.discovery.files import names_in, read_text

_ASSIGNMENT = re.compile(r"\s*([A-Z][A-Z0-9_]*)=(.*)")
_MACHINE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OsRelease:
    """Fields of os-release(5). Unknown ones are "unknown" (``pretty``) or empty."""

    pretty: str = "unknown"
    id: str = ""
    id_like: tuple[str, ...] = ()
    version_id: str = ""

    @property
    def has_apt(self) -> bool:
        return not {"debian", "ubuntu"}.isdisjoint((self.id, *self.id_like))


def parse_os_release(text: str) -> OsRelease:
    fields = {
        match[1]: _unquote(match[2].strip()) for line in text.splitlines() if (match := _ASSIGNMENT.fullmatch(line))
    }
    named = " ".join(part for part in (fields.get("NAME", ""), fields.get("VERSION_ID", "")) if part)
    return OsRelease(
        pretty=fields.get("PRETTY_NAME") or named or "unknown",
        id=fields.get("ID", ""),
        id_like=tuple(fields.get("ID_LIKE", "").split()),
        version_id=fields.get("VERSION_ID", ""),
    )


def read_os_release(root: Path) -> OsRelease:
    return parse_os_release(read_text(root / "etc/os-release") or read_text(root / "usr/lib/os-release") or "")


def read_libc(root: Path) -> str:
    """Such as "glibc 2.36" or "musl 1.2.5"."""
    if any(name.startswith("ld-musl-") for name in names_in(root / "lib")):
        return f"musl {_apk_version(read_text(root / 'lib/apk/db/installed') or '', 'musl')}".strip()
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (ValueError, OSError):
        return "unknown"


def read_kernel(root: Path) -> str:
    return read_text(root / "proc/sys/kernel/osrelease") or os.uname().release


def read_hostname(root: Path) -> str:
    return read_text(root / "proc/sys/kernel/hostname") or socket.gethostname()


def boot_id(root: Path = Path("/")) -> str:
    """The same until the machine boots again; "unknown" where the kernel does not say."""
    if identity := read_text(root / "proc/sys/kernel/random/boot_id"):
        return identity
    booted = re.search(r"^btime ([0-9]+)$", read_text(root / "proc/stat") or "", re.MULTILINE)
    return f"booted-at-{booted[1]}" if booted else "unknown"


def machine_fingerprint(root: Path = Path("/")) -> str:
    """64 hex digits that stay the same over boots and differ between machines; the machine-id itself is not told."""
    return _identity(root)[0]


def warn_about_identity(root: Path) -> tuple[str, ...]:
    """What to do where the machine can't be told from others by its machine-id."""
    source = _identity(root)[1]
    if source == "machine-id":
        return ()
    return (
        f"no machine-id in /etc/machine-id: this machine is told from others by its {source} instead; "
        "run systemd-machine-id-setup (or: dbus-uuidgen --ensure=/etc/machine-id), then restart the agent",
    )


def _identity(root: Path) -> tuple[str, str]:
    for path in ("etc/machine-id", "var/lib/dbus/machine-id"):
        text = (read_text(root / path) or "").lower()
        # systemd writes "uninitialized" into images that have not booted yet.
        if _MACHINE_ID.fullmatch(text) and text.strip("0"):
            return _salted(text), "machine-id"
    if product := read_text(root / "sys/class/dmi/id/product_uuid"):
        return _salted(product.lower()), "DMI product UUID"
    if addresses := _hardware_addresses(root):
        return _salted(" ".join(addresses)), "network adapters' addresses"
    return _salted(f"{read_hostname(root)} {boot_id(root)}"), "hostname and boot"


def _salted(text: str) -> str:
    return hashlib.sha256(f"llmgw{text}".encode()).hexdigest()


def _hardware_addresses(root: Path) -> list[str]:
    """Of adapters that are hardware (they have a device): bridges and tunnels come and go."""
    net = root / "sys/class/net"
    hardware = (net / name for name in names_in(net) if (net / name / "device").exists())
    return sorted(address for folder in hardware if (address := read_text(folder / "address")))


def _apk_version(database: str, package: str) -> str:
    for block in database.split("\n\n"):
        fields = dict(line.split(":", 1) for line in block.splitlines() if ":" in line)
        if fields.get("P") == package:
            return fields.get("V", "").partition("-r")[0]
    return ""


def _unquote(value: str) -> str:
    """Undoes shell quoting as os-release(5) allows it: one pair of quotes, and backslashes."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        quote, value = value[0], value[1:-1]
        return value if quote == "'" else re.sub(r'\\([\\"$`])', r"\1", value)
    return value
