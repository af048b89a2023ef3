"""PCI devices that are passed through to a machine: with all that shares their IOMMU group, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
_BRIDGE = 0x0604


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    address: str
    """``0000:41:00.0``."""
    kind: int
    """Class and subclass: 0x0300 is a VGA controller, 0x0302 a 3D controller, 0x0604 a bridge."""
    group: int | None
    """Its IOMMU group; None where there is none."""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.address} ({self.name})" if self.name else self.address


def read_pci_devices(sysfs: Path = SYSFS) -> Sequence[PciDevice]:
    """The devices of this host, sorted by address."""
    devices = []
    for folder in sorted((sysfs / "bus/pci/devices").glob("*")):
        try:
            kind = int((folder / "class").read_text(), 16) >> 8
        except (OSError, ValueError):
            continue
        group = folder / "iommu_group"
        number = int(group.resolve().name) if group.exists() else None
        devices.append(PciDevice(address=folder.name, kind=kind, group=number))
    return devices


def refusal(wanted: Sequence[str], devices: Sequence[PciDevice]) -> str | None:
    """Why these can't be passed through; None where they can."""
    passed: dict[str, PciDevice] = {}
    for address in wanted:
        found = [device for device in devices if _is(device.address, address)]
        if not found:
            return f"there is no PCI device {address} on this host: `lspci -D` shows those that are"
        for device in found:
            if device.group is None:
                return (
                    f"{device} is in no IOMMU group: the IOMMU is off. Switch on VT-d or AMD-Vi in the firmware (and, "
                    "on Intel, `intel_iommu=on` on the kernel's command line), and start the host anew"
                )
            passed[device.address] = device
    groups = {device.group for device in passed.values()}
    left = [
        device
        for device in devices
        if device.group in groups and device.address not in passed and device.kind != _BRIDGE
    ]
    if left:
        names = ", ".join(str(device) for device in left)
        return (
            f"IOMMU group {left[0].group} holds {names}, too, and a group is passed through whole: name them as well, "
            "or move the card to another slot"
        )
    return None


def _is(address: str, wanted: str) -> bool:
    """Without a function, a device means all of its functions."""
    return address == wanted or ("." not in wanted and address.partition(".")[0] == wanted)
