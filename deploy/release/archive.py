"""The one file: a script, and the folder that it unpacks. The same folder gives the same bytes, anywhere and ever."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HEAD = Path(__file__).with_name("head.sh")
MACHINES = {"amd64": "Linux-x86_64", "arm64": "Linux-aarch64"}
"""An architecture, and ``uname -s``-``uname -m`` of the machines that have it."""
_OFFSET_DIGITS = 7
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Packed:
    """``build``: the name of the folder that it is unpacked into."""

    content: bytes
    build: str


def pack(folder: Path, *, version: str, architecture: str, epoch_s: int) -> Packed:
    """All of ``folder`` as one executable file. ``epoch_s``: what all files in it are said to be from."""
    payload = compress(folder, epoch_s)
    sha256 = hashlib.sha256(payload).hexdigest()
    build = f"{version}-{sha256[:12]}"
    size_bytes = sum(path.lstat().st_size for path in walk(folder) if not path.is_dir())
    head = HEAD.read_text(encoding="utf-8")
    for name, value in {
        "VERSION": version,
        "ARCHITECTURE": architecture,
        "BUILD": build,
        "MACHINE": MACHINES[architecture],
        "SHA256": sha256,
        "MIB": str(size_bytes // _MIB + 1),
    }.items():
        head = head.replace(f"@{name}@", value)
    # The head says where it ends: a number whose length is known beforehand.
    length = len(head.replace("@OFFSET@", "0" * _OFFSET_DIGITS).encode())
    head = head.replace("@OFFSET@", str(length + 1).rjust(_OFFSET_DIGITS, "0"))
    return Packed(head.encode() + payload, build)


def compress(folder: Path, epoch_s: int) -> bytes:
    """``tar.gz``, which every machine can unpack, of what is in ``folder``: sorted, root's, of one moment."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in walk(folder):
            _add(tar, path, path.relative_to(folder), epoch_s)
    return packed.getvalue()


def walk(folder: Path) -> Iterator[Path]:
    """All that is below ``folder``, in one order; links are not followed."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)


def _add(tar: tarfile.TarFile, path: Path, name: Path, epoch_s: int) -> None:
    info = tarfile.TarInfo(str(name))
    info.mtime = epoch_s
    if path.is_symlink():
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        tar.addfile(info)
    elif path.is_dir():
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    else:
        status = path.stat()
        info.size, info.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
        with path.open("rb") as file:
            tar.addfile(info, file)
