"""The readers of GPUs against real programs and a real library with NVML's entry points."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llmgw.agent.discovery.gpus import GpuReport
from llmgw.agent.discovery.nvidia import find_gpus
from llmgw.agent.discovery.nvml import NvmlUnreadable, parse_answer
from llmgw.agent.discovery.probe import Output
from llmgw.agent.discovery.settings import DiscoverySettings

from .machines import FIXTURES, write_nvidia_smi, write_script, write_tree

MEMORY_BYTES = 128 << 30
LOADED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Tue Mar  5 22:23:56 UTC 2024\n"
QUERY = "--query-gpu=index,uuid,name,memory.total,driver_version*"
CORE_QUERY = "--query-gpu=index,uuid,name,memory.total\\ *"


async def look(tmp_path: Path, smi: str | None, *, nvml: bool = False, limit_s: float = 10.0) -> GpuReport:
    settings = DiscoverySettings(nvidia_smi=smi, prefer_nvml=nvml, root=tmp_path, probe_limit_s=limit_s)
    return await find_gpus(settings, MEMORY_BYTES, "x86_64")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or pytest.skip("no C compiler to build a library with NVML's entry points")
    folder = tmp_path_factory.mktemp("nvml")
    source, library = FIXTURES / "nvml/nvml.c", folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return folder


@pytest.fixture
def nvml(nvml_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with a loaded driver; set NVML_MACHINE to choose which."""
    write_tree(tmp_path, {"proc/driver/nvidia/version": LOADED})
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    return monkeypatch


async def test_a_machine_without_nvidia_smi_has_no_cards_and_no_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await look(tmp_path, None, nvml=True) == GpuReport()
    assert await look(tmp_path, "", nvml=True) == GpuReport()


async def test_nvidia_smi_is_found_on_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tmp_path, {"*": (0, "h100x8.csv")})
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for stated in (None, "", "nvidia-smi"):
        report = await look(tmp_path, stated)
        assert report.gpus is not None
        assert (len(report.gpus), report.source, report.driver) == (8, "nvidia-smi", "570.124.06")
        assert report.warnings == ()


async def test_a_stated_nvidia_smi_that_is_not_there_is_said(tmp_path: Path) -> None:
    report = await look(tmp_path, "/opt/driver/nvidia-smi")
    assert report.gpus is None
    (warning,) = report.warnings
    assert "discovery.nvidia_smi names /opt/driver/nvidia-smi" in warning
    assert "No such file" in warning


async def test_a_card_without_any_driver_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    write_tree(
        tmp_path / "sys/bus/pci/devices",
        {
            "0000:4f:00.0/vendor": "0x10de\n",
            "0000:4f:00.0/class": "0x030200\n",
            "0000:4f:00.1/vendor": "0x10de\n",
            "0000:4f:00.1/class": "0x040300\n",
        },
    )
    report = await look(tmp_path, None)
    assert report.gpus == ()
    assert report.warnings == (
        "NVIDIA card in this machine (0000:4f:00.0), but no NVIDIA driver: install one to use it",
    )


async def test_an_old_driver_is_asked_again_for_the_core_fields(tmp_path: Path) -> None:
    smi = write_nvidia_smi(tmp_path, {QUERY: (2, "old_driver_rc2.txt"), CORE_QUERY: (0, "old_driver_core.csv")})
    report = await look(tmp_path, smi)
    assert report.gpus is not None
    assert [gpu.name for gpu in report.gpus] == ["Tesla K80", "Tesla K80"]
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("status", "name", "words"),
    [
        (4, "rc4.txt", "as root"),
        (6, "rc6.txt", "in a container, start that with the GPUs (`--gpus all`"),
        (9, "rc9.txt", "modprobe nvidia"),
        (12, "rc12.txt", "user libraries"),
        (18, "rc18.txt", "reboot"),
        (255, "rc255.txt", "restart the container, with `--gpus all` and the nvidia-container-toolkit"),
        (0, "garbage.bin", "ended with status 0"),
        (9, "h100x8_core_fields.csv", None),
    ],
)
async def test_what_fails_is_a_warning_and_never_a_gpu(
    tmp_path: Path, status: int, name: str, words: str | None
) -> None:
    report = await look(tmp_path, write_nvidia_smi(tmp_path, {"*": (status, name)}))
    if words is None:  # rows that are GPUs count under any status, and the status is told
        assert report.gpus is not None
        assert len(report.gpus) == 8
        assert "not loaded" in report.warnings[0]
        return
    assert report.gpus is None
    (warning,) = report.warnings
    assert words in warning


async def test_data_under_a_corrupt_inforom_counts_and_is_warned_about(tmp_path: Path) -> None:
    report = await look(tmp_path, write_nvidia_smi(tmp_path, {"*": (14, "infocorrupt.csv")}))
    assert report.gpus is not None
    assert len(report.gpus) == 2
    assert report.warnings == ("nvidia-smi: the GPU's infoROM is corrupted: the card may need service",)


