"""Which archive of a publisher's release a machine runs: a table of names, and the choice among those that are there.

Names of archives carry numbers that move (of the build, of CUDA) and endings that have changed: rows match patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llmgw.cluster.catalog import BuildKind
from llmgw.cluster.model import Inventory

Accelerator = Literal["cpu", "cuda"]

_ENDING = r"\.(?:zip|tar\.gz|tar\.xz|tar\.zst)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One archive that releases of an engine hold, or held once."""

    engine: str
    pattern: str
    """Of the whole file name; ``{tag}`` stands for the release's tag, and a group ``cuda`` for CUDA's version."""
    accelerator: Accelerator
    architecture: str
    glibc: tuple[int, int]
    """Of the machine that it is built on: the oldest it is sure to run with."""
    companion: str | None = None
    """Name of the archive that belongs into the same folder; ``{tag}``, ``{cuda}``, ``{ending}`` as in this one's."""


REPOSITORIES: Mapping[str, str] = {"llamacpp": "ggml-org/llama.cpp"}
"""Where an engine's publisher releases it."""

# x64 comes from Ubuntu 22.04, everything else from 24.04. They were zips until January 2026; CUDA for Linux is there
# since August 2026, and its runtime is an archive of its own.
ROWS: tuple[Row, ...] = (
    Row(
        engine="llamacpp",
        pattern=rf"llama-{{tag}}-bin-ubuntu-x64{_ENDING}",
        accelerator="cpu",
        architecture="x86_64",
        glibc=(2, 35),
    ),
    Row(
        engine="llamacpp",
        pattern=rf"llama-{{tag}}-bin-ubuntu-arm64{_ENDING}",
        accelerator="cpu",
        architecture="aarch64",
        glibc=(2, 39),
    ),
    Row(
        engine="llamacpp",
        pattern=rf"llama-{{tag}}-bin-ubuntu-s390x{_ENDING}",
        accelerator="cpu",
        architecture="s390x",
        glibc=(2, 39),
    ),
    Row(
        engine="llamacpp",
        pattern=rf"llama-{{tag}}-bin-ubuntu-cuda-(?P<cuda>\d+\.\d+)-x64(?P<ending>{_ENDING})",
        accelerator="cuda",
        architecture="x86_64",
        glibc=(2, 39),
        companion="cudart-llama-{tag}-bin-ubuntu-cuda-{cuda}-x64{ending}",
    ),
    Row(
        engine="llamacpp",
        pattern=rf"llama-{{tag}}-bin-ubuntu-cuda-(?P<cuda>\d+\.\d+)-arm64(?P<ending>{_ENDING})",
        accelerator="cuda",
        architecture="aarch64",
        glibc=(2, 39),
        companion="cudart-llama-{tag}-bin-ubuntu-cuda-{cuda}-arm64{ending}",
    ),
)

DRIVERS: tuple[tuple[int, int], ...] = ((580, 13), (525, 12), (450, 11))
"""From this NVIDIA driver on, this major version of CUDA runs, and those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The archives of one build, the one with the program first."""

    names: tuple[str, ...]
    variant: str
    """``cpu-x86_64``, ``cuda-12.8-x86_64``."""


class NoBuild(Exception):
    """Nothing in the release runs on this machine as it is asked to; the message says why, and what to do."""


def choose(
    engine: str, tag: str, names: Sequence[str], inventory: Inventory, *, build: BuildKind | None = None
) -> Choice:
    """Picks what this machine runs among the ``names`` of a release's archives. Raises NoBuild, in words.

    ``build`` states the accelerator; without it, CUDA where a usable GPU and its driver are there, else the processor.
    """
    accelerator = build or ("cuda" if has_cuda(inventory) else "cpu")
    if accelerator == "cuda" and inventory.driver is None:
        raise NoBuild(f"{engine} {tag} with `build: cuda` needs an NVIDIA driver, and this machine has none loaded")
    matches = [match for match in _matches(engine, tag, names) if match.row.accelerator == accelerator]
    here = [match for match in matches if match.row.architecture == inventory.cpu.architecture]
    what = f"{engine} {tag}"
    if not here:
        raise NoBuild(_none(what, accelerator, inventory, names, matches, stated=build is not None))
    found = max(_driven(what, here, inventory), key=lambda match: match.cuda or (0, 0))
    if why := _libc(what, found, inventory):
        raise NoBuild(f"{why}{_way_out(accelerator)}")
    return _choice(found, tag, names)


