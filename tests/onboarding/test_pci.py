"""Devices that are passed through: whole IOMMU groups, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.onboarding.pci import read_pci_devices, refusal
from llmgw.onboarding.proxmox import ProxmoxError
from tests.onboarding.provisioning import TOKENS, over_api, site


def device(sysfs: Path, address: str, kind: str, group: int | None) -> None:
    folder = sysfs / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "class").write_text(f"{kind}\n")
    if group is not None:
        (sysfs / f"kernel/iommu_groups/{group}").mkdir(parents=True, exist_ok=True)
        (folder / "iommu_group").symlink_to(sysfs / f"kernel/iommu_groups/{group}")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    root = tmp_path / "sys"
    device(root, "0000:40:01.0", "0x060400", 14)  # The bridge above: it stays.
    device(root, "0000:41:00.0", "0x030000", 14)
    device(root, "0000:41:00.1", "0x040300", 14)
    device(root, "0000:c1:00.0", "0x030200", 20)
    device(root, "0000:c2:00.0", "0x010802", 21)
    device(root, "0000:c3:00.0", "0x020000", 21)
    device(root, "0000:d1:00.0", "0x030200", None)
    return root


def test_a_whole_group_is_passed(sysfs: Path) -> None:
    devices = read_pci_devices(sysfs)
    assert refusal(("0000:41:00",), devices) is None
    assert refusal(("0000:41:00.0", "0000:41:00.1"), devices) is None
    assert refusal(("0000:c1:00.0",), devices) is None


def test_what_else_is_in_a_group_is_named(sysfs: Path) -> None:
    devices = read_pci_devices(sysfs)
    words = refusal(("0000:41:00.0",), devices)
    assert words is not None
    assert "IOMMU group 14 holds 0000:41:00.1, too" in words
    words = refusal(("0000:c2:00.0",), devices)
    assert words is not None
    assert "IOMMU group 21 holds 0000:c3:00.0, too" in words


def test_no_iommu_and_no_device(sysfs: Path) -> None:
    devices = read_pci_devices(sysfs)
    assert "the IOMMU is off" in (refusal(("0000:d1:00.0",), devices) or "")
    assert "there is no PCI device 0000:99:00.0" in (refusal(("0000:99:00.0",), devices) or "")


async def test_by_the_api_devices_are_passed_by_their_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = {"id": "gpu0", "map": ["id=10de:2230,iommugroup=20,node=pve1,path=0000:c1:00.0"]}
    rows = [{"id": "0000:c1:00.0", "class": "0x030200", "iommugroup": 20, "device_name": "GA102GL"}]
    at = site(tmp_path, monkeypatch, mappings=[mapping], pci=rows, tokens=TOKENS)
    async with over_api(at) as proxmox, proxmox:
        assert refusal(("0000:c1:00.0",), await proxmox.pci_devices()) is None
        assert await proxmox.pass_through(("0000:c1:00.0",)) == {"hostpci0": "mapping=gpu0,pcie=1"}
        with pytest.raises(ProxmoxError, match="no mapping of pve1 names it"):
            await proxmox.pass_through(("0000:41:00.0",))
