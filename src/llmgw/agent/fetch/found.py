"""What a source has of an engine for this machine."""

from __future__ import annotations

from dataclasses import dataclass

from llmgw.agent.fetch.artifact import Artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One build of one version of an engine, for this very machine."""

    artifacts: tuple[Artifact, ...]
    """The archive with the program first; then what belongs into the same folder (CUDA's runtime)."""
    variant: str
    """What tells this build from others of its version, as a part of a folder's name: ``cuda-12.8-x86_64``."""
    binary: str | None = None
    """The program's path inside the archive; None: the one file of the engine's name that is in it
    (``llmgw.engines.builds.PROGRAMS``)."""
    reads_as: str | None = None
    """What the program's own ``--version`` must come to (``Engine.read_version``); None: nobody knows. Compare with
    ``llmgw.engines.builds.contradicts``."""
    unpacked_bytes: int | None = None
    """None: not known before it is unpacked."""
