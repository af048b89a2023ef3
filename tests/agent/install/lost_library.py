"""Run in a root of its own: an engine is there, its library is taken away, and what the node says of it is printed.

``python -m tests.agent.install.lost_library FOLDER installed|named`` where FOLDER has an installed engine, which the
agent's file names in the second case; then there is no apt-get either. Prints JSON lines ``[state, words]``, one for
each change from the moment on at which the library is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from llmgw.cluster.catalog import EngineName
from llmgw.engines.builds import DEFAULT_ENGINES

from .node import Engines, failed, running

PACKAGE = "libgomp1"
SPEC = DEFAULT_ENGINES[0]


def remove() -> None:
    subprocess.run(["dpkg", "--remove", "--force-depends", PACKAGE], check=True, capture_output=True)


async def lose(folder: Path, how: str) -> None:
    heals = how == "installed"
    named: dict[EngineName, Path] = {}
    if not heals:
        named["llamacpp"] = next(folder.glob("engines/llamacpp/*/*/bin/llama-server"))
    async with running(Engines(folder, named=named)) as engines:
        engines.installer.take([SPEC])
        await engines.until(lambda: engines.usable(SPEC.version), "the engine is there")
        engines.said.clear()
        await asyncio.to_thread(remove)
        if not heals:
            os.unlink("/usr/bin/apt-get")
        await engines.installer.probe()  # the check that is made every ten minutes
        if heals:
            await engines.until(lambda: engines.usable(SPEC.version), "it heals")
        else:
            await engines.until(lambda: failed(engines, SPEC.version) and "next try" in engines.words, "it is tried")
        for engine in engines.said:
            print(json.dumps([engine.state.value, engine.words]))


if __name__ == "__main__":
    asyncio.run(lose(Path(sys.argv[1]), sys.argv[2]))
