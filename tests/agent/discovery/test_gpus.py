from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.discovery.gpus import (
    Device,
    GpuReport,
    carried_over,
    normal_bus_id,
    nvlink_groups,
    parse_driver_version,
    to_gpus,
    warn_about_gpus,
)
from llmgw.agent.discovery.smi_text import parse_devices
from llmgw.cluster.model import Cpu, Gpu, Inventory

from .machines import fixture, write_tree

MACHINE_BYTES = 127600748 * 1024


def gpus_of(name: str, architecture: str = "x86_64", root: Path = Path("/nowhere")) -> tuple[Gpu, ...]:
    return to_gpus(parse_devices(fixture(f"nvidia_smi/{name}")), MACHINE_BYTES, root, architecture)


@pytest.mark.parametrize("name", ["gb10.csv", "n1x.csv"])
def test_unified_memory_is_the_machines_own(name: str) -> None:
    (gpu,) = gpus_of(name, "aarch64")
    assert (gpu.memory_bytes, gpu.memory_shared, gpu.problem) == (MACHINE_BYTES, True, None)


def test_a_gpu_beside_an_arm_processor_keeps_its_own_memory() -> None:
    (gpu,) = gpus_of("gh200.csv", "aarch64")
    assert (gpu.memory_bytes, gpu.memory_shared) == (97871 << 20, False)


def test_a_discrete_card_that_keeps_its_memory_to_itself_is_not_given_the_machines() -> None:
    (gpu,) = gpus_of("memory_not_said.csv")
    assert (gpu.memory_bytes, gpu.memory_shared) == (None, False)
    assert warn_about_gpus((gpu,)) == ("the driver does not say how much memory GPU 0 has",)


def test_seven_of_eight_gpus_stay_usable() -> None:
    gpus = gpus_of("lost_gpu_3_cells.csv")
    assert sum(gpu.problem is None for gpu in gpus) == 7
    (warning,) = warn_about_gpus(gpus)
    assert warning.startswith("GPU 3 (NVIDIA H100 80GB HBM3, GPU-5c1d7a30")
    assert warning.endswith(": GPU is lost")


def test_numa_node_by_bus_id(tmp_path: Path) -> None:
    write_tree(tmp_path / "sys/bus/pci/devices", {"0000:9a:00.0/numa_node": "1\n", "0000:18:00.0/numa_node": "-1\n"})
    gpus = gpus_of("h100x8.csv", root=tmp_path)
    assert (gpus[4].numa_node, gpus[0].numa_node, gpus[1].numa_node) == (1, None, None)


def test_mig_mode_without_instances_is_a_problem_of_that_gpu_alone() -> None:
    sliced, whole = gpus_of("mig.csv")
    assert sliced.problem is not None
    assert "no instances" in sliced.problem
    assert whole.problem is None


@pytest.mark.parametrize(
    ("peers", "groups"),
    [
        ({0: [1], 1: [0], 2: [], 3: []}, {0: 0, 1: 0}),
        ({0: [3], 1: [2], 2: [1], 3: [0]}, {0: 0, 3: 0, 1: 1, 2: 1}),
        ({0: [1], 1: [2], 2: []}, {0: 0, 1: 0, 2: 0}),
        ({0: [], 1: [9]}, {}),
    ],
)
def test_nvlink_groups(peers: dict[int, list[int]], groups: dict[int, int]) -> None:
    assert nvlink_groups(peers) == groups


@given(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 12), max_size=4)))
def test_each_nvlink_group_has_at_least_two_members_and_holds_every_peer(peers: dict[int, list[int]]) -> None:
    groups = nvlink_groups(
        {one: {*others, *(two for two in peers if one in peers[two])} for one, others in peers.items()}
    )
    assert all(list(groups.values()).count(number) > 1 for number in groups.values())
    assert sorted(set(groups.values())) == list(range(len(set(groups.values()))))
    for one, others in peers.items():
        assert all(groups[one] == groups[two] for two in others if two in peers and two != one)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("00000000:4F:00.0", "0000:4f:00.0"),
        ("0000000F:01:00.0", "000f:01:00.0"),
        ("0000:02:00.0", "0000:02:00.0"),
        ("[N/A]", None),
        ("", None),
    ],
)
def test_bus_ids_as_the_kernel_writes_them(text: str, normal: str | None) -> None:
    assert normal_bus_id(text) == normal


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build", "570.124.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.142  Release Build", "580.142"),
        ("", None),
    ],
)
def test_version_of_the_loaded_kernel_module(text: str, version: str | None) -> None:
    assert parse_driver_version(text) == version


def test_gpus_that_stop_answering_are_kept_as_not_usable() -> None:
    known = gpus_of("lost_gpu_3_cells.csv")
    cpu = Cpu(model="x", architecture="x86_64", cores=1)
    before = Inventory(
        hostname="n",
        os="o",
        kernel="k",
        libc="l",
        cpu=cpu,
        memory_bytes=1,
        mgmt_addr="a",
        gpus=known,
        gpu_source="nvml",
    )
    before = replace(before, gpu_source="nvml")
    report = carried_over(GpuReport(gpus=None, warnings=("hung",)), before)
    assert report.gpus is not None
    assert [gpu.uuid for gpu in report.gpus] == [gpu.uuid for gpu in known]
    assert report.gpus[0].problem == "the driver did not answer the last probe"
    assert report.gpus[3].problem == "GPU is lost"
    assert (report.source, report.warnings) == ("nvml", ("hung",))
    # A second silent minute says the same, so that nothing new is sent.
    assert carried_over(GpuReport(gpus=None), replace(before, gpus=report.gpus)).gpus == report.gpus
    # Cards that were taken out are gone.
    assert carried_over(GpuReport(gpus=()), before).gpus == ()


@given(st.text(), st.text(), st.integers(min_value=1))
def test_no_text_raises(name: str, version: str, size: int) -> None:
    normal_bus_id(name)
    parse_driver_version(version)
    (gpu,) = to_gpus((Device(index=0, uuid="GPU-1", name=name, memory_bytes=None),), size, Path("/nowhere"), "x86_64")
    assert gpu.memory_bytes in (None, size)
