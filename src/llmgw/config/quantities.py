"""Durations and sizes as people write them: ``1m30s``, ``16GiB``."""

from __future__ import annotations

import re
from fractions import Fraction

from llmgw.config.faults import Refused

_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_DURATION = re.compile("".join(f"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in ("d", "h", "m", "s", "ms")))
_SECONDS = {"d": Fraction(86400), "h": Fraction(3600), "m": Fraction(60), "s": Fraction(1), "ms": Fraction(1, 1000)}
_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,9})?)(?P<unit>B|KiB|MiB|GiB|TiB)")
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LIKE_A_SIZE = re.compile(r"([0-9.]+)\s*([kmgt]?)i?b?", re.IGNORECASE)

DURATION = "a duration such as 250ms, 5s, 1m30s or 24h"
SIZE = "a size such as 512MiB or 16GiB"


def parse_duration(text: str) -> float:
    """Seconds in ``1d``, ``24h``, ``1m30s``, ``1.5s``, ``250ms``: units in falling order. Raises Refused."""
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        hint = f"with its unit: {text}s, {text}ms or {text}m" if re.fullmatch(_NUMBER, text) else ""
        raise Refused(DURATION, hint or "units are ms, s, m, h and d, the largest first, without blanks")
    return float(sum(Fraction(number) * _SECONDS[unit] for unit, number in match.groupdict().items() if number))


def format_duration(seconds: float) -> str:
    """The shortest text that ``parse_duration`` reads as these seconds, to the millisecond."""
    left = round(seconds * 1000)
    if left == 0:
        return "0s"
    parts = []
    for unit, milliseconds in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        number, left = divmod(left, milliseconds)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts)


def parse_size(text: str) -> int:
    """Bytes in ``512MiB``, ``1.5GiB``, ``16GiB``: powers of 1024. A part of a byte is dropped. Raises Refused."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise Refused(SIZE, _size_hint(text))
    return int(Fraction(match["number"]) * _BYTES[match["unit"]])


def _size_hint(text: str) -> str:
    match = _LIKE_A_SIZE.fullmatch(text)
    if match is None:
        return "units are B, KiB, MiB, GiB and TiB, without blanks"
    number, prefix = match[1], match[2].upper()
    if not prefix:
        return f"with its unit: {number}GiB, {number}MiB or {number}B"
    return f"units are powers of 1024: write {number}{prefix}iB"


def format_size(size_bytes: int) -> str:
    """Text that ``parse_size`` reads as exactly these bytes, in the largest unit that has no fraction."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _BYTES[unit] == 0:
            return f"{size_bytes // _BYTES[unit]}{unit}"
    return f"{size_bytes}B"