async def test_seven_of_eight_gpus_are_found_when_one_has_no_handle(tmp_path: Path) -> None:
    """The whole query fails then: it is asked again for the others, whose bus ids the kernel module lists."""
    buses = ["18", "2a", "3a", "5d", "9a", "ab", "ba", "db"]
    write_tree(
        tmp_path / "proc/driver/nvidia/gpus",
        {
            f"0000:{bus}:00.0/information": f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-5c1d7a{n}0-33f1\n"
            for n, bus in enumerate(buses)
        },
    )
    lines = (FIXTURES / "nvidia_smi/h100x8.csv").read_text().splitlines()
    (tmp_path / "others.csv").write_text("\n".join(line for line in lines if "5D:00.0" not in line) + "\n")
    lost = FIXTURES / "nvidia_smi/lost_gpu_no_handle.txt"
    others = ",".join(f"0000:{bus}:00.0" for bus in buses if bus != "5d")
    body = f'case "$*" in --id={others}\\ *) cat {tmp_path}/others.csv; exit 0;; esac; cat {lost}; exit 15'
    report = await look(tmp_path, write_script(tmp_path / "nvidia-smi", body))
    assert report.gpus is not None
    assert [gpu.index for gpu in report.gpus if gpu.problem is None] == [0, 1, 2, 4, 5, 6, 7]
    lost_gpu = report.gpus[3]
    assert (lost_gpu.uuid, lost_gpu.name) == ("GPU-5c1d7a30-33f1", "NVIDIA H100 80GB HBM3")
    assert report.warnings == (
        "GPU 3 (NVIDIA H100 80GB HBM3, GPU-5c1d7a30-33f1): GPU is lost. Reboot the system to recover this GPU",
    )


async def test_mig_instances_take_the_place_of_their_gpu(tmp_path: Path) -> None:
    smi = write_nvidia_smi(tmp_path, {"-L": (0, "mig_L.txt"), "*": (0, "mig.csv")})
    report = await look(tmp_path, smi)
    assert report.gpus is not None
    assert [gpu.index for gpu in report.gpus] == [*range(100, 107), 1]
    assert report.gpus[0].name == "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    assert report.gpus[0].uuid.startswith("MIG-")
    assert report.gpus[0].memory_bytes is None
    assert report.warnings == ()


@pytest.mark.parametrize("nvml_first", [True, False])
async def test_a_hung_driver_is_given_up_in_time(tmp_path: Path, nvml_first: bool) -> None:
    smi = write_script(tmp_path / "nvidia-smi", "exec sleep 60")
    report = await look(tmp_path, smi, nvml=nvml_first, limit_s=0.5)
    assert report.gpus is None
    assert any("probe hung" in warning for warning in report.warnings)


