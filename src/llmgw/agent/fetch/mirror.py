"""An archive that the cluster's file names itself, by URL and SHA-256."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from llmgw.agent.fetch.artifact import Artifact, FetchFailed
from llmgw.agent.fetch.found import Found
from llmgw.cluster.catalog import EngineSpec
from llmgw.cluster.model import Inventory


async def resolve(spec: EngineSpec, inventory: Inventory) -> Found:
    """Asks nobody: what it is and where is stated. Raises FetchFailed, in words."""
    if spec.sha256 is None:
        raise FetchFailed(f"{spec.source} has no sha256 in the cluster's file: source: {{url: …, sha256: …}}")
    parts = urlsplit(spec.source)
    if parts.scheme not in ("https", "http", "file"):
        raise FetchFailed(f"{spec.source} is no source of engines: github, index or {{url, sha256}} is expected")
    name = PurePosixPath(unquote(parts.path)).name
    artifact = Artifact(name=name, url=spec.source, sha256=spec.sha256)
    # Whoever names an archive knows what is in it; its build's number is checked where it has one.
    numbered = re.fullmatch(r"b[0-9]+", spec.version)
    return Found(
        artifacts=(artifact,),
        variant=f"archive-{inventory.cpu.architecture}",
        reads_as=spec.version if numbered else None,
    )
