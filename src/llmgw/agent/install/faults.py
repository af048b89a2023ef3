"""Why an engine does not work here, with what could be done about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingLibrary:
    """A shared library that the loader can't find."""

    name: str
    """Its soname: ``libgomp.so.1``."""
    wanted_by: Path
    package: str | None = None
    """The OS package that has it on this very system; None: none is known, or it is in none."""
    advice: str = ""
    """What to do where no package has it."""


class NotProved(Exception):
    """The program does not work here; the message says how that showed, and what to do."""

    def __init__(self, words: str, missing: tuple[MissingLibrary, ...] = ()) -> None:
        super().__init__(words)
        self.missing = missing
        """Libraries whose absence is all that is known to be wrong; empty: something else is."""

    @property
    def packages(self) -> tuple[str, ...]:
        """OS packages that bring all that is missing; empty where some of it is in none, or nothing is missing."""
        if any(library.package is None for library in self.missing):
            return ()
        return tuple(sorted({library.package for library in self.missing if library.package is not None}))