async def test_nvml_gives_memory_and_nvlink_groups(nvml: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.setenv("NVML_MACHINE", "h100x8")
    report = await look(tmp_path, "/nowhere/nvidia-smi", nvml=True)
    assert report.gpus is not None
    assert (report.source, report.driver, report.warnings) == ("nvml", "570.124.06", ())
    assert [gpu.nvlink_group for gpu in report.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {gpu.memory_bytes for gpu in report.gpus} == {81559 << 20}


async def test_nvml_is_enough_where_there_is_no_nvidia_smi(nvml: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.setenv("NVML_MACHINE", "gb10")
    nvml.setenv("PATH", str(tmp_path))
    report = await look(tmp_path, None, nvml=False)
    assert report.gpus is not None
    (gpu,) = report.gpus
    assert (gpu.name, gpu.memory_bytes, gpu.memory_shared) == ("NVIDIA GB10", MEMORY_BYTES, True)


async def test_nvml_with_one_lost_gpu(nvml: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.setenv("NVML_MACHINE", "lost")
    report = await look(tmp_path, None, nvml=True)
    assert report.gpus is not None
    assert [gpu.index for gpu in report.gpus if gpu.problem is None] == [0, 1, 2, 4, 5, 6, 7]
    assert report.gpus[3].problem == "GPU is lost"


async def test_nvml_with_mig_instances(nvml: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.setenv("NVML_MACHINE", "mig")
    report = await look(tmp_path, None, nvml=True)
    assert report.gpus is not None
    assert [(gpu.index, gpu.memory_bytes) for gpu in report.gpus] == [
        (100, 9856 << 20),
        (101, 9856 << 20),
        (102, 9856 << 20),
        (1, 81559 << 20),
    ]
    assert report.gpus[0].name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


async def test_a_hung_nvml_is_given_up_and_nvidia_smi_not_hung_after_it(
    nvml: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml.setenv("NVML_MACHINE", "hang")
    started = tmp_path / "started"
    smi = write_script(tmp_path / "nvidia-smi", f"touch {started}; exec sleep 60")
    report = await look(tmp_path, smi, nvml=True, limit_s=1.0)
    assert report.gpus is None
    assert any("probe hung" in warning for warning in report.warnings)
    assert not started.exists()


async def test_falling_back_from_nvml_is_said_with_what_it_costs(nvml: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.setenv("NVML_MACHINE", "mismatch")
    report = await look(tmp_path, write_nvidia_smi(tmp_path, {"*": (0, "h100x8.csv")}), nvml=True)
    assert report.gpus is not None
    assert (len(report.gpus), report.source) == (8, "nvidia-smi")
    (warning,) = report.warnings
    assert warning.startswith("NVML can't be read (")
    assert warning.endswith("): nvidia-smi used instead; which GPUs NVLink joins is not known")


async def test_nvidia_smi_tells_which_gpus_nvlink_joins(nvml: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.setenv("NVML_MACHINE", "mismatch")
    smi = write_nvidia_smi(tmp_path, {"topo\\ -m": (0, "../topo/h100x8.txt"), "*": (0, "h100x8.csv")})
    report = await look(tmp_path, smi, nvml=True)
    assert report.gpus is not None
    assert [gpu.nvlink_group for gpu in report.gpus] == [0] * 8
    assert [gpu.numa_node for gpu in report.gpus] == [0] * 4 + [1] * 4
    (warning,) = report.warnings
    assert warning.endswith("): nvidia-smi used instead")


async def test_what_the_kernel_says_of_a_gpus_numa_node_comes_before_the_drivers_word(tmp_path: Path) -> None:
    write_tree(tmp_path / "sys/bus/pci/devices", {"0000:18:00.0/numa_node": "3\n", "0000:2a:00.0/numa_node": "-1\n"})
    smi = write_nvidia_smi(tmp_path, {"topo\\ -m": (0, "../topo/h100x8.txt"), "*": (0, "h100x8.csv")})
    report = await look(tmp_path, smi)
    assert report.gpus is not None
    assert [gpu.numa_node for gpu in report.gpus] == [3, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo 'Failed to run topology matrix'; exit 255", "Failed to run topology matrix"),
        ("exec sleep 60", "nvidia-smi did not end in time"),
    ],
)
async def test_gpus_are_found_though_nobody_tells_how_they_are_joined(tmp_path: Path, answer: str, words: str) -> None:
    body = f'case "$*" in topo*) {answer};; esac; cat {FIXTURES / "nvidia_smi/h100x8.csv"}'
    report = await look(tmp_path, write_script(tmp_path / "nvidia-smi", body), limit_s=1.5)
    assert report.gpus is not None
    assert [gpu.nvlink_group for gpu in report.gpus] == [None] * 8
    (warning,) = report.warnings
    assert warning.startswith("how the GPUs are joined is not known: ")
    assert words in warning


async def test_a_lone_gpu_is_not_asked_about_its_links(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    body = f'case "$*" in topo*) touch {asked};; esac; cat {FIXTURES / "nvidia_smi/gh200.csv"}'
    report = await look(tmp_path, write_script(tmp_path / "nvidia-smi", body))
    assert report.gpus is not None
    assert len(report.gpus) == 1
    assert not asked.exists()


async def test_a_mismatch_that_both_see_is_said_once(nvml: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.setenv("NVML_MACHINE", "mismatch")
    report = await look(tmp_path, write_nvidia_smi(tmp_path, {"*": (18, "rc18.txt")}), nvml=True)
    assert report.gpus is None
    assert len(report.warnings) == 1


@pytest.mark.parametrize(
    ("machine", "status", "name", "words"),
    [
        ("none", 6, "rc6.txt", "start that with the GPUs (`--gpus all`"),
        ("unopened", 255, "rc255.txt", "restart the container, with `--gpus all`"),
    ],
)
async def test_a_container_without_its_devices_is_told_so_once(
    nvml: pytest.MonkeyPatch, tmp_path: Path, machine: str, status: int, name: str, words: str
) -> None:
    """NVML begins well where only the devices of the GPUs are missing, and counts none: that is no empty machine."""
    nvml.setenv("NVML_MACHINE", machine)
    report = await look(tmp_path, write_nvidia_smi(tmp_path, {"*": (status, name)}), nvml=True)
    assert report.gpus is None
    (warning,) = report.warnings
    assert words in warning


async def test_nvml_that_counts_no_gpu_is_no_empty_machine(nvml: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml.setenv("NVML_MACHINE", "none")
    nvml.setenv("PATH", str(tmp_path))
    report = await look(tmp_path, None, nvml=True)
    assert report.gpus is None
    (warning,) = report.warnings
    assert "start that with the GPUs (`--gpus all`" in warning


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", "{}", '{"devices": 3}', '{"error": 9, "words": "Driver Not Loaded"}', "[" * 100_000],
)
def test_an_answer_of_nvmls_child_that_is_none(text: str) -> None:
    with pytest.raises(NvmlUnreadable):
        parse_answer(Output(0, text, ""))


def test_odd_devices_in_an_answer_are_passed_over() -> None:
    text = '{"driver": 5, "devices": [3, {"index": "0"}, {"index": 1, "memory_bytes": 0, "instances": [7, {}]}]}'
    answer = parse_answer(Output(0, text, ""))
    (device,) = answer.devices
    assert (device.index, device.uuid, device.memory_bytes, answer.driver) == (1, "unknown-1", None, None)
    assert device.problem is not None
