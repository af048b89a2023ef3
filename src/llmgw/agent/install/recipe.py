"""How one build of an engine comes into a folder of its own on this node."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from llmgw.agent.fetch.obtain import Say as Say


class RecipeFailed(Exception):
    """It could not be installed; the message says why, and what to do."""


class Recipe(Protocol):
    """One build of one version of an engine for this very machine: an archive, or a Python environment."""

    @property
    def engine(self) -> str: ...

    @property
    def version(self) -> str:
        """As it stands in the EngineSpec."""

    @property
    def folder(self) -> str:
        """``VERSION-BUILD-SHA256[:12]``: the name of its folder, which proves that what is in it is whole."""

    @property
    def needed_bytes(self) -> int:
        """What it takes while it is installed, on the file system of ``engines_dir``."""

    async def put(self, partial: Path, say: Say) -> None:
        """Fills ``partial``, which is empty, whole and synced. Raises RecipeFailed, FetchFailed, NoRoom, OSError."""
