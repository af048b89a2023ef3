"""The record directory of one detached program: what was asked, what runs, how it ended.

spec.json      what to start, written by the starter; a reaper takes it by renaming it to ``claimed``,
               and whoever renames it first decides: a starter that died can't be obeyed by surprise
claimed        the same, while the program is being started; gone once ``record.json`` is there
lock           held (flock) by the reaper for as long as it lives
record.json    which processes they are; written and synced before the program runs its first instruction
exit           how it ended. Made in full size at the start, so that a full disk can't swallow it
output         the pipe (FIFO) that the program writes to
reaper.log     the reaper's own complaints; normally empty
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmgw.private_file import write_private
from llmgw.process.errors import RecordError
from llmgw.process.identity import Identity

LOG_LIMIT_BYTES = 64 * 1024 * 1024
LOGS_KEPT = 3
"""Rotated files kept beside the current one."""

_EXIT_BYTES = 4096
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedSpec:
    """A program to start so that it outlives its starter."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment: nothing is inherited. LLMGW_NONCE is added."""
    cwd: str
    log_path: str
    """Where stdout and stderr go. Rotated: PATH, PATH.1 (younger) ... PATH.3."""
    record_dir: str
    """A directory of this start's own; made when missing. One directory, one program, once."""
    nonce: str
    """Random, from ``new_nonce()``: how the program is recognised later."""
    user: str | None = None
    """Run as this user; None: as the starter's own."""
    reads: tuple[str, ...] = ()
    """Files and trees that the program needs, made reachable for ``user`` where a directory above them is closed."""
    writes: tuple[str, ...] = ()
    """The same for those that it may write to."""
    oom_score_adj: int | None = None
    """None: as inherited. Above 0: rather this one than another when memory runs out."""
    unit: str | None = None
    """Name of a transient systemd unit (``....service``) to run in; None: a session of its own."""
    spares_others: bool = False
    """It starts detached programs itself, which outlive it: at its end only its own process group is cleared up."""
    description: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Kept in the record for whoever adopts the program."""
    log_limit_bytes: int = LOG_LIMIT_BYTES
    logs_kept: int = LOGS_KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What runs. ``program`` leads a session and process group of its own."""

    program: Identity
    reaper: Identity
    started_at: float
    argv: tuple[str, ...]
    log_path: str
    unit: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    log_limit_bytes: int = LOG_LIMIT_BYTES
    logs_kept: int = LOGS_KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How a program ended. With neither status, signal nor error nobody saw it end (its reaper was killed, or the
    machine went down)."""

    status: int | None = None
    signal: str | None = None
    """As in SIGKILL."""
    oom: bool = False
    asked: bool = False
    """It ended after it had been asked to."""
    error: str | None = None
    """Why it was never started, in words."""
    ended_at: float = 0.0
    lost_output_bytes: int = 0
    """Output that could not be written, for lack of space for example."""

    @property
    def seen(self) -> bool:
        """Whether its reaper saw it end, and so has cleared up behind it."""
        return self.status is not None or self.signal is not None or self.error is not None


def path_of(record_dir: str | Path, name: str) -> Path:
    return Path(record_dir) / name


def write_spec(spec: DetachedSpec) -> None:
    """Lay the spec down for a reaper. Raises FileExistsError where the directory has been used before."""
    record_dir = Path(spec.record_dir)
    record_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    used = [name for name in ("spec.json", "claimed", "void", "record.json") if (record_dir / name).exists()]
    if used:
        raise FileExistsError(f"{record_dir} already holds the {used[0]} of another start")
    _preallocate_exit(record_dir)
    write_private(record_dir / "spec.json", json.dumps({"format": _FORMAT, **asdict(spec)}))


def claim_spec(record_dir: str | Path) -> DetachedSpec | None:
    """Take the spec, once and for all. None where there is none to take (any more)."""
    claimed = path_of(record_dir, "claimed")
    try:
        os.rename(path_of(record_dir, "spec.json"), claimed)
    except FileNotFoundError:
        return None
    fields = json.loads(claimed.read_text(encoding="utf-8"))
    fields.pop("format")
    for name in ("argv", "reads", "writes"):
        fields[name] = tuple(fields[name])
    return DetachedSpec(**fields)


def void_spec(record_dir: str | Path) -> bool:
    """Make sure that a spec which nobody has claimed is never obeyed. True where there was one."""
    try:
        os.rename(path_of(record_dir, "spec.json"), path_of(record_dir, "void"))
    except FileNotFoundError:
        return False
    return True


def write_record(record_dir: str | Path, record: Record) -> None:
    text = json.dumps({"format": _FORMAT, **asdict(record)})
    write_private(path_of(record_dir, "record.json"), text)


def settle(record_dir: str | Path) -> None:
    """The start is decided. What was to be started goes: it holds the environment, which may hold secrets."""
    with suppress(FileNotFoundError):
        path_of(record_dir, "claimed").unlink()


def is_settled(record_dir: str | Path) -> bool:
    return not path_of(record_dir, "claimed").exists()


def take_back(record_dir: str | Path) -> None:
    """Whoever has claimed the spec is not to run it. The reaper looks once it is on record, and before it runs it."""
    path_of(record_dir, "void").touch(mode=0o600)


def is_taken_back(record_dir: str | Path) -> bool:
    return path_of(record_dir, "void").exists()


def read_record(record_dir: str | Path) -> Record | None:
    """None where there is no record yet. Raises RecordError where it can't be understood."""
    path = path_of(record_dir, "record.json")
    value = _read_json(path)
    if value is None and not path.exists():
        return None
    if value is None:
        raise RecordError(f"{path} is empty")
    try:
        return Record(
            program=Identity.from_json(value["program"]),
            reaper=Identity.from_json(value["reaper"]),
            started_at=float(value["started_at"]),
            argv=tuple(str(part) for part in value["argv"]),
            log_path=str(value["log_path"]),
            unit=None if value.get("unit") is None else str(value["unit"]),
            labels={str(key): str(text) for key, text in value.get("labels", {}).items()},
            log_limit_bytes=int(value["log_limit_bytes"]),
            logs_kept=int(value["logs_kept"]),
        )
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{path} is not a record of a started program: {type(error).__name__}: {error}") from None


