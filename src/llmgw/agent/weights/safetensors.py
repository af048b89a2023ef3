"""How long a safetensors file is, by its own header.

The format, from the library's README: 8 bytes with the length of the header, the header as JSON, and the tensors, which
leave no gap and end with the file.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The library refuses longer ones too."""


def fault(file: BinaryIO, size: int) -> str | None:
    """What is wrong with a safetensors file of ``size`` bytes, to follow its name; None where nothing is.

    Raises OSError.
    """
    file.seek(0)
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        return (
            f"is no safetensors file, or damaged: its header would have {header_bytes} bytes, "
            f"of {_MAX_HEADER_BYTES} at most"
        )
    tensors_at = _LENGTH_BYTES + header_bytes
    if size < tensors_at:
        return f"is cut short: it has {size} bytes, and with its header alone {tensors_at}"
    try:
        expected = tensors_at + _tensor_bytes(json.loads(file.read(header_bytes)))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "is no safetensors file, or damaged: its header is not the JSON of one"
    if size == expected:
        return None
    return f"is {'cut short' if size < expected else 'too long'}: it has {size} bytes, and by its header {expected}"


def _tensor_bytes(header: dict[str, Any]) -> int:
    """Up to the end of the last. Raises what Python raises where it is no header."""
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    if not all(isinstance(end, int) and 0 <= end < 1 << 64 for end in ends):
        raise ValueError("no offset")
    return max(ends, default=0)
