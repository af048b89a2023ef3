"""The routing table: what the control plane last said, indexed for looking up, and kept on disk.

The file lets a gateway that is restarted while there is no control plane serve on. It holds the replicas' keys, so it
is the gateway's own (0600); clients' keys are in it as hashes only.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llmgw.cluster.model import Route
from llmgw.link.messages import Routes, RoutesKey

FILE = "routes.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Table:
    """One version of the table. Names in ``routes`` are models' names and aliases alike."""

    version: int
    routes: dict[str, Route]
    keys: dict[str, RoutesKey]
    """By the key's SHA-256, in hex."""
    frame: Routes
    seen: dict[bytes, RoutesKey] = field(default_factory=dict, repr=False)
    """Keys that have been used, as they were sent, to spare their hashing. No more than there are valid ones."""

    @staticmethod
    def of(frame: Routes) -> Table:
        routes: dict[str, Route] = {}
        for route in frame.routes:
            for alias in route.aliases:
                routes.setdefault(alias, route)
        # A model's own name wins over another's alias.
        routes.update((route.model, route) for route in frame.routes)
        return Table(frame.version, routes, {key.hash: key for key in frame.keys}, frame)


def allowed(key: RoutesKey, route: Route) -> bool:
    """Whether this key may use this model. A key that lists none may use all; a list may name models or aliases."""
    return not key.models or route.model in key.models or any(alias in key.models for alias in route.aliases)


class _Kept(msgspec.Struct):
    format: int
    saved_at: float
    frame: Routes


class TableFile:
    """The last table on disk. Written whole to another name, then renamed: a crash leaves the old or the new one."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE

    def save(self, frame: Routes, saved_at: float) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = msgspec.json.encode(_Kept(FORMAT, saved_at, frame))
        # mkstemp makes the file 0600 from the start.
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".routes-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def load(self) -> tuple[Routes, float] | None:
        """The table and the wall-clock time of its saving; None where there is none.

        Raises ValueError, in words, where the file can't be used. It is left as it is.
        """
        try:
            kept = msgspec.json.decode(self.path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path}: the last routing table can't be read: {error}") from error
        if kept.format != FORMAT:
            raise ValueError(f"{self.path}: written in format {kept.format}; this build reads format {FORMAT}")
        return kept.frame, kept.saved_at