def write_exit(record_dir: str | Path, ended: ExitRecord) -> None:
    """Write over the room that was made at the start: this needs no free space."""
    text = json.dumps(asdict(ended)).encode()
    if len(text) >= _EXIT_BYTES:
        short = (ended.error or "")[:512]
        text = json.dumps({**asdict(ended), "error": short}).encode()
    fd = os.open(path_of(record_dir, "exit"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, text.ljust(_EXIT_BYTES), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_exit(record_dir: str | Path) -> ExitRecord | None:
    """None while it has not ended. Raises RecordError where the file can't be understood."""
    path = path_of(record_dir, "exit")
    value = _read_json(path)
    if value is None:
        return None
    try:
        return ExitRecord(
            status=None if value["status"] is None else int(value["status"]),
            signal=None if value["signal"] is None else str(value["signal"]),
            oom=bool(value["oom"]),
            asked=bool(value["asked"]),
            error=None if value["error"] is None else str(value["error"]),
            ended_at=float(value["ended_at"]),
            lost_output_bytes=int(value["lost_output_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} does not say how a program ended: {type(error).__name__}: {error}") from None


def take_lock(record_dir: str | Path) -> int:
    """Hold the directory's lock until the process ends; waits for it. Returns the descriptor."""
    fd = os.open(path_of(record_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def lock_is_held(record_dir: str | Path) -> bool:
    """Whether a reaper lives that holds this directory."""
    try:
        fd = os.open(path_of(record_dir, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _preallocate_exit(record_dir: Path) -> None:
    fd = os.open(record_dir / "exit", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b" " * _EXIT_BYTES)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} can't be read: {error}") from None
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path} must hold an object, found {type(value).__name__}")
    return value
