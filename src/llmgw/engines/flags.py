"""Which flags an installed engine documents, read from its own ``--help``.

Flags come and go between versions, so a command line is decided by the help of the very binary that will run.
Only definition lines count: prose mentions flags of other programs, and wrapped lines cut names in two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9_-]*|--[0-9][A-Za-z0-9_-]*")
"""A flag's name and nothing else; ``-1`` is a value."""
_WITH_NO_FORM = re.compile(r"--\[no-?\]-?([A-Za-z0-9][A-Za-z0-9_-]*)")
# llama-server pads after the comma of a short name ("-t,    --threads N"): that run of blanks ends nothing.
_END_OF_DEFINITION = re.compile(r"(?<![,\s])\s{2,}")
# Between spellings; the second is click's ("--cache / --no-cache").
_BETWEEN_NAMES = re.compile(r",\s+(?=-)|\s+/\s+(?=-)")
_REMOVED = "the argument has been removed"
_OPTIONAL = re.compile(r"\[[^\[\]|']*\]")
_CHOICES = re.compile(r"\{([^{}]+)\}|[\[<]([^\[\]<>]+\|[^\[\]<>]+)[\]>]|\[('[^\[\]]+')\]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Flag:
    """One definition line: all its spellings, and the placeholder of its value (None: it takes none)."""

    names: tuple[str, ...]
    metavar: str | None
    description: str
    line: int = 0
    """Where it is defined, counted from 1."""

    @property
    def definition(self) -> str:
        """As a help writes it: ``-c, --ctx-size N``."""
        return " ".join([", ".join(self.names), *([self.metavar] if self.metavar else [])])

    @property
    def takes_value(self) -> bool:
        return self.metavar is not None

    @property
    def needs_value(self) -> bool:
        """False too for one that may stand alone: argparse's ``[N]`` and ``[N ...]``.

        ``[on|off|auto]`` (llama-server) and ``['mp', 'ray']`` (vLLM) are choices: bare, they swallow what follows.
        """
        return self.metavar is not None and _OPTIONAL.fullmatch(self.metavar) is None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it takes, where its placeholder lists them; empty: not said."""
        found = _CHOICES.fullmatch(self.metavar or "")
        listed = re.split(r"[,|]", found[1] or found[2] or found[3]) if found else []
        choices = tuple(choice.strip().strip("'\"") for choice in listed)
        # "{a,b,...}" lists no more than a beginning.
        return () if any("..." in choice for choice in choices) else choices

    @property
    def removed(self) -> bool:
        """Still in the help, but only to say what to use instead; passing it ends the engine."""
        return _REMOVED in self.description


@dataclass(frozen=True, slots=True)
class Help:
    """A help as it was read. Flags stand under each of their names."""

    flags: Mapping[str, Flag]
    removed: Mapping[str, Flag]
    lines: tuple[str, ...]

    @property
    def documents_itself(self) -> bool:
        """Whether ``--help`` is defined. A help that is cut short, or a summary, mentions it at best."""
        return "--help" in self.flags

    def mention(self, name: str) -> int | None:
        """The line, counted from 1, that first has this very flag, defined or not."""
        # ``\\b`` would not do: it takes --port for a part of --port-range, and finds nothing before a dash.
        very = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        return next((number for number, line in enumerate(self.lines, 1) if very.search(line)), None)


def read_flags(help_text: str) -> Mapping[str, Flag]:
    """Every usable flag that ``help_text`` defines, under each of its names."""
    return read_help(help_text).flags


@lru_cache(maxsize=8)
def read_help(help_text: str) -> Help:
    flags: dict[str, Flag] = {}
    removed: dict[str, Flag] = {}
    lines = tuple(_COLOURS.sub("", help_text).splitlines())
    for number, definition, description in _entries(lines):
        flag = _flag(number, definition, description)
        if flag is not None:
            (removed if flag.removed else flags).update((name, flag) for name in flag.names)
    return Help(MappingProxyType(flags), MappingProxyType(removed), lines)


def _entries(lines: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
    """Definition lines with their number and whole description, continuation lines included."""
    definition: str | None = None
    start = 0
    description: list[str] = []
    for number, line in enumerate(lines, 1):
        if _is_definition(line):
            if definition is not None:
                yield start, definition, " ".join(description)
            definition, *rest = _END_OF_DEFINITION.split(line.strip(), maxsplit=1)
            start, description = number, rest
        elif definition is not None:
            description.append(line.strip())
    if definition is not None:
        yield start, definition, " ".join(description)


def _is_definition(line: str) -> bool:
    """llama-server defines at column 0, argparse after exactly two blanks."""
    text = line[2:] if line.startswith("  ") else line
    if not text.startswith("-"):
        return False
    first = re.split(r"[\s,]", text, maxsplit=1)[0]
    return FLAG.fullmatch(first) is not None or _WITH_NO_FORM.fullmatch(first) is not None


def _flag(line: int, definition: str, description: str) -> Flag | None:
    names: list[str] = []
    metavar: str | None = None
    for part in _BETWEEN_NAMES.split(definition):
        name, _, value = part.strip().partition(" ")
        if FLAG.fullmatch(name):
            names.append(name)
        elif both := _WITH_NO_FORM.fullmatch(name):
            names += [f"--{both[1]}", f"--no-{both[1]}"]
        else:
            continue
        metavar = value.strip() or metavar
    return Flag(tuple(names), metavar, description.strip(), line) if names else None
