"""What an agent must know of its shards after a restart, beside the processes: what was asked, and what was proved.

One small file per shard under the work directory, 0600 since it holds the replica's key, replaced atomically.
Writing waits for the disk: call it from a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import structlog
from pydantic import TypeAdapter, ValidationError

from llmgw.cluster.model import DesiredShard

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    shard: DesiredShard
    endpoint: str | None
    proved: bool = False
    """It answered its first request in this generation: an adopted engine need not prove itself behind its queue."""


_ADAPTER = TypeAdapter(Remembered)


class ShardMemory:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remember(self, shard: DesiredShard, endpoint: str | None) -> None:
        self._write(Remembered(shard=shard, endpoint=endpoint))

    def proved(self, shard: DesiredShard) -> None:
        if (known := self._read(self._path(shard.id))) and known.shard.generation == shard.generation:
            self._write(replace(known, proved=True))

    def forget(self, shard_id: str) -> None:
        """Idempotent."""
        self._path(shard_id).unlink(missing_ok=True)

    def all(self) -> Iterator[Remembered]:
        for path in sorted(self._folder.glob("*.json")):
            if known := self._read(path):
                yield known

    def _path(self, shard_id: str) -> Path:
        return self._folder / f"{quote(shard_id, safe='')}.json"

    def _write(self, remembered: Remembered) -> None:
        path = self._path(remembered.shard.id)
        partial = path.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_ADAPTER.dump_json(remembered))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

    def _read(self, path: Path) -> Remembered | None:
        try:
            return _ADAPTER.validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = str(error)
        except ValidationError as error:
            # Without what was found there: that may be the replica's key.
            faults = error.errors(include_url=False, include_input=False, include_context=False)
            reason = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults[:3])
        log.warning("a shard's file can't be read; it is asked for anew", path=str(path), reason=reason)
        return None
