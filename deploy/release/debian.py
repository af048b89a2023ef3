"""CPython and the libraries that it needs, from Debian's packages: fetched by apt, which proves who made them, and
held to the lock, which says which ones.

apt is given lists and a state of its own: the machine's stay as they are, and other architectures need no consent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK = Path(__file__).with_name("debian.lock")
SUITE = "bookworm"
MIRROR = "LLMGW_DEBIAN_MIRROR"
"""Names the variable that says where Debian's archive is, the part before ``/debian``; left out: where this machine's
apt finds it."""
_SOURCES = Path("/etc/apt")
_URI = re.compile(r"(?:^URIs:|^deb\b.*?)\s(https?://\S+?)/debian/?(?:\s|$)", re.MULTILINE)
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NAMES = (
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libpython3.11-dev",
    "python3.11-minimal",
    "libbz2-1.0",
    "libexpat1",
    "libffi8",
    "liblzma5",
    "libncursesw6",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libtinfo6",
    "libuuid1",
    "zlib1g",
)
"""``libpython3.11-dev`` for its headers: engines compile against them, in environments made from this Python."""
_OLDER = {"amd64": {"libexpat1": "bullseye-security"}, "arm64": {"libexpat1": "bullseye"}}
"""Taken from an earlier suite, since SUITE's needs a libc newer than the oldest system has. What is in a suite's lists
is not always in its archive: for arm64 that update is not."""
_APT_S = 600.0


class DebianRefused(Exception):
    """The packages can't be had; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class Package:
    name: str
    version: str
    architecture: str
    sha256: str

    @property
    def purl(self) -> str:
        return f"pkg:deb/debian/{self.name}@{self.version}?arch={self.architecture}&distro={SUITE}"


def read_lock(architecture: str) -> list[Package]:
    rows = json.loads(LOCK.read_text(encoding="utf-8"))
    return [package for package in (Package(**row) for row in rows) if package.architecture == architecture]


def write_lock(folder: Path, architectures: tuple[str, ...]) -> list[Package]:
    """Takes what Debian has now. ``folder``: where apt works."""
    rows = sorted(
        package for architecture in architectures for package in _Apt(folder / architecture, architecture).offered()
    )
    text = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    LOCK.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    return rows


def fetch(packages: list[Package], folder: Path) -> list[Path]:
    """The packages' files, below ``folder``; what is there already is not fetched again. Raises DebianRefused."""
    places = {package: folder / f"{package.name}_{package.architecture}.deb" for package in packages}
    missing = [package for package, place in places.items() if not _is(place, package)]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        apt = _Apt(folder / "apt", missing[0].architecture)
        for package in missing:
            apt.download(package, places[package])
            if not _is(places[package], package):
                raise DebianRefused(
                    f"{package.name} {package.version} ({package.architecture}) is not what {LOCK} says"
                )
    return list(places.values())


def unpack(packages: list[Path], folder: Path) -> None:
    for package in packages:
        _run(["dpkg-deb", "--extract", str(package), str(folder)], cwd=folder)


def mirror_of(sources: Path) -> str:
    """Where apt finds Debian's archive, by its lists of sources. Raises DebianRefused: in none of them."""
    for file in sorted((*sources.glob("sources.list"), *sources.glob("sources.list.d/*"))):
        if found := _URI.search(file.read_text(encoding="utf-8")):
            return found[1]
    raise DebianRefused(f"no list of {sources} names Debian's archive: say where it is with {MIRROR}=URL")


class _Apt:
    def __init__(self, folder: Path, architecture: str) -> None:
        if not _KEYRING.exists():
            raise DebianRefused(f"{_KEYRING} is missing: apt-get install debian-archive-keyring")
        self._folder = folder
        self._architecture = architecture
        for part in ("none", "lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        mirror = os.environ.get(MIRROR, "").rstrip("/") or mirror_of(_SOURCES)
        signed = f"deb [signed-by={_KEYRING}]"
        older = _OLDER[architecture]
        lines = [
            f"{signed} {mirror}/{'debian-security' if suite.endswith('-security') else 'debian'} {suite} main\n"
            for suite in (SUITE, f"{SUITE}-security", *sorted(set(older.values())))
        ]
        pins = [f"Package: {name}\nPin: release n={suite}\nPin-Priority: 1001\n" for name, suite in older.items()]
        (folder / "sources.list").write_text("".join(lines), encoding="utf-8")
        (folder / "preferences").write_text("\n".join(pins), encoding="utf-8")
        (folder / "apt.conf").write_text(
            f'APT::Architecture "{architecture}"; APT::Architectures {{ "{architecture}"; }};\n'
            f'Dir::State "{folder}"; Dir::State::status "{folder}/status"; Dir::State::lists "{folder}/lists";\n'
            f'Dir::Cache "{folder}/cache"; Dir::Etc::sourcelist "{folder}/sources.list";\n'
            f'Dir::Etc::sourceparts "{folder}/none"; Dir::Etc::preferences "{folder}/preferences";\n'
            f'Dir::Etc::preferencesparts "{folder}/none";\n'
            'Acquire::Languages "none"; APT::Sandbox::User "root"; Acquire::Check-Valid-Until "false";\n',
            encoding="utf-8",
        )
        self._run("apt-get", "--quiet", "update", "--error-on=any")

    def offered(self) -> Iterator[Package]:
        for name in NAMES:
            said = self._run("apt-cache", "show", "--no-all-versions", name)
            fields = dict(re.findall(r"^(Version|SHA256): (\S+)$", said, re.MULTILINE))
            yield Package(name, fields["Version"], self._architecture, fields["SHA256"])

    def download(self, package: Package, place: Path) -> None:
        into = self._folder / "cache"
        try:
            self._run("apt-get", "--quiet", "download", f"{package.name}={package.version}", cwd=into)
        except DebianRefused as refused:
            raise DebianRefused(
                f"{refused}\nWhere Debian has replaced {package.name} {package.version} by a newer one, "
                f"`make lock-release` takes that; an older state of Debian's archive is named by {MIRROR}=URL"
            ) from None
        next(into.glob(f"{package.name}_*_{package.architecture}.deb")).rename(place)

    def _run(self, *words: str, cwd: Path | None = None) -> str:
        return _run(list(words), cwd=cwd or self._folder, env={"APT_CONFIG": str(self._folder / "apt.conf")})


def _is(place: Path, package: Package) -> bool:
    return place.is_file() and hashlib.sha256(place.read_bytes()).hexdigest() == package.sha256


def _run(words: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    try:
        ended = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=_APT_S,
            check=False,
        )
    except FileNotFoundError:
        raise DebianRefused(f"there is no {words[0]} here: releases are built on Debian or Ubuntu") from None
    if ended.returncode != 0:
        raise DebianRefused(f"`{' '.join(words)}` ended with status {ended.returncode}: {ended.stderr.strip()[-2000:]}")
    return ended.stdout
