"""Taking up a changed ``server.yaml`` without a restart. A file that is not whole changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from llmgw.cluster.catalog import ENGINE_NAMES, Catalog
from llmgw.config import ConfigError, ServerConfig, load_server, restart_needed
from llmgw.control.errors import ApiError
from llmgw.control.plane import NotWritten, Plane

log = structlog.get_logger()


class Reloader:
    def __init__(
        self, path: Path, config: ServerConfig, plane: Plane, on_changed: Callable[[ServerConfig], None]
    ) -> None:
        self.path = path
        self.config = config
        self._plane = plane
        self._on_changed = on_changed
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> tuple[str, ...]:
        """Takes up the file; returns what changed, in words. Raises ApiError, with nothing changed, where it can't."""
        async with self._one_at_a_time:
            try:
                return await self._reload()
            except ApiError as error:
                words = f"{error.message}: nothing was changed"
                self._plane.tell(lambda: self._plane.note("config.refused", "", words))
                raise

    async def _reload(self) -> tuple[str, ...]:
        try:
            new = await asyncio.to_thread(load_server, self.path)
        except ConfigError as error:
            raise ApiError(422, "config_refused", str(error), f"mend {self.path} and reload again") from error
        if fixed := restart_needed(self.config, new):
            names = ", ".join(fixed)
            raise ApiError(
                409, "needs_restart", f"a change of {names} needs a restart", "restart, or take that change back"
            )
        changed = _changed(self.config, new)

        async def act() -> None:
            self._plane.take_catalog(
                new.catalog,
                suspect_after_s=new.nodes.suspect_after_s,
                lost_after_s=new.nodes.lost_after_s,
                in_flight_s=new.drain.in_flight_s,
                heartbeat_s=new.nodes.heartbeat_s,
            )
            self._plane.note("config.reloaded", "", "; ".join(changed) or "nothing changed")

        try:
            await self._plane.ask(act)
        except NotWritten:
            self._taken_up(new)
            raise
        self._taken_up(new)
        return changed

    def _taken_up(self, new: ServerConfig) -> None:
        self.config = new
        self._on_changed(new)


def _engines_changed(old: Catalog, new: Catalog) -> list[str]:
    words = []
    for name in ENGINE_NAMES:
        before, after = old.engine(name), new.engine(name)
        if before == after:
            continue
        was, now = (spec.version if spec is not None else "none" for spec in (before, after))
        words.append(f"engine {name} {was} from elsewhere" if was == now else f"engine {name} {was} -> {now}")
    return words


def _changed(old: ServerConfig, new: ServerConfig) -> tuple[str, ...]:
    before = {spec.name: spec for spec in old.catalog.models}
    after = {spec.name: spec for spec in new.catalog.models}
    words = [f"model {name} added" for name in after if name not in before]
    words += [f"model {name} removed" for name in before if name not in after]
    words += [f"model {name} changed" for name in after if name in before and after[name] != before[name]]
    words += _engines_changed(old.catalog, new.catalog)
    words += ["nodes changed"] if old.nodes != new.nodes else []
    words += ["drain changed"] if old.drain != new.drain else []
    words += ["gateway changed"] if old.gateway != new.gateway else []
    return tuple(words)
