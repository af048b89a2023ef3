"""Which llmgw a node gets: the release of a version, which it fetches itself, or a file that is copied to it."""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

INSTALLED = Path("/usr/local/bin/llmgw")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""What ``uname -m`` says, and how releases are named."""
_RELEASE = re.compile(r"v\d+\.\d+\.\d+")
_SAYS = re.compile(r"llmgw (v\d+\.\d+\.\d+(?:\+[0-9A-Za-z.]+)?)")
_VERSION_S = 60.0
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}


class NoBinary(Exception):
    """There is nothing to install; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """``version``: as ``--version`` prints it. ``file``: what is copied; None: a release, which the node fetches."""

    version: str
    file: Path | None = None
    sha256: str = ""
    size_bytes: int = 0
    architecture: str | None = None
    """``uname -m`` of the machines on which ``file`` runs; None: not known."""

    @property
    def is_release(self) -> bool:
        return self.file is None

    def __str__(self) -> str:
        return f"llmgw {self.version}"


def build_to_install(binary: Path | None, own_version: str, own_file: Path | None) -> Build:
    """What ``--binary`` reports, or else what runs here. Raises NoBinary.

    Of a release only the version counts: to copy whatever file the operator's machine has would make that machine the
    build server.
    """
    file = binary or own_file
    if binary is None and _RELEASE.fullmatch(own_version):
        return Build(version=own_version)
    if file is None:
        raise NoBinary(
            f"no llmgw binary; pass --binary: this is llmgw {own_version}, no release, and it runs from its sources"
        )
    version = own_version if binary is None else _version_of(file)
    if _RELEASE.fullmatch(version):
        return Build(version=version)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise NoBinary(f"--binary {file} can't be read: {error.strerror}") from error
    return Build(
        version=version,
        file=file,
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        architecture=_architecture_of(content),
    )


def folder_of(releases: str, version: str) -> str:
    """Where the files of a version are, ``checksums.txt`` among them."""
    return f"{releases.rstrip('/')}/{version}"


def asset_of(version: str, architecture: str) -> str:
    """The name of a release's file for ``uname -m``. KeyError: there is none for that."""
    return f"llmgw-{version}-linux-{ARCHITECTURES[architecture]}"


def _version_of(file: Path) -> str:
    if not file.is_file():
        raise NoBinary(f"--binary {file}: there is no such file")
    try:
        ended = subprocess.run([file.absolute(), "--version"], capture_output=True, timeout=_VERSION_S, check=False)
    except PermissionError:
        raise NoBinary(f"--binary {file} is not executable: `chmod +x {file}`") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoBinary(f"--binary {file} does not run here: {error}") from error
    said = ended.stdout.decode("utf-8", "replace").strip()
    found = _SAYS.fullmatch(said)
    if ended.returncode or found is None:
        raise NoBinary(f"--binary {file} is no llmgw: `{file} --version` says {said[:80]!r}, not `llmgw vX.Y.Z`")
    return found[1]


def _architecture_of(content: bytes) -> str | None:
    if content[:4] == b"\x7fELF":
        return _ELF_MACHINES.get(int.from_bytes(content[18:20], "little"))
    # The head of a self-extracting file says for what it was made.
    found = re.search(rb"^# linux-(amd64|arm64)$", content[:4096], re.MULTILINE)
    names = {name: machine for machine, name in ARCHITECTURES.items()}
    return names[found[1].decode()] if found else None
