"""What installing costs beyond the transfer: fetching, hashing and unpacking at once, against curl, sha256sum and tar.

    .venv/bin/python benchmarks/install/run.py [--rounds 7] [--size 600] [--packings tar.gz,tar.zst] [--build FOLDER]

Everything is on this machine; README.md beside this file explains the rows.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from content import gather, pack

from llmgw.agent.fetch.artifact import Artifact
from llmgw.agent.fetch.obtain import obtain

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Archive:
    path: Path
    url: str
    sha256: str

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    argv = [sys.executable, str(HERE / "server.py"), str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.terminate()


def by_curl(archive: Archive, place: Path) -> None:
    subprocess.run(["curl", "-sf", "-o", str(place / "archive"), archive.url], check=True)


def by_tar(archive: Archive, place: Path) -> None:
    """Both read the same archive at the same time: what takes longer is what this takes."""
    with subprocess.Popen(["sha256sum", str(archive.path)], stdout=subprocess.PIPE) as hashing:
        subprocess.run(["tar", "-xf", str(archive.path), "-C", str(place)], check=True)
        assert hashing.stdout is not None
        assert archive.sha256.encode() in hashing.stdout.read()


def by_tar_onto_the_disk(archive: Archive, place: Path) -> None:
    by_tar(archive, place)
    subprocess.run(["sync", "--file-system", str(place)], check=True)


def by_llmgw(archive: Archive, place: Path) -> None:
    artifact = Artifact(name=archive.path.name, url=archive.url, sha256=archive.sha256, size_bytes=archive.size_bytes)
    partial = place / "x.partial-1"
    partial.mkdir()
    asyncio.run(obtain(artifact, partial, place / "downloads", lambda state, words: None))


WAYS: dict[str, Callable[[Archive, Path], None]] = {
    "curl": by_curl,
    "sha256sum beside tar": by_tar,
    "the same, and sync": by_tar_onto_the_disk,
    "llmgw": by_llmgw,
}


def taken(way: Callable[[Archive, Path], None], archive: Archive, scratch: Path) -> float:
    place = scratch / "place"
    place.mkdir()
    try:
        os.sync()  # what the last one wrote is not this one's burden
        began = time.perf_counter()
        way(archive, place)
        return time.perf_counter() - began
    finally:
        shutil.rmtree(place)


def main() -> None:
    asked = _arguments()
    with tempfile.TemporaryDirectory(dir=asked.scratch, prefix="llmgw-bench-") as name:
        scratch = Path(name)
        archives = asked.archives or _archives(scratch, asked)
        with serving(archives) as url:
            print(f"load average {os.getloadavg()[0]:.1f}\n")
            for packing in asked.packings.split(","):
                _measure(archives / f"build.{packing}", url, scratch, asked.rounds)
            print(f"load average {os.getloadavg()[0]:.1f}")


def _archives(scratch: Path, asked: argparse.Namespace) -> Path:
    files, size = gather(scratch / "content", asked.build, asked.size * 1_000_000)
    print(f"{files} files and as many links, {size / 1e6:.0f} MB")
    archives = scratch / "archives"
    archives.mkdir()
    for packing in asked.packings.split(","):
        pack(scratch / "content", packing, archives / f"build.{packing}")
    shutil.rmtree(scratch / "content")
    return archives


def _measure(path: Path, url: str, scratch: Path, rounds: int) -> None:
    with path.open("rb") as file:
        archive = Archive(path, f"{url}/{path.name}", hashlib.file_digest(file, "sha256").hexdigest())
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, run in WAYS.items():
            seconds[way].append(taken(run, archive, scratch))
    slower = [max(pair) for pair in zip(seconds["curl"], seconds["sha256sum beside tar"], strict=True)]
    ratios = [ours / theirs for ours, theirs in zip(seconds["llmgw"], slower, strict=True)]
    print(f"| {path.name}, {archive.size_bytes / 1e6:.0f} MB | median | each round |\n| --- | ---: | --- |")
    for way, found in seconds.items():
        print(f"| {way} | {median(found):.2f} s | {' '.join(f'{each:.2f}' for each in found)} |")
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"| llmgw / the slower of curl and sha256sum beside tar | **{median(ratios):.2f}** | {each} |\n", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=600, help="megabytes that are packed")
    parser.add_argument("--packings", default="tar.gz,tar.zst")
    parser.add_argument("--build", type=Path, action="append", default=[], help="folder with a build to pack first")
    parser.add_argument("--archives", type=Path, help="folder with build.tar.gz and the like, instead of packing some")
    parser.add_argument("--scratch", type=Path, help="where to work: on the kind of disk that is installed to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
