"""A file that is fetched from elsewhere: where it is, and by what it is known to be the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a source is reached, where the machine's configuration says more than proxy variables and SSL_CERT_FILE."""

    ca: Path | None = None
    """A bundle or a folder of authorities, instead of the machine's own."""
    client_cert: Path | None = None
    """A file with a certificate and its key, for sources that ask for one."""
    proxy: str | None = field(default=None, repr=False)
    """For every host, instead of what the environment names."""
    trusted_hosts: tuple[str, ...] = ()
    """``host`` or ``host:port`` whose certificate is not looked at: the machine's owner said so."""


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
    access: Access = Access()


class FetchFailed(Exception):
    """It did not come, or is not what it should be; the message says what, from where, and what to do."""


Say = Callable[[str], None]
"""Hears progress in words that people read: ``downloading NAME (16 MB, 42 %)``."""
