"""From the ``store:`` of ``server.yaml`` to an open store."""

from __future__ import annotations

from pathlib import Path

from llmgw.store.base import Store, StoreError
from llmgw.store.memory import MemoryStore

SUPPORTED = "sqlite:////absolute/path/llmgw.db (four slashes), or memory: (forgets everything when it ends)"


async def open_store(url: str) -> Store:
    """Open what ``url`` names, making and migrating it where needed.

    Raises StoreLocked where another process has the data directory, StoreError where the store can't be used.
    """
    if url == "memory:":
        return MemoryStore()
    path = sqlite_path(url)
    # SQLAlchemy and alembic take half a second to import: whoever needs the protocol alone need not wait for them.
    from llmgw.store.sqlite import SqliteStore

    return await SqliteStore.open(path)


def sqlite_path(url: str) -> Path:
    """The database file that ``url`` names. Raises StoreError where it is not a store of this build."""
    scheme, colon, rest = url.partition(":")
    if scheme in ("postgresql", "postgres") or scheme.startswith("postgresql+"):
        raise StoreError(
            f"store {scheme}://…: several control planes on PostgreSQL are not built yet; use sqlite:///…, "
            f"such as {SUPPORTED}"
        )
    if scheme != "sqlite" or not colon:
        raise StoreError(f"store {url!r} is of an unknown kind: expected {SUPPORTED}")
    if not rest.startswith("////") or rest.strip("/") == "" or rest.endswith("/"):
        raise StoreError(f"store {url!r} does not name a file by its absolute path: expected {SUPPORTED}")
    if "?" in rest or "\0" in rest:
        raise StoreError(f"store {url!r} has options after '?': there are none, expected {SUPPORTED}")
    return Path(rest[3:])


def state_dir(url: str) -> Path:
    """The directory that the store lies in, which a control plane keeps its other files in too. Raises StoreError."""
    if url == "memory:":
        raise StoreError(f"store memory: forgets everything when it ends; a control plane needs a file: {SUPPORTED}")
    return sqlite_path(url).parent
