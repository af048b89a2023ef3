"""A real apt and a real dpkg on a root of their own, with a package source of their own: nothing outside is touched."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmgw.agent.discovery.system import OsRelease
from llmgw.agent.install.providers import System

DEBIAN = OsRelease(pretty="Debian GNU/Linux 12", id="debian", version_id="12")

_CONFIG = """
Dir "{root}";
Dir::State::status "{root}/var/lib/dpkg/status";
Dir::Etc::sourcelist "{root}/etc/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::Etc::main "/dev/null";
Dir::Bin::dpkg "{bin}/dpkg";
APT::Architectures {{ "{architecture}"; }};
APT::Sandbox::User "root";
Acquire::Languages "none";
DPkg::Pre-Install-Pkgs {{}};
DPkg::Post-Invoke {{}};
"""

# Takes a lock as apt does, under a name that /proc shows, and lets go when its stdin ends.
_HOLDER = """
import ctypes, fcntl, sys
ctypes.CDLL(None).prctl(15, sys.argv[2].encode(), 0, 0, 0)
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@dataclass
class AptRoot:
    folder: Path
    source: Path
    system: System
    packages: list[str] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def publish(self, package: str, file: str, content: str = "x", postinst: str = "") -> None:
        """Puts a package with one file into the source; apt knows it after its next update."""
        tree = self.folder / "build" / package
        (tree / "DEBIAN").mkdir(parents=True)
        control = f"Package: {package}\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody <n@example.org>\n"
        control += "Description: for tests\n"
        (tree / "DEBIAN/control").write_text(control)
        if postinst:
            (tree / "DEBIAN/postinst").write_text(f"#!/bin/sh\n{postinst}\n")
            (tree / "DEBIAN/postinst").chmod(0o755)
        (tree / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (tree / file.lstrip("/")).write_text(content)
        built = self.source / f"{package}_1.0_all.deb"
        command = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(built)]
        subprocess.run(command, check=True, capture_output=True)
        digest = hashlib.sha256(built.read_bytes()).hexdigest()
        entry = f"{control}Filename: ./{built.name}\nSize: {built.stat().st_size}\nSHA256: {digest}\n"
        self.packages.append(entry)
        (self.source / "Packages").write_text("\n".join(self.packages))

    def update(self) -> None:
        subprocess.run(["apt-get", "update"], check=True, capture_output=True)

    def installed(self, package: str) -> str:
        """dpkg's word for the state of a package: ``install ok installed``."""
        command = [f"{self.folder}/bin/dpkg-query", "--show", "--showformat=${Status}", package]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    @contextmanager
    def locked(self, lock: str, name: str = "unattended-upgr") -> Iterator[subprocess.Popen[bytes]]:
        """``lock``, below the root, is held by a process of that name; closing its stdin releases it."""
        command = [sys.executable, "-I", "-S", "-c", _HOLDER, str(self.root / lock), name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            try:
                yield holder
            finally:
                if not holder.stdin.closed:
                    holder.stdin.close()


def make(folder: Path) -> AptRoot:
    """The caller sets APT_CONFIG to ``folder/apt.conf``, which both tests and the code under test go by."""
    root, source, bin = folder / "root", folder / "source", folder / "bin"
    for name in ("var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg/info", "var/log/apt"):
        (root / name).mkdir(parents=True)
    for name in ("var/lib/dpkg/updates", "var/lib/dpkg/triggers", "etc/apt", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    source.mkdir()
    (source / "Packages").touch()
    (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{source} ./\n")
    bin.mkdir()
    for name in ("dpkg", "dpkg-query"):
        script = f'#!/bin/sh\nexec /usr/bin/{name} --root={root} --force-script-chrootless "$@"\n'
        if name == "dpkg-query":
            script = f'#!/bin/sh\nexec /usr/bin/{name} --admindir={root}/var/lib/dpkg "$@"\n'
        (bin / name).write_text(script)
        (bin / name).chmod(0o755)
    architecture = subprocess.run(
        ["dpkg", "--print-architecture"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (folder / "apt.conf").write_text(_CONFIG.format(root=root, bin=bin, architecture=architecture))
    path = f"{bin}:{os.defpath}:/usr/sbin:/sbin"
    return AptRoot(folder, source, System(DEBIAN, path))
