"""Which OS package has a shared library, on this very release of this very distribution.

What engines are known to need stands in a table. For everything else the system is asked: apt by its naming rule for
libraries (the contents of packages are on a machine only where apt-file is), dnf by what packages say they provide.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmgw.agent.discovery.system import OsRelease, read_os_release
from llmgw.agent.fetch.child import run
from llmgw.process.detached import BASE_PATH

Tool = Literal["apt-get", "dnf"]

_ASK_LIMIT_S = 120.0

# soname: (Debian and Ubuntu, Fedora and RHEL). A * becomes "t64" where times have 64 bits: Debian 13, Ubuntu 24.04.
_TABLE = {
    "libatomic.so.1": ("libatomic1", "libatomic"),
    "libcrypto.so.3": ("libssl3*", "openssl-libs"),
    "libcurl.so.4": ("libcurl4*", "libcurl"),
    "libelf.so.1": ("libelf1*", "elfutils-libelf"),
    "libgcc_s.so.1": ("libgcc-s1", "libgcc"),
    "libgfortran.so.5": ("libgfortran5", "libgfortran"),
    "libgomp.so.1": ("libgomp1", "libgomp"),
    "libibverbs.so.1": ("libibverbs1", "libibverbs"),
    "libnl-3.so.200": ("libnl-3-200", "libnl3"),
    "libnl-route-3.so.200": ("libnl-route-3-200", "libnl3"),
    "libnuma.so.1": ("libnuma1", "numactl-libs"),
    "libquadmath.so.0": ("libquadmath0", "libquadmath"),
    "librdmacm.so.1": ("librdmacm1*", "librdmacm"),
    "libssl.so.3": ("libssl3*", "openssl-libs"),
    "libstdc++.so.6": ("libstdc++6", "libstdc++"),
    "libtbb.so.12": ("libtbb12", "tbb"),
    "libtcmalloc_minimal.so.4": ("libtcmalloc-minimal4*", "gperftools-libs"),
    "libuuid.so.1": ("libuuid1", "libuuid"),
    "libvulkan.so.1": ("libvulkan1", "vulkan-loader"),
    "libz.so.1": ("zlib1g", "zlib"),
    "libzstd.so.1": ("libzstd1", "libzstd"),
}

_DNF_FAMILY = frozenset({"fedora", "rhel", "centos", "rocky", "almalinux"})
_LONG_TIMES_SINCE = {"debian": (13,), "ubuntu": (24, 4)}

# What no package of a distribution has; the first that fits.
_ELSEWHERE = (
    (r"lib(ggml|llama|mtmd)\b", "it is a part of llama.cpp and belongs beside the program, which is not whole"),
    (r"lib(cuda|nvidia-ml|nvidia-\w+)\.so", "it comes with the NVIDIA driver: install that on this node"),
    (
        r"lib(cudart|cublas|cublasLt|cufft|curand|cusparse|nvrtc|nccl|cudnn\w*)\.so",
        "it is of the CUDA runtime, which this build does not bring along: take one that does, or one for processors",
    ),
    (r"lib(amdhip64|hipblas\w*|rocblas|rocsolver|hsa-runtime64)\.so", "it comes with ROCm: install that on this node"),
    (r"lib(ze_loader|sycl|OpenCL)\.so", "it comes with the driver of the graphics card"),
    (r"lib(ssl|crypto)\.so\.1\.1", "it is of OpenSSL 1.1, which is no longer kept: use a build for this system"),
)


@dataclass(frozen=True, slots=True)
class Provider:
    """``package`` has the library; where it is None, ``advice`` says what to do."""

    package: str | None
    advice: str = ""


@dataclass(frozen=True, slots=True)
class System:
    """The distribution, as far as its packages go."""

    release: OsRelease
    path: str = BASE_PATH

    @classmethod
    def here(cls) -> System:
        return cls(read_os_release(Path("/")))

    @property
    def family(self) -> Tool | None:
        """By what packages are installed on this distribution; None where that is neither."""
        if self.release.has_apt:
            return "apt-get"
        return None if _DNF_FAMILY.isdisjoint((self.release.id, *self.release.id_like)) else "dnf"

    @property
    def tool(self) -> Tool | None:
        """The same, where it is there."""
        return self.family if self.family and shutil.which(self.family, path=self.path) else None

    def known(self, library: str) -> str | None:
        """The package that the table names for this release."""
        names = self._in_table(library)
        return names[0] if len(names) == 1 else None

    def _in_table(self, library: str) -> tuple[str, ...]:
        """More than one where it is not known whether this distribution has gone over to times of 64 bits."""
        if library not in _TABLE or self.family is None:
            return ()
        debian, fedora = _TABLE[library]
        if self.family == "dnf":
            return (fedora,)
        if not debian.endswith("*"):
            return (debian,)
        old, new = debian[:-1], f"{debian[:-1]}t64"
        since = _LONG_TIMES_SINCE.get(self.release.id)
        if since is None:
            return (old, new)
        # Debian's rolling releases have no number, and are newer than any that has one.
        version = self.release.version_id
        return (new,) if not version or _numbers(version) >= since else (old,)

    async def provider(self, library: str) -> Provider:
        """Who has ``library``. Blocks on nothing; may take a minute where dnf has to be asked."""
        for pattern, advice in _ELSEWHERE:
            if re.match(pattern, library):
                return Provider(None, advice)
        if package := self.known(library):
            return Provider(package)
        match self.family:
            case "apt-get":
                return await self._ask_apt(library)
            case "dnf":
                return await self._ask_dnf(library)
            case _:
                return Provider(None, "install the package of this system that has it")

    async def _ask_apt(self, library: str) -> Provider:
        finder = shutil.which("apt-file", path=self.path)
        if finder is not None:
            listed = await self._ask([finder, "--fixed-string", "search", f"/{library}"])
            for line in listed.splitlines():
                package, _, file = line.partition(": ")
                if file.rpartition("/")[2] == library:
                    return Provider(package)
        for name in (*self._in_table(library), *_named_after(library)):
            if f"Package: {name}\n" in await self._ask(["apt-cache", "show", "--no-all-versions", name]):
                return Provider(name)
        advice = "apt knows no package that is named after it"
        if finder is None:
            advice += (
                f"; to search their contents: apt-get install apt-file, apt-file update, apt-file search {library}"
            )
        return Provider(None, advice)

    async def _ask_dnf(self, library: str) -> Provider:
        wide = "()(64bit)" if platform.machine() in ("x86_64", "aarch64", "ppc64le", "s390x") else ""
        said = await self._ask(["dnf", "--quiet", "provides", f"{library}{wide}"])
        for line in said.splitlines():
            if found := re.match(r"(\S+?)-(?:\d+:)?[^-\s]+-[^-\s]+\.\w+(?=\s|$)", line):
                return Provider(found[1])
        return Provider(None, f"dnf knows no package that provides it (dnf provides '{library}{wide}')")

    async def _ask(self, argv: list[str]) -> str:
        """What it says; nothing where it fails, or there is no such program."""
        program = shutil.which(argv[0], path=self.path)
        if program is None:
            return ""
        env = {"PATH": self.path, "LC_ALL": "C", "HOME": "/"}
        ended = await run([program, *argv[1:]], env=env, limit_s=_ASK_LIMIT_S, cwd="/")
        return ended.output if ended.status == 0 else ""


def _named_after(library: str) -> Iterator[str]:
    """Debian Policy 8.1: ``libfoo.so.1`` is in ``libfoo1``, ``libfoo2.so.1`` in ``libfoo2-1``."""
    stem, _, version = library.partition(".so.")
    if version:
        joint = "-" if stem[-1:].isdigit() else ""
        name = f"{stem}{joint}{version}".lower().replace("_", "-")
        yield name
        yield f"{name}t64"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
