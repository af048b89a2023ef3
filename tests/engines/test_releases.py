"""Which archive a machine gets, from listings of every time in which they were named differently."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llmgw.cluster.model import Gpu, Inventory
from llmgw.engines.releases import NoBuild, choose, cuda_of

from .test_builds import machine

LISTINGS = Path(__file__).parent / "releases"
GPU = Gpu(index=0, uuid="GPU-1", name="H200", memory_bytes=1 << 37)


def names(tag: str) -> tuple[str, ...]:
    return tuple(asset["name"] for asset in json.loads((LISTINGS / f"{tag}.json").read_text())["assets"])


def with_gpu(driver: str = "580.95.05", libc: str = "glibc 2.39", problem: str | None = None, **cpu: Any) -> Inventory:
    gpu = dataclasses.replace(GPU, problem=problem)
    return dataclasses.replace(machine(libc=libc, **cpu), driver=driver, gpus=(gpu,))


def chosen(tag: str, inventory: Inventory, **build: Any) -> tuple[str, tuple[str, ...]]:
    choice = choose("llamacpp", tag, names(tag), inventory, **build)
    return choice.variant, choice.names


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("b5200", "llama-b5200-bin-ubuntu-x64.zip"),
        ("b6900", "llama-b6900-bin-ubuntu-x64.zip"),
        ("b9100", "llama-b9100-bin-ubuntu-x64.tar.gz"),
        ("b11434", "llama-b11434-bin-ubuntu-x64.tar.gz"),
    ],
)
def test_a_plain_machine_gets_the_plain_archive_of_every_time(tag: str, name: str) -> None:
    assert chosen(tag, machine()) == ("cpu-x86_64", (name,))


def test_other_processors() -> None:
    arm = machine(libc="glibc 2.41", architecture="aarch64")
    assert chosen("b11434", arm) == ("cpu-aarch64", ("llama-b11434-bin-ubuntu-arm64.tar.gz",))
    assert chosen("b5200", arm)[1] == ("llama-b5200-bin-ubuntu-arm64.zip",)
    mainframe = machine(libc="glibc 2.41", architecture="s390x")
    assert chosen("b9100", mainframe)[1] == ("llama-b9100-bin-ubuntu-s390x.tar.gz",)


@pytest.mark.parametrize(
    ("driver", "cuda"), [("570.124.06", "12.8"), ("525.60.13", "12.8"), ("580.95.05", "13.4"), ("610.1", "13.4")]
)
def test_with_a_gpu_it_is_the_newest_cuda_that_the_driver_runs_with_its_runtime(driver: str, cuda: str) -> None:
    variant, archives = chosen("b11434", with_gpu(driver))
    assert variant == f"cuda-{cuda}-x86_64"
    assert archives == (
        f"llama-b11434-bin-ubuntu-cuda-{cuda}-x64.tar.gz",
        f"cudart-llama-b11434-bin-ubuntu-cuda-{cuda}-x64.tar.gz",
    )


def test_an_arm_machine_with_a_gpu() -> None:
    assert chosen("b11434", with_gpu(architecture="aarch64"))[0] == "cuda-13.4-aarch64"


@pytest.mark.parametrize("inventory", [dataclasses.replace(machine(), driver="580.1"), with_gpu(problem="GPU is lost")])
def test_a_driver_with_no_usable_gpu_is_no_gpu(inventory: Inventory) -> None:
    assert chosen("b11434", inventory)[0] == "cpu-x86_64"


def test_the_file_knows_better() -> None:
    assert chosen("b11434", with_gpu(libc="glibc 2.36"), build="cpu")[0] == "cpu-x86_64"
    idle = dataclasses.replace(machine(libc="glibc 2.39"), driver="580.1")
    assert chosen("b11434", idle, build="cuda")[0] == "cuda-13.4-x86_64"


@pytest.mark.parametrize(
    ("tag", "inventory", "build", "words"),
    [
        (
            "b11434",
            with_gpu(libc="glibc 2.36"),
            None,
            "is built for glibc 2.39 or newer, and this machine has glibc 2.36",
        ),
        ("b11434", machine(libc="glibc 2.31"), None, "(llama-b11434-bin-ubuntu-x64.tar.gz) is built for glibc 2.35"),
        ("b11434", machine(libc="musl 1.2"), None, "and this machine has musl 1.2"),
        ("b11434", machine(libc=""), None, "and this machine has none"),
        (
            "b11434",
            with_gpu("470.1"),
            None,
            "is built for CUDA 12.8 and 13.4, and this machine's NVIDIA driver 470.1 runs",
        ),
        ("b11434", with_gpu("390.1"), None, "driver 390.1 is too old for any CUDA that is still built for"),
        ("b9100", with_gpu(), None, "has no archive with CUDA for Linux on x86_64, and this machine has NVIDIA GPUs"),
        ("b9100", dataclasses.replace(machine(), driver="580"), "cuda", "and `build: cuda` asks for one"),
        ("b11434", machine(), "cuda", "needs an NVIDIA driver, and this machine has none loaded"),
        (
            "b11434",
            machine(architecture="riscv64"),
            None,
            "for Linux on riscv64; it has them for aarch64, s390x, x86_64",
        ),
    ],
)
def test_what_does_not_run_here_is_refused_with_the_way_out(
    tag: str, inventory: Inventory, build: Any, words: str
) -> None:
    with pytest.raises(NoBuild) as refused:
        choose("llamacpp", tag, names(tag), inventory, build=build)
    assert words in str(refused.value)
    if inventory.gpus:
        assert "or say `build: cpu`, which leaves the GPUs idle" in str(refused.value)
    if words != "needs an NVIDIA driver, and this machine has none loaded":
        assert "engines.llamacpp.bin" in str(refused.value)


def test_a_runtime_that_is_not_there_yet() -> None:
    there = [name for name in names("b11434") if not name.startswith("cudart-")]
    with pytest.raises(NoBuild, match=r"not its runtime cudart-llama-b11434-.*; it is asked again"):
        choose("llamacpp", "b11434", there, with_gpu())


def test_a_release_without_archives() -> None:
    with pytest.raises(NoBuild, match=r"holds no archives \(yet\).*nightly-tag.txt"):
        choose("llamacpp", "v0.6.0", (), machine())


def test_numbers_and_endings_of_tomorrow() -> None:
    tomorrow = [
        "cudart-llama-b20000-bin-ubuntu-cuda-14.10-x64.tar.zst",
        "llama-b20000-bin-ubuntu-cuda-14.10-x64.tar.zst",
        "llama-b20000-bin-ubuntu-cuda-13.9-x64.tar.zst",
        "cudart-llama-b20000-bin-ubuntu-cuda-13.9-x64.tar.zst",
        "llama-b2000-bin-ubuntu-x64.tar.zst",
        "llama-b20000-bin-ubuntu-x64.tar.zst",
    ]
    assert choose("llamacpp", "b20000", tomorrow, with_gpu()).variant == "cuda-13.9-x86_64"
    assert choose("llamacpp", "b20000", tomorrow, machine()).names == ("llama-b20000-bin-ubuntu-x64.tar.zst",)


@pytest.mark.parametrize(("driver", "cuda"), [("580.1", 13), ("579.9", 12), ("525", 12), ("449.1", None), ("x", None)])
def test_what_a_driver_runs(driver: str, cuda: int | None) -> None:
    assert cuda_of(driver) == cuda
