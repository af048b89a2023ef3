"""``python -m deploy.release build|lock``: the files of a release, below ``dist/``."""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import sys
import time
from pathlib import Path

from deploy.release import archive, debian, prefix, sbom, source, wheels

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("amd64", "arm64")
_WORK = ROOT / "build/release"
_HERE = {"x86_64": "amd64", "aarch64": "arm64"}
_REFUSED = (debian.DebianRefused, wheels.WheelsRefused, prefix.PrefixRefused, source.SourceRefused)


class Builder:
    def __init__(self, built_from: source.Source, releases: str) -> None:
        self._source = built_from
        self._releases = releases
        self._since_s = time.monotonic()
        self._prefixes: dict[str, Path] = {}

    def build(self, architectures: list[str], out: Path) -> None:
        """Fills ``out``/VERSION, which appears when all of it is there."""
        self._say(f"llmgw {self._source.version}")
        out.mkdir(parents=True, exist_ok=True)
        partial = out / f".{self._source.version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        wheel = source.build_wheel(self._source, _WORK / "wheel", self._releases)
        shutil.copy2(wheel, partial / wheel.name)
        # Whatever is built, this machine's own Python compiles it.
        own = _HERE.get(platform.machine(), "")
        for architecture in sorted(architectures, key=lambda name: name != own):
            self._build_one(architecture, own, wheels.wheel_of(wheel), partial)
        self._write_checksums(partial)
        place = out / self._source.version
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
        for file in sorted(place.iterdir()):
            self._say(f"{file} {file.stat().st_size / 1e6:.1f} MB")

    def _build_one(self, architecture: str, own: str, wheel: wheels.Wheel, out: Path) -> None:
        locked = debian.read_lock(architecture)
        packages = wheels.fetch(ROOT / "requirements/runtime.txt", architecture, _WORK / architecture / "wheels")
        self._say(f"{architecture}: {len(packages)} packages of the lock")
        debs = debian.fetch(locked, _WORK / architecture / "debian")
        self._say(f"{architecture}: {len(debs)} packages of Debian")
        folder = self._make(architecture, debs, [*packages, wheel])
        python = self._prefixes[own] / "bin" / prefix.PYTHON if own in self._prefixes else None
        if python is None:
            raise prefix.PrefixRefused(
                f"this machine runs neither {' nor '.join(ARCHITECTURES)}: build it on one that does"
            )
        prefix.compile_all(folder, python, self._source.epoch_s)
        self._say(f"{architecture}: compiled")
        packed = archive.pack(
            folder, version=self._source.version, architecture=architecture, epoch_s=self._source.epoch_s
        )
        file = out / f"llmgw-{self._source.version}-linux-{architecture}"
        file.write_bytes(packed.content)
        file.chmod(0o755)
        contents = sbom.sbom(
            version=self._source.version,
            architecture=architecture,
            sha256=hashlib.sha256(packed.content).hexdigest(),
            epoch_s=self._source.epoch_s,
            wheels=packages,
            debs=locked,
        )
        (out / f"{file.name}.cdx.json").write_text(contents, encoding="utf-8")
        self._say(f"{architecture}: packed")

    def _make(self, architecture: str, debs: list[Path], packages: list[wheels.Wheel]) -> Path:
        folder = _WORK / architecture / "prefix"
        prefix.make(folder, debs, packages, architecture)
        needed = prefix.check(folder, architecture)
        self._say(f"{architecture}: needs glibc {needed[0]}.{needed[1]}")
        self._prefixes[architecture] = folder
        return folder

    def _write_checksums(self, out: Path) -> None:
        lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(out.iterdir())]
        (out / "checksums.txt").write_text("".join(lines), encoding="utf-8")

    def _say(self, words: str) -> None:
        print(f"{time.monotonic() - self._since_s:6.1f} s  {words}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build what the checkout is: a release where it is tagged as one")
    build.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: all")
    build.add_argument("--out", type=Path, default=ROOT / "dist")
    build.add_argument("--releases", default="", metavar="URL", help="where these will be: URL/vX.Y.Z/FILE")
    commands.add_parser("lock", help="take the packages that Debian has now")
    wish = parser.parse_args()
    try:
        if wish.command == "lock":
            rows = debian.write_lock(_WORK / "lock", ARCHITECTURES)
            print(f"{debian.LOCK}: {len(rows)} packages")
        else:
            built_from = source.look(ROOT)
            Builder(built_from, wish.releases).build(wish.arch or list(ARCHITECTURES), wish.out)
    except _REFUSED as refused:
        print(f"make release: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
