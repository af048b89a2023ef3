"""Locks of Python engines: which packages, by hash, make one build of one version, and which lock a machine takes.

A lock is a requirements file, every package in it with its hashes. What else must be known of it stands in comments at
its top, one ``# key: value`` a line::

    # llmgw engine lock 1
    # engine: vllm
    # version: 0.32.0
    # build: cuda
    # architecture: x86_64
    # python: 3.11
    # glibc: 2.34
    # driver: 580
    # unpacked-bytes: 9200000000
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmgw.cluster.catalog import BuildKind, EngineSpec
from llmgw.cluster.model import Inventory
from llmgw.engines.releases import glibc_of, has_cuda

FIRST_LINE = "# llmgw engine lock 1"
BUILDS = ("cpu", "cuda")

_KEY = re.compile(r"# ([a-z-]+): (.+)")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?![0-9a-f])")
_OPTION = re.compile(r"-\S+")


class BadLock(ValueError):
    """It is no lock that this release can install; the message says where, and what was expected."""


class NoLock(Exception):
    """No lock is for this machine; the message says which there are, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    engine: str
    version: str
    """As it stands in an EngineSpec."""
    build: str
    """``cpu`` or ``cuda``."""
    architecture: str
    python: str
    """``3.11``: the version of Python that its packages are for."""
    glibc: tuple[int, int]
    """The oldest that its packages run with."""
    driver: int
    """The oldest NVIDIA driver, by the first part of its version; 0 where it needs none."""
    unpacked_bytes: int
    """What its packages take once they are unpacked, compiled modules included."""
    note: str
    """For people, where it can't be had: what has to be there first. Empty: nothing has."""
    packages: tuple[tuple[str, str], ...]
    """Names and versions."""
    text: str
    sha256: str

    @property
    def folder(self) -> str:
        return f"{self.version}-{self.build}-{self.sha256[:12]}"

    def __str__(self) -> str:
        return f"{self.engine} {self.version} ({self.build}, {self.architecture})"


