from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from llmgw.store.base import Store
from llmgw.store.memory import MemoryStore
from llmgw.store.sqlite import SqliteStore

MakeStore = Callable[..., Awaitable[Store]]


@pytest.fixture(params=["sqlite", "memory"])
async def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MakeStore]:
    """Opens stores of each implementation, with the bounds asked for; each has a directory of its own."""
    async with AsyncExitStack() as stack:

        async def make(**bounds: int) -> Store:
            store: Store
            if request.param == "memory":
                store = MemoryStore(**bounds)
            else:
                directory = await asyncio.to_thread(lambda: tmp_path / f"store-{len(list(tmp_path.iterdir()))}")
                store = await SqliteStore.open(directory / "llmgw.db", **bounds)
            stack.push_async_callback(store.close)
            return store

        yield make


@pytest.fixture
async def store(make_store: MakeStore) -> Store:
    return await make_store()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(tmp_path / "data" / "llmgw.db")
    yield store
    await store.close()
