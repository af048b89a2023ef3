from __future__ import annotations

import dataclasses

import pytest

from llmgw.cluster.model import Cpu, Inventory
from llmgw.engines.builds import (
    DEFAULT_ENGINES,
    DEFAULT_MODEL_SOURCE,
    LLAMACPP_B10068_X86_64,
    LLAMACPP_BUILD,
    build,
    contradicts,
    fits,
    package_of,
    package_version,
    weights,
)

MACHINE = Inventory(
    hostname="a",
    os="Debian 12",
    kernel="6.1",
    libc="glibc 2.36",
    cpu=Cpu(model="EPYC 7443", architecture="x86_64", cores=2, extensions=("avx2", "fma", "f16c")),
    memory_bytes=1 << 34,
    mgmt_addr="127.0.0.1",
)


def machine(*, libc: str = "glibc 2.36", **cpu: object) -> Inventory:
    changed = dataclasses.replace(MACHINE.cpu, **cpu)  # type: ignore[arg-type]
    return dataclasses.replace(MACHINE, libc=libc, cpu=changed)


def test_the_default_engine_has_its_row() -> None:
    (spec,) = DEFAULT_ENGINES
    assert spec.source == "index"
    assert build(spec.name, spec.version) is LLAMACPP_B10068_X86_64
    assert spec.version == LLAMACPP_BUILD
    assert build("llamacpp", "b1") is None


def test_the_default_model_has_its_row() -> None:
    row = weights(DEFAULT_MODEL_SOURCE)
    assert row is not None
    assert row.source.endswith(".gguf")


@pytest.mark.parametrize("libc", ["glibc 2.34", "glibc 2.36", "glibc 2.41", "glibc 3.0"])
def test_machines_that_fit(libc: str) -> None:
    assert fits(LLAMACPP_B10068_X86_64, machine(libc=libc)) is None


@pytest.mark.parametrize(
    ("inventory", "words"),
    [
        (machine(architecture="aarch64"), "is built for x86_64, and this machine is aarch64"),
        (machine(libc="glibc 2.31"), "needs glibc 2.34 or newer, and this machine has glibc 2.31"),
        (machine(libc="musl 1.2"), "this machine has musl 1.2"),
        (machine(libc=""), "this machine has none"),
        (machine(extensions=()), "needs a processor with avx2, fma and f16c, which EPYC 7443 lacks"),
        (machine(extensions=("avx2", "f16c")), "needs a processor with fma, which"),
    ],
)
def test_machines_that_do_not_fit_hear_why_and_the_way_out(inventory: Inventory, words: str) -> None:
    why = fits(LLAMACPP_B10068_X86_64, inventory)
    assert why is not None
    assert words in why
    assert "engines.llamacpp.bin" in why
    assert "llmgw up --engine sim" in why


@pytest.mark.parametrize(
    ("wanted", "said", "against"),
    [
        ("b10991", "b10991", False),
        ("b10991", "b10992", True),
        ("b10991", "571d0d5", False),
        ("571d0d5", "571d0d5", False),
        ("571d0d5", "3ce7da2", True),
        (None, "b1", False),
        ("b10991", None, False),
    ],
)
def test_a_version_that_rules_out_the_wanted_one(wanted: str | None, said: str | None, against: bool) -> None:
    assert contradicts(wanted, said) is against


def test_versions_of_the_usual_package() -> None:
    usual = package_of("llamacpp", None)
    assert usual is not None
    assert usual is package_of("llamacpp", usual.package)
    assert package_version(usual, LLAMACPP_B10068_X86_64.version) == LLAMACPP_B10068_X86_64.package_version
    assert package_version(usual, "0.10092.0") == "0.10092.0"
    assert package_of("llamacpp", "another") is None
    assert package_of("vllm", None) is None
