from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.discovery.cgroups import Limits
from llmgw.agent.discovery.cpu import parse_cpu_list, parse_cpuinfo, read_cpu, warn_about_cpu

from .machines import fixture, write_machine, write_tree


@pytest.mark.parametrize(
    ("name", "model", "processors"),
    [
        ("epyc_9354", "AMD EPYC 9354 32-Core Processor", 64),
        ("xeon_e5_2670", "Intel(R) Xeon(R) CPU E5-2670 0 @ 2.60GHz", 16),
        ("kvm64", "Common KVM processor", 4),
        ("qemu_v2", "QEMU Virtual CPU version 2.5+", 2),
        ("neoverse_n1", "Arm Neoverse-N1", 4),
        ("grace", "Arm Neoverse-V2", 72),
        ("gb10", "Arm Cortex-A725 + Arm Cortex-X925", 20),
        ("power9", "POWER9, altivec supported", 1),
    ],
)
def test_model_and_count(name: str, model: str, processors: int) -> None:
    info = parse_cpuinfo(fixture(f"cpuinfo/{name}"))
    assert (info.model, info.processors) == (model, processors)


def test_extensions_are_those_engines_care_about(tmp_path: Path) -> None:
    cpu, warnings = read_cpu(write_machine(tmp_path), Limits())
    assert cpu.architecture == "x86_64"
    assert {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16"} <= set(cpu.extensions)
    assert "pae" not in cpu.extensions
    assert warnings == ()


def test_extensions_of_arm(tmp_path: Path) -> None:
    cpu, warnings = read_cpu(write_machine(tmp_path, cpu="grace"), Limits())
    assert (cpu.architecture, cpu.cores) == ("aarch64", 72)
    assert cpu.extensions == ("asimd", "fphp", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2")
    assert warnings == ()


@pytest.mark.parametrize("name", ["kvm64", "qemu_v2"])
def test_a_virtual_processor_without_avx2_is_warned_about_with_the_setting_to_change(name: str, tmp_path: Path) -> None:
    (warning,) = read_cpu(write_machine(tmp_path, cpu=name), Limits())[1]
    assert warning.startswith("no AVX2: ")
    assert "five times slower" in warning
    assert 'set its CPU type to "host"' in warning
    assert "qm set VMID --cpu host" in warning


def test_a_real_processor_without_avx2_is_warned_about_without_a_setting(tmp_path: Path) -> None:
    (warning,) = read_cpu(write_machine(tmp_path, cpu="xeon_e5_2670"), Limits())[1]
    assert warning.startswith("no AVX2: Intel(R) Xeon(R) CPU E5-2670 0 @ 2.60GHz runs models")
    assert "five times slower" in warning
    assert "host" not in warning


def test_flags_that_can_not_be_read_are_no_warning() -> None:
    assert warn_about_cpu(parse_cpuinfo("model name : something"), "x86_64") == ()


def test_only_what_every_processor_has_counts() -> None:
    mixed = "processor : 0\nflags : avx avx2 avx512f\n\nprocessor : 1\nflags : avx avx2\n"
    assert parse_cpuinfo(mixed).flags == {"avx", "avx2"}


def test_cores_are_those_that_may_be_used(tmp_path: Path) -> None:
    root = write_machine(tmp_path)
    assert read_cpu(root, Limits())[0].cores == 64
    assert read_cpu(root, Limits(cpus=2.5))[0].cores == 2
    assert read_cpu(root, Limits(cpus=0.2))[0].cores == 1
    write_tree(root, {"proc/self/status": "Name:\tllmgw\nCpus_allowed_list:\t0-7,32-35\n"})
    assert read_cpu(root, Limits())[0].cores == 12


def test_a_machine_that_says_nothing_still_has_cores(tmp_path: Path) -> None:
    cpu, warnings = read_cpu(tmp_path, Limits())
    assert (cpu.model, cpu.extensions, warnings) == ("unknown", (), ())
    assert cpu.cores >= 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 1), ("0-3", 4), ("0-1,4,6-7\n", 5), ("", None), ("a-b", None), ("3-1", None), ("0-", None)],
)
def test_cpu_lists(text: str, count: int | None) -> None:
    assert parse_cpu_list(text) == count


_LINES = st.sampled_from(["processor : 0", "flags :", "flags : avx2", "CPU implementer : 0x41", "CPU part :", "", ":"])


@given(st.text() | st.lists(_LINES).map("\n".join))
def test_no_text_raises(text: str) -> None:
    info = parse_cpuinfo(text)
    assert info.model
    assert info.processors >= 0
    warn_about_cpu(info, "x86_64")
    assert parse_cpu_list(text) is None or text.strip()
