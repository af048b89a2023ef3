"""Model files as small as they can be, whole, to be broken by tests."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def tensor(name: str, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    count = len(dimensions)
    return text(name) + struct.pack(f"<I{count}QIQ", count, *dimensions, kind, offset)


def gguf_header(pairs: Sequence[bytes] = (), tensors: Sequence[bytes] = (), *, version: int = 3) -> bytes:
    return b"".join([b"GGUF", struct.pack("<IQQ", version, len(tensors), len(pairs)), *pairs, *tensors])


def alignment(value: int) -> bytes:
    return text("general.alignment") + struct.pack("<II", 4, value)


def gguf(*pairs: bytes, content: bytes = b"weights", alignment: int = 32, version: int = 3) -> bytes:
    """One tensor of 8-bit integers, without what would pad its end."""
    header = gguf_header(pairs, [tensor("t", [len(content)], 24, 0)], version=version)
    return header + b"\0" * (-len(header) % alignment) + content


def safetensors(content: bytes = b"weights", **more: object) -> bytes:
    shape = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "t": shape, **more}).encode()
    return struct.pack("<Q", len(header)) + header + content


def write_folder(folder: Path, shards: int = 3, index: str = "model.safetensors.index.json") -> list[Path]:
    """A model whose weights lie in ``shards`` safetensors files and an index; returns those files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    files = [folder / f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    for file in files:
        file.write_bytes(safetensors())
    (folder / index).write_text(json.dumps({"weight_map": {f"t{n}": file.name for n, file in enumerate(files)}}))
    return files