def has_cuda(inventory: Inventory) -> bool:
    """An NVIDIA driver is loaded, and a GPU that it can use."""
    return inventory.driver is not None and any(gpu.problem is None for gpu in inventory.gpus)


def cuda_of(driver: str) -> int | None:
    """The newest major version of CUDA that an NVIDIA driver (``570.124.06``) runs; None: too old, or unreadable."""
    found = re.match(r"(\d+)", driver)
    return next((cuda for since, cuda in DRIVERS if found and int(found[1]) >= since), None)


def glibc_of(libc: str) -> tuple[int, int] | None:
    """Of an inventory's ``libc``; None where it is another one."""
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", libc)
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class _Match:
    row: Row
    name: str
    cuda: tuple[int, int] | None
    ending: str


def _matches(engine: str, tag: str, names: Iterable[str]) -> list[_Match]:
    found: list[_Match] = []
    for row in ROWS:
        if row.engine != engine:
            continue
        pattern = re.compile(row.pattern.replace("{tag}", re.escape(tag)))
        for name in names:
            if match := pattern.fullmatch(name):
                groups = match.groupdict()
                major, _, minor = (groups.get("cuda") or "").partition(".")
                cuda = (int(major), int(minor)) if major else None
                found.append(_Match(row, name, cuda, groups.get("ending") or ""))
    return found


def _driven(what: str, matches: list[_Match], inventory: Inventory) -> list[_Match]:
    """Those whose CUDA this machine's driver runs; all of them where they need none."""
    if all(match.cuda is None for match in matches):
        return matches
    assert inventory.driver is not None
    most = cuda_of(inventory.driver) or 0
    driven = [match for match in matches if match.cuda is not None and match.cuda[0] <= most]
    if driven:
        return driven
    there = " and ".join(sorted(_dotted(match.cuda) for match in matches if match.cuda is not None))
    runs = f"runs CUDA {most} at most" if most else "is too old for any CUDA that is still built for"
    raise NoBuild(
        f"{what} is built for CUDA {there}, and this machine's NVIDIA driver {inventory.driver} {runs}: "
        f"install a newer driver{_way_out('cuda')}"
    )


def _libc(what: str, match: _Match, inventory: Inventory) -> str | None:
    libc = glibc_of(inventory.libc)
    if libc is not None and libc >= match.row.glibc:
        return None
    return (
        f"{what} ({match.name}) is built for glibc {_dotted(match.row.glibc)} or newer, and this machine has "
        f"{inventory.libc or 'none'}"
    )


def _choice(found: _Match, tag: str, names: Sequence[str]) -> Choice:
    kind = found.row.accelerator if found.cuda is None else f"cuda-{_dotted(found.cuda)}"
    variant = f"{kind}-{found.row.architecture}"
    if found.row.companion is None:
        return Choice(names=(found.name,), variant=variant)
    companion = found.row.companion.format(tag=tag, cuda=_dotted(found.cuda or (0, 0)), ending=found.ending)
    if companion not in names:
        raise NoBuild(
            f"the release {tag} has {found.name} and not its runtime {companion}: it may still be on its way there; "
            "it is asked again"
        )
    return Choice(names=(found.name, companion), variant=variant)


def _none(
    what: str, accelerator: str, inventory: Inventory, names: Sequence[str], others: list[_Match], *, stated: bool
) -> str:
    machine = f"Linux on {inventory.cpu.architecture}"
    if accelerator == "cuda":
        gpus = f"this machine has NVIDIA GPUs (driver {inventory.driver})"
        because = "`build: cuda` asks for one" if stated else gpus
        return f"{what} has no archive with CUDA for {machine}, and {because}{_way_out('cuda')}"
    if not names:
        return (
            f"the release {what} holds no archives (yet): builds are numbered like b10991, and a release v0.6.0 only "
            "names its build, in nightly-tag.txt"
        )
    known = ", ".join(sorted({match.row.architecture for match in others})) or "none that llmgw knows"
    return f"{what} has no archive for {machine}; it has them for {known}{_way_out('cpu')}"


def _way_out(accelerator: str) -> str:
    cpu = "; or say `build: cpu`, which leaves the GPUs idle" if accelerator == "cuda" else ""
    return f"{cpu}; or name a llama-server made for this machine in the agent's file (engines.llamacpp.bin)"


def _dotted(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version or ()))
