"""What is wrong with a file, said once and whole, for whoever has to mend it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_MOST_TOLD = 200
"""Faults that the text of an error lists: whoever has more has the wrong file, or one cause for most of them."""

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file to a value."""


class Refused(ValueError):
    """A value that can't be taken: what was expected instead, and what to do.

    ``quoted`` is given where text was expected and YAML reads the value as a number or a truth: the check of the text.
    """

    def __init__(self, expected: str, hint: str = "", *, quoted: Callable[[str], object] | None = None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint
        self.quoted = quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong. ``line`` and ``column`` count from 1; 0 where the fault is the whole file's."""

    file: str
    line: int = 0
    column: int = 0
    path: str = ""
    """Such as ``models[0].profiles[1].engine``; empty at the top of the file."""
    expected: str
    found: str
    hint: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def __str__(self) -> str:
        lines = [f"{self.place}: {self.path}" if self.path else self.place]
        lines += [f"    expected  {self.expected}", f"    found     {self.found}"]
        if self.hint:
            lines.append(f"    hint      {self.hint}")
        return "\n".join(lines)


class ConfigError(Exception):
    """A file that can't be used, with every fault that it has, in the order of its lines."""

    def __init__(self, file: str, faults: tuple[Fault, ...]) -> None:
        super().__init__(file, faults)
        self.file = file
        self.faults = faults

    def __str__(self) -> str:
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        told = [str(fault) for fault in self.faults[:_MOST_TOLD]]
        if len(self.faults) > _MOST_TOLD:
            told.append(f"… and {len(self.faults) - _MOST_TOLD} more")
        return "\n".join([f"{self.file} can't be used: {count}", *told])
