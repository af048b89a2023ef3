"""Shared libraries that a program needs and this system lacks, asked of the system's own loader."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.agent.fetch.child import run
from llmgw.agent.install.faults import MissingLibrary, NotProved
from llmgw.agent.install.providers import System

_LIMIT_S = 60.0
_AT_ONCE = 200
"""Files per ldd: command lines have an end."""

_MISSING = re.compile(r"^\s*(\S+) => not found")
_FOUND = re.compile(r"^\s*\S+ => (/\S+) \(0x")
_TOO_OLD = re.compile(r"version [`']([A-Za-z]+_[\d.]+)' not found")
_AT_START = re.compile(
    r"(?:error while loading shared libraries: |ImportError: |OSError: )([^\s:]+\.so[.\d]*): cannot open"
)

# Parts of a CUDA or ROCm runtime: what wants them is of use only where there is such a card.
_OF_CARDS = re.compile(r"lib(cuda|nvidia-|cudart|cublas|cufft|nvrtc|nccl|cudnn|amdhip64|hip|roc|hsa-|ze_loader|sycl)")


@dataclass(slots=True)
class Linkage:
    """What the loader said of some files."""

    missing: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    """soname -> the files that want it."""
    found: set[Path] = field(default_factory=set)
    too_old: str | None = None
    """A version of symbols that a library of this system lacks: ``GLIBC_2.39``."""


def read_ldd(output: str, files: Sequence[Path]) -> Linkage:
    """``output`` of ldd about ``files``. Of several it names each before what it says of it; of one it does not."""
    linkage = Linkage()
    names = {f"{file}:": file for file in files}
    file = files[0]
    for line in output.splitlines():
        file = names.get(line, file)
        if missing := _MISSING.match(line):
            linkage.missing[missing[1]].append(file)
        elif found := _FOUND.match(line):
            linkage.found.add(Path(found[1]))
        elif too_old := _TOO_OLD.search(line):
            linkage.too_old = linkage.too_old or too_old[1]
    return linkage


async def require_libraries(
    program: Path, others: Sequence[Path] = (), *, system: System | None = None, cards: bool = True
) -> frozenset[Path]:
    """All libraries that ``program`` and ``others`` load, where they lie.

    ``cards`` False: this machine has no graphics cards, and ``others`` may lack what only those bring, since what can't
    be loaded is left out by the program. Raises NotProved, with the OS packages that bring what is missing.
    """
    linkage = await linkage_of((program, *others))
    if linkage.too_old is not None:
        raise NotProved(too_old_for(program, linkage.too_old))
    missing = {
        name: files for name, files in linkage.missing.items() if cards or program in files or not is_of_cards(name)
    }
    if missing:
        raise await lacking({name: files[0] for name, files in missing.items()}, system)
    return frozenset(linkage.found)


def is_of_cards(name: str) -> bool:
    """Whether only a graphics card's own software brings this library."""
    return _OF_CARDS.match(name) is not None


async def lacking(libraries: dict[str, Path], system: System | None = None) -> NotProved:
    """The failure that names each missing library (soname -> who wants it), its package and the command to type."""
    system = system or System.here()
    missing = []
    for name, wanted_by in sorted(libraries.items()):
        provider = await system.provider(name)
        missing.append(MissingLibrary(name=name, wanted_by=wanted_by, package=provider.package, advice=provider.advice))
    return NotProved(_words(missing, system), tuple(missing))


async def why_not_started(what: str, output: str, program: Path) -> NotProved | None:
    """The failure where ``output`` of a program shows that its libraries kept it from running; None else."""
    names = _AT_START.findall(output) or [found[1] for line in output.splitlines() if (found := _MISSING.match(line))]
    if names:
        return await lacking(dict.fromkeys(names, program))
    if too_old := _TOO_OLD.search(output):
        return NotProved(f"{what}: {too_old_for(program, too_old[1])}")
    return None


def beside(program: Path) -> list[Path]:
    """One file of each library in the program's folder; ``libx.so``, ``libx.so.0`` and so on are one.

    They are asked about too: backends are loaded while the program runs, and nothing in it names them.
    """
    libraries: dict[str, Path] = {}
    for path in sorted(program.resolve().parent.glob("lib*.so*")):
        libraries.setdefault(path.name.partition(".so")[0], path)
    return list(libraries.values())


async def linkage_of(files: Sequence[Path]) -> Linkage:
    """What the loader says of ``files``. Where this system has no ldd nothing is known, and so nothing missing."""
    whole = Linkage()
    ldd = shutil.which("ldd")
    for start in range(0, len(files) if ldd else 0, _AT_ONCE):
        part = files[start : start + _AT_ONCE]
        ended = await run([str(ldd), *map(str, part)], env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"}, limit_s=_LIMIT_S)
        linkage = read_ldd(ended.output, part)
        for name, wanting in linkage.missing.items():
            whole.missing[name] += wanting
        whole.found |= linkage.found
        whole.too_old = whole.too_old or linkage.too_old
    return whole


def too_old_for(program: Path, symbols: str) -> str:
    return f"{program} needs {symbols}, which is newer than what this system has: use a build for this system"


def _words(missing: Iterable[MissingLibrary], system: System) -> str:
    words, packages = [], set()
    for library in missing:
        what = f"{library.name}, which {library.wanted_by} needs, can't be found"
        if library.package is None:
            words.append(f"{what}: {library.advice}")
        else:
            words.append(f"{what}: it is in the package {library.package}")
            packages.add(library.package)
    command = f" ({system.family} install {' '.join(sorted(packages))})" if packages and system.family else ""
    return "; ".join(words) + command
