"""The locks that this release carries, and those that the cluster's file names by their URL."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.resources import files
from pathlib import Path

from llmgw.agent.fetch.artifact import Artifact, Say
from llmgw.agent.fetch.download import download
from llmgw.agent.install.recipe import RecipeFailed
from llmgw.cluster.catalog import BuildKind, EngineSpec
from llmgw.cluster.model import Inventory
from llmgw.engines.python_locks import BadLock, Lock, NoLock, choose, misfit, read_lock

_MOST_BYTES = 8 << 20


@cache
def shipped() -> tuple[Lock, ...]:
    """Blocks for milliseconds, once."""
    folder = files("llmgw.engines") / "locks"
    texts = [each.read_text(encoding="utf-8") for each in folder.iterdir() if each.name.endswith(".lock")]
    return tuple(sorted(map(read_lock, texts), key=str))


async def lock_for(
    spec: EngineSpec, inventory: Inventory, downloads: Path, say: Say, build: BuildKind | None = None
) -> Lock:
    """The lock that ``spec`` asks for on this machine. Raises RecipeFailed, FetchFailed, NoRoom, OSError."""
    if spec.source == "github":
        raise RecipeFailed(
            f"{spec.name} is installed from a Python package index, not from GitHub: set `source: index`"
        )
    try:
        if spec.source == "index":
            lock = choose(await asyncio.to_thread(shipped), spec, inventory, build)
        else:
            lock = await _named(spec, inventory, downloads, say)
    except NoLock as error:
        raise RecipeFailed(str(error)) from None
    if spec.package is not None and spec.package not in dict(lock.packages):
        raise RecipeFailed(
            f"the lock of {lock} has no package {spec.package}: leave `package` out, the lock says it all"
        )
    return lock


async def _named(spec: EngineSpec, inventory: Inventory, downloads: Path, say: Say) -> Lock:
    assert spec.sha256 is not None, "a source that is a URL has a hash: the file is checked for that"
    name = f"{spec.name}-{spec.version}.lock"
    path = await download(Artifact(name=name, url=spec.source, sha256=spec.sha256), downloads, say)
    if path.stat().st_size > _MOST_BYTES:
        raise RecipeFailed(f"{spec.source} is too large for a lock: it is a requirements file with hashes")
    try:
        lock = read_lock(path.read_text(encoding="utf-8"))
    except (BadLock, UnicodeDecodeError) as error:
        raise RecipeFailed(f"{spec.source} is no lock: {error}") from None
    if (lock.engine, lock.version) != (spec.name, spec.version):
        raise RecipeFailed(f"{spec.source} is a lock of {lock}, and {spec.name} {spec.version} is asked for")
    if why_not := misfit(lock, inventory):
        raise NoLock(why_not)
    return lock
