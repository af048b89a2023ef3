"""A gateway in this process, on real sockets, before scripted engines."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from llmgw.cluster.model import Endpoint, Route
from llmgw.gateway.gateway import Gateway
from llmgw.gateway.settings import GatewaySettings, Timeouts
from llmgw.link.messages import Routes, RoutesKey

from .client import DEADLINE_S, KEY, Answer, Client, ask
from .engine import Engine, Script, completion

TICK_S = 0.01


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


def key(text: str = KEY, models: tuple[str, ...] = ()) -> RoutesKey:
    return RoutesKey(id=text, hash=hashlib.sha256(text.encode()).hexdigest(), models=models)


def endpoint(engine: Engine, number: int = 0, **more: Any) -> Endpoint:
    return Endpoint(replica=f"m-{number}", generation=1, url=engine.url, api_key="replica-key", **more)


def table(routes: Iterable[Route], version: int = 1, keys: tuple[RoutesKey, ...] | None = None) -> Routes:
    return Routes(epoch=1, session=1, version=version, routes=tuple(routes), keys=keys or (key(),))


async def until(condition: Callable[[], object]) -> None:
    """Returns when the condition holds: for what has no event of its own. Fails after DEADLINE_S."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def settled(value: Callable[[], int]) -> int:
    """The value, once it has not changed for a while."""
    last, unchanged = value(), 0

    def same() -> bool:
        nonlocal last, unchanged
        unchanged = unchanged + 1 if value() == last else 0
        last = value()
        return unchanged > 100

    await until(same)
    return last


class House:
    """Engines, a gateway before them, and clients."""

    def __init__(self, stack: AsyncExitStack, tmp_path: Path) -> None:
        self._stack = stack
        self._tmp_path = tmp_path
        self.gateway: Gateway
        self.engines: list[Engine] = []
        self.version = 0

    async def engine(self, script: Script = completion) -> Engine:
        engine = await self._stack.enter_async_context(Engine(script))
        self.engines.append(engine)
        return engine

    async def start(self, *routes: Route, keys: tuple[RoutesKey, ...] | None = None, **settings: Any) -> Gateway:
        """``timeouts``: a mapping of those that differ from the defaults."""
        timeouts = replace(Timeouts(tick_s=TICK_S, linger_s=0.5), **settings.pop("timeouts", {}))
        self.gateway = Gateway(
            GatewaySettings(
                id="g",
                state_dir=self._tmp_path / "gateway",
                listen_host=settings.pop("listen_host", "127.0.0.1"),
                listen_port=0,
                timeouts=timeouts,
                **{"drain_s": 0.0, **settings},
            )
        )
        self.say(*routes, keys=keys)
        await self.gateway.start()
        self._stack.push_async_callback(self.gateway.stop)
        return self.gateway

    def say(self, *routes: Route, keys: tuple[RoutesKey, ...] | None = None) -> None:
        """The control plane's next table."""
        self.version += 1
        self.gateway.apply(table(routes, self.version, keys))

    async def serve(self, *scripts: Script, route: dict[str, Any] | None = None, **settings: Any) -> list[Engine]:
        """A gateway before one replica of ``m`` per script."""
        engines = [await self.engine(script) for script in scripts]
        each = settings.pop("endpoint", {})
        endpoints = tuple(endpoint(engine, number, **each) for number, engine in enumerate(engines))
        await self.start(Route(model="m", endpoints=endpoints, **(route or {})), **settings)
        return engines

    async def client(self) -> Client:
        return await self._stack.enter_async_context(await Client.open(self.gateway.port))

    async def ask(self, body: object = None, **how: Any) -> Answer:
        """One request on a connection of its own."""
        async with await Client.open(self.gateway.port) as client:
            return await client.ask(ask() if body is None else body, **how)

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition)

    async def limits_looked_at_for(self, span_s: float) -> None:
        """Returns when the gateway, by its own clock, has looked at all limits from now on until that much later."""
        gateway = self.gateway
        due = gateway._connections_due  # of the limits, those of connections are looked at least often
        await self.until(lambda: gateway._connections_due >= due + span_s)

    async def at_rest(self) -> None:
        """Nothing is in flight, nothing waits: the counters are back to 0."""
        lines = self.gateway.router.lines.values()
        await self.until(
            lambda: not self.gateway.active and all(not line.in_flight and not line.waiting for line in lines)
        )


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        yield House(stack, tmp_path)
