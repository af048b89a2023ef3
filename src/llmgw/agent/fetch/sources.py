"""Where a build of an engine lies, asked of the source that the cluster's file names."""

from __future__ import annotations

from llmgw.agent.fetch import github, index, mirror
from llmgw.agent.fetch.found import Found
from llmgw.cluster.catalog import BuildKind, EngineSpec
from llmgw.cluster.model import Inventory

__all__ = ["Found", "resolve"]


async def resolve(spec: EngineSpec, inventory: Inventory, *, build: BuildKind | None = None) -> Found:
    """Asks the source of ``spec`` for the build that this machine runs. Raises FetchFailed, in words.

    ``build`` is what this node's own file says; it wins over what the cluster's file says.
    """
    wanted = build or spec.build
    if spec.source == "github":
        return await github.resolve(spec, inventory, build=wanted)
    if spec.source == "index":
        return await index.resolve(spec, inventory, build=wanted)
    return await mirror.resolve(spec, inventory)
