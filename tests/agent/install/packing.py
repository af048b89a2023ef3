"""Archives of engines, as publishers of llama.cpp make them: one top folder, with the program in it."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmgw.cluster.catalog import EngineSpec

ASSET = "llama-{version}-bin-ubuntu-x64.tar.gz"


@dataclass(frozen=True)
class Archive:
    path: Path
    version: str
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def spec(self) -> EngineSpec:
        """Asks for this very file."""
        return EngineSpec(name="llamacpp", version=self.version, source=self.path.as_uri(), sha256=self.sha256)


def pack(folder: Path, version: str, files: Mapping[str, tuple[bytes, int]]) -> Archive:
    """``files`` maps paths below the top folder to content and mode."""
    path = folder / ASSET.format(version=version)
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(path, "wb", compresslevel=1, mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for name, (content, mode) in files.items():
            member = tarfile.TarInfo(f"llama-{version}/{name}")
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))
    return Archive(path, version, path.read_bytes())


def scripted(folder: Path, version: str, text: str, **more: bytes) -> Archive:
    """A llama-server that is a script; ``more`` lies beside it."""
    program = {"llama-server": (f"#!/bin/sh\n{text}\n".encode(), 0o755)}
    return pack(folder, version, {**program, **{name: (content, 0o644) for name, content in more.items()}})


def behaving(real: Path, version: str, otherwise: str = "") -> str:
    """A script that says that it is ``version``, such as b10216, and is the real engine else, or does ``otherwise``."""
    run = otherwise or f'exec {real} "$@"'
    number = version.removeprefix("b")
    return (
        f'case "$1" in\n--version) echo "version: {number} (876a43211)" >&2 ;;\n--help) exec {real} --help ;;\n'
        f"*) {run} ;;\nesac"
    )
