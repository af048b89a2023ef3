"""The limits that control groups put on memory and processors, version 1, version 2 and the mix of both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmgw.agent.discovery.files import read_text

_NUMBER = re.compile(r"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Limits:
    """None: not limited."""

    memory_bytes: int | None = None
    memory_room_bytes: int | None = None
    """What may still be taken under the tightest limit; reclaimable file cache counts as room."""
    cpus: float | None = None


def parse_membership(text: str) -> Mapping[str, str]:
    """/proc/self/cgroup as controller to path; version 2's one hierarchy has the name ""."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        parts = line.strip().split(":", 2)
        if len(parts) == 3 and parts[0].isdigit():
            for controller in parts[1].split(","):
                groups.setdefault(controller, parts[2])
    return groups


def parse_number(text: str | None) -> int | None:
    """A file with one number; "max" and version 1's "unlimited" (close to 2**63) are None."""
    found = _NUMBER.fullmatch(text.strip()) if text is not None else None
    if found is None:
        return None
    value = int(found[0])
    return value if 0 <= value < 2**62 else None


def parse_quota(text: str | None) -> float | None:
    """Processors from ``cpu.max`` ("200000 100000", "max 100000"), or version 1's quota and period joined so."""
    numbers = [parse_number(part) for part in (text or "").split()]
    if len(numbers) != 2:
        return None
    quota, period = numbers
    return quota / period if quota and period else None


def parse_stat(text: str | None, key: str) -> int | None:
    """One number of ``memory.stat``."""
    for line in (text or "").splitlines():
        name, _, value = line.strip().partition(" ")
        if name == key:
            return parse_number(value)
    return None


def read_limits(root: Path) -> Limits:
    """The tightest limits on this process's groups and all above them.

    Where systemd runs, the agent's own service is left out: engines get units of their own beside it.
    """
    groups = parse_membership(read_text(root / "proc/self/cgroup") or "")
    skip_service = (root / "run/systemd/system").is_dir()
    mount = root / "sys/fs/cgroup"
    memory: list[tuple[int, int]] = []
    cpus: list[float] = []
    for folder in _upwards(mount, groups.get(""), skip_service):
        memory += _memory(folder, "memory.max", "memory.current", "inactive_file")
        cpus += _known(parse_quota(read_text(folder / "cpu.max")))
    for folder in _upwards(mount / "memory", groups.get("memory"), skip_service):
        memory += _memory(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder in _upwards(mount / "cpu", groups.get("cpu"), skip_service):
        quota = read_text(folder / "cpu.cfs_quota_us")
        cpus += _known(parse_quota(f"{quota} {read_text(folder / 'cpu.cfs_period_us')}"))
    return Limits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_room_bytes=min((room for _, room in memory), default=None),
        cpus=min(cpus, default=None),
    )


def _upwards(mount: Path, group: str | None, skip_service: bool) -> Iterator[Path]:
    if group is None:
        return
    # In a container with the host's view, the path names folders that its own mount lacks: only its top counts then.
    parts = [part for part in group.split("/") if part not in ("", ".", "..")]
    if skip_service and parts and parts[-1].endswith(".service"):
        parts.pop()
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _memory(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> list[tuple[int, int]]:
    limit = parse_number(read_text(folder / limit_file))
    if not limit:
        return []
    usage = parse_number(read_text(folder / usage_file)) or 0
    cache = parse_stat(read_text(folder / "memory.stat"), cache_key) or 0
    return [(limit, max(0, limit - max(0, usage - cache)))]


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]
