"""The Python packages of a release: of the lock, as wheels for its architecture, by hash, and where they go."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

PYTHON = "3.11"
GLIBC = (2, 35)
"""The libc of the oldest system that releases are for, Ubuntu 22.04. Debian 12 and Ubuntu 24.04 have newer ones."""
_OLDEST = {"amd64": 5, "arm64": 17}
_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}
_PROGRAMS = ("uv",)
"""What packages bring that is run by its name; all else is run with ``python -m``."""


class WheelsRefused(Exception):
    """A package can't be had; the message says why."""


@dataclass(frozen=True, slots=True, order=True)
class Wheel:
    name: str
    version: str
    file: Path
    sha256: str

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def platforms(architecture: str) -> list[str]:
    """The tags of wheels that run there with a libc of GLIBC, as pip names them."""
    machine = _NAMES[architecture]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC[1], _OLDEST[architecture] - 1, -1)]
    older = ["manylinux2014", "manylinux2010", "manylinux1"] if architecture == "amd64" else ["manylinux2014"]
    return [*tags, *(f"{name}_{machine}" for name in older), f"linux_{machine}"]


def fetch(requirements: Path, architecture: str, folder: Path) -> list[Wheel]:
    """One wheel of each package of the lock, below ``folder``. Raises WheelsRefused."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--require-hashes", "--only-binary", ":all:", "--requirement", str(requirements), "--dest", str(folder)]
    words += ["--implementation", "cp", "--python-version", PYTHON]
    for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none"):
        words += ["--abi", abi]
    for platform in platforms(architecture):
        words += ["--platform", platform]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise WheelsRefused(f"packages for {architecture} can't be had: {ended.stderr.strip()[-2000:]}")
    return sorted(wheel_of(file) for file in folder.glob("*.whl"))


def wheel_of(file: Path) -> Wheel:
    name, version = file.name.split("-")[:2]
    normal = re.sub(r"[-_.]+", "-", name).lower()
    return Wheel(normal, version, file, hashlib.sha256(file.read_bytes()).hexdigest())


def install(wheel: Wheel, packages: Path, programs: Path) -> None:
    """Unpacks a wheel: modules into ``packages``, and those programs of it that are run by name into ``programs``."""
    with zipfile.ZipFile(wheel.file) as packed:
        for member in packed.infolist():
            place = _place(member.filename, packages, programs)
            if member.is_dir() or place is None:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with packed.open(member) as source, place.open("wb") as target:
                shutil.copyfileobj(source, target)
            runs = place.parent == programs or member.external_attr >> 16 & 0o100
            place.chmod(0o755 if runs else 0o644)


def _place(name: str, packages: Path, programs: Path) -> Path | None:
    parts = Path(name).parts
    if ".." in parts or name.startswith("/"):
        raise WheelsRefused(f"a wheel holds {name!r}, which would lie outside of its folder")
    if not parts[0].endswith(".data"):
        return packages / name
    kind, rest = parts[1], Path(*parts[2:])
    if kind in ("purelib", "platlib"):
        return packages / rest
    return programs / rest if kind == "scripts" and rest.name in _PROGRAMS else None