def read_lock(text: str) -> Lock:
    """Raises BadLock. A lock whose packages could be anything else than what it names is none."""
    first, *lines = text.splitlines() or [""]
    if first != FIRST_LINE:
        raise BadLock(f"its first line is {first[:80]!r}, and that of a lock is {FIRST_LINE!r}")
    said = {found[1]: found[2] for line in lines if (found := _KEY.fullmatch(line))}
    build = _said(said, "build", "|".join(BUILDS))
    libc = _said(said, "glibc", r"\d+\.\d+").split(".")
    return Lock(
        engine=_said(said, "engine", "vllm|sglang"),
        version=_said(said, "version", r"[A-Za-z0-9][A-Za-z0-9.+!_]*"),
        build=build,
        architecture=_said(said, "architecture", r"x86_64|aarch64"),
        python=_said(said, "python", r"3\.\d+"),
        glibc=(int(libc[0]), int(libc[1])),
        driver=int(_said(said, "driver", r"\d+")) if build == "cuda" else 0,
        unpacked_bytes=int(_said(said, "unpacked-bytes", r"\d+")),
        note=said.get("note", ""),
        packages=tuple(_packages(lines)),
        text=text,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


def _said(said: dict[str, str], key: str, pattern: str) -> str:
    value = said.get(key)
    if value is None:
        raise BadLock(f"it does not say its {key} (a line `# {key}: …`)")
    if re.fullmatch(pattern, value) is None:
        raise BadLock(f"its {key} is {value!r}, and that can't be: it must match {pattern}")
    return value


def _packages(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    count = 0
    for number, line in _joined(lines):
        requirement, *hashes = line.split()
        if _OPTION.match(requirement):
            raise BadLock(
                f"line {number}: {requirement} is an option, and a lock has packages alone: where they come from is "
                "the configuration of the node"
            )
        name = _REQUIREMENT.fullmatch(requirement)
        if name is None:
            raise BadLock(f"line {number}: {requirement!r} is not NAME==VERSION")
        if not hashes or not all(_HASH.fullmatch(each) for each in hashes):
            raise BadLock(f"line {number}: {requirement} needs its hashes, and nothing else: --hash=sha256:…")
        count += 1
        yield name[1], name[2]
    if not count:
        raise BadLock("it names no package")


def _joined(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Requirements, each on one line, and where they begin. The first line of the file is gone already."""
    begun, whole = 0, ""
    for number, line in enumerate(lines, start=2):
        if not whole:
            begun = number
        stripped = line.split(" #")[0].strip()
        if stripped.startswith("#"):
            continue
        whole = f"{whole} {stripped.removesuffix(chr(92))}".strip()
        if whole and not stripped.endswith("\\"):
            yield begun, whole
            whole = ""
    if whole:
        raise BadLock(f"line {begun}: it ends in the middle of a requirement: is the file whole?")


def choose(locks: Iterable[Lock], spec: EngineSpec, inventory: Inventory, build: BuildKind | None = None) -> Lock:
    """The lock for this machine: CUDA's where it has a GPU that can be used, else the processor's. Raises NoLock.

    ``build`` is what this node's own file says; it wins over what the cluster's file says.
    """
    of_engine = [lock for lock in locks if lock.engine == spec.name]
    of_version = [lock for lock in of_engine if lock.version == spec.version]
    if not of_version:
        there = sorted({lock.version for lock in of_engine})
        raise NoLock(
            f"this release has no lock of {spec.name} {spec.version}: it has "
            f"{' and '.join(there) if there else 'none of this engine'}. Ask for one of those, or name a lock of your "
            "own by its URL (source: {url: …, sha256: …})"
        )
    wanted = f"{build or spec.build or ('cuda' if has_cuda(inventory) else 'cpu')} on {inventory.cpu.architecture}"
    fitting = [lock for lock in of_version if f"{lock.build} on {lock.architecture}" == wanted]
    if not fitting:
        there = sorted(f"{lock.build} on {lock.architecture}" for lock in of_version)
        raise NoLock(
            f"this release has no lock of {spec.name} {spec.version} for {wanted} ({_why(spec, inventory, build)}): it "
            f"has {', '.join(there)}. Name a lock of your own by its URL (source: {{url: …, sha256: …}})"
        )
    if why_not := misfit(fitting[0], inventory):
        raise NoLock(why_not)
    return fitting[0]


def _why(spec: EngineSpec, inventory: Inventory, build: BuildKind | None) -> str:
    """Why that build is wanted."""
    if build or spec.build:
        return f"the {'agent' if build else 'cluster'}'s file says so"
    return "this node has NVIDIA GPUs" if has_cuda(inventory) else "this node has no NVIDIA GPU that can be used"


def misfit(lock: Lock, inventory: Inventory) -> str | None:
    """Why this machine can't run it, with the way out; None where nothing speaks against it."""
    cpu = inventory.cpu
    if lock.architecture != cpu.architecture:
        return f"{lock} is for {lock.architecture}, and this machine is {cpu.architecture}: name a lock for that"
    if lock.build == "cuda" and inventory.driver is None:
        return f"{lock} needs an NVIDIA driver, and none is loaded: install one, or name a lock for the CPU"
    release = re.match(r"\d+", inventory.driver or "")
    if lock.build == "cuda" and release is not None and int(release[0]) < lock.driver:
        return (
            f"{lock} needs NVIDIA driver {lock.driver} or newer, and this machine has {inventory.driver}: upgrade the "
            "driver, or ask for a version that was built for an older CUDA"
        )
    libc = glibc_of(inventory.libc)
    if libc is None or libc < lock.glibc:
        wanted = ".".join(map(str, lock.glibc))
        return (
            f"{lock} needs glibc {wanted} or newer, and this machine has {inventory.libc or 'none'}: upgrade the "
            "system (Debian 12, Ubuntu 22.04 and RHEL 9 will do)"
        )
    return None
