"""What is packed for the measurement: programs and libraries as they are, with the links that they have."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))
PACKERS = {"tar.gz": ("gzip", "-6"), "tar.zst": ("zstd", "-q", "-10", "-T0"), "tar.xz": ("xz", "-1", "-T0")}
TOP = "llama-b00000"


def gather(folder: Path, builds: list[Path], size_bytes: int) -> tuple[int, int]:
    """Fills ``folder/TOP`` with the builds, and with shared libraries of this machine; returns files and bytes."""
    top = folder / TOP
    top.mkdir(parents=True)
    files = total = 0
    for source in (*_below(builds), *_libraries()):
        place = top / source.name
        if total >= size_bytes:
            break
        if place.exists() or place.is_symlink():
            continue
        if source.is_symlink():
            continue
        shutil.copyfile(source, place)
        place.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
        files, total = files + 1, total + source.stat().st_size
        (top / f"{source.name}.link").symlink_to(source.name)
    return files, total


def _below(builds: list[Path]) -> Iterator[Path]:
    for build in builds:
        yield from (path for path in sorted(build.rglob("*")) if path.is_file())


def _libraries() -> Iterator[Path]:
    found = [path for folder in LIBRARIES if folder.is_dir() for path in folder.rglob("*.so*") if path.is_file()]
    yield from sorted(found, key=lambda path: -path.stat().st_size)


def pack(folder: Path, packing: str, archive: Path) -> None:
    tar = ["tar", "--format=gnu", "--owner=0", "--group=0", "-C", str(folder), "-c", TOP]
    with archive.open("wb") as out, subprocess.Popen(tar, stdout=subprocess.PIPE) as made:
        subprocess.run(PACKERS[packing], stdin=made.stdout, stdout=out, check=True)
    if made.returncode:
        raise SystemExit(f"tar ended with status {made.returncode}")
