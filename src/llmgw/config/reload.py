"""Which changes of the control plane's file a running one can take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from llmgw.config.server import ServerConfig

RELOADED = frozenset({"nodes", "drain", "catalog", "gateway.queue", "gateway.hold_for_s", "gateway.timeouts"})
"""Fields of ServerConfig that ``reload`` takes; ``catalog`` is the file's ``models`` and ``engines``."""


def restart_needed(old: ServerConfig, new: ServerConfig) -> tuple[str, ...]:
    """The keys, as the file spells them, whose change a running control plane can't take. Empty: reload will do."""
    return tuple(_key(path) for path in _changed(old, new, "") if path not in RELOADED)


def _changed(old: object, new: object, path: str) -> Iterator[str]:
    """Paths of the fields that differ, the deepest that both have; not below what is taken whole."""
    if old == new:
        return
    if path in RELOADED or type(old) is not type(new) or not is_dataclass(old) or path.count(".") == 1:
        yield path
        return
    for field in fields(old):
        here = f"{path}.{field.name}" if path else field.name
        yield from _changed(getattr(old, field.name), getattr(new, field.name), here)


def _key(path: str) -> str:
    """The field's path with the unit taken off: ``tls.lifetime_s`` is written ``tls.lifetime``."""
    return path.removesuffix("_s").removesuffix("_bytes")
