"""Which flags an installed engine documents, read from its own ``--help``.

Flags come and go between versions, so a command line is decided by the help of the very binary that will run.
Only definition lines count: prose mentions flags of other programs, and wrapped lines cut names in two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_NAME = re.compile(r"--?[A-Za-z0-9][A-Za-z0-9_-]*")
# llama-server pads after the comma of a short name ("-t,    --threads N"): that run of blanks ends nothing.
_END_OF_DEFINITION = re.compile(r"(?<![,\s])\s{2,}")
_REMOVED = "the argument has been removed"


@dataclass(frozen=True, slots=True)
class Flag:
    """One definition line: all its spellings, and the placeholder of its value (None: it takes none)."""

    names: tuple[str, ...]
    metavar: str | None
    description: str

    @property
    def takes_value(self) -> bool:
        return self.metavar is not None

    @property
    def removed(self) -> bool:
        """Still in the help, but only to say what to use instead; passing it ends the engine."""
        return _REMOVED in self.description


def read_flags(help_text: str) -> Mapping[str, Flag]:
    """Every usable flag that ``help_text`` defines, under each of its names."""
    flags: dict[str, Flag] = {}
    for definition, description in _entries(help_text):
        flag = _flag(definition, description)
        if flag is not None and not flag.removed:
            flags.update((name, flag) for name in flag.names)
    return flags


def _entries(help_text: str) -> Iterator[tuple[str, str]]:
    """Definition lines with their whole description, continuation lines included."""
    definition: str | None = None
    description: list[str] = []
    for line in help_text.splitlines():
        if _is_definition(line):
            if definition is not None:
                yield definition, " ".join(description)
            definition, *rest = _END_OF_DEFINITION.split(line.strip(), maxsplit=1)
            description = rest
        elif definition is not None:
            description.append(line.strip())
    if definition is not None:
        yield definition, " ".join(description)


def _is_definition(line: str) -> bool:
    """llama-server defines at column 0, argparse after exactly two blanks."""
    text = line[2:] if line.startswith("  ") else line
    if not text.startswith("-"):
        return False
    first = re.split(r"[\s,]", text, maxsplit=1)[0]
    return _NAME.fullmatch(first) is not None


def _flag(definition: str, description: str) -> Flag | None:
    names: list[str] = []
    metavar: str | None = None
    for part in re.split(r",\s+", definition):
        name, _, value = part.strip().partition(" ")
        if _NAME.fullmatch(name):
            names.append(name)
            metavar = value.strip() or metavar
    return Flag(tuple(names), metavar, description.strip()) if names else None
