"""A file that is fetched from elsewhere: where it is, and by what it is known to be the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file of a source, once that was asked. Nothing of it lies on this machine yet."""

    name: str
    """The file's own name: its ending says what kind of archive it is."""
    url: str
    """``https://``, ``http://`` or ``file://``."""
    sha256: str
    """64 hex digits that its publisher states. Where there is none, nothing is fetched."""
    size_bytes: int | None = None
    """None: not known before the download begins."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the source wants to be sent (authorization); never sent on to another host."""


class FetchFailed(Exception):
    """It did not come, or is not what it should be; the message says what, from where, and what to do."""


Say = Callable[[str], None]
"""Hears progress in words that people read: ``downloading NAME (16 MB, 42 %)``."""
