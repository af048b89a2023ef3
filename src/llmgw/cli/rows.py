"""Rows for people: columns as wide as what they hold, and words in whatever room is left.

In a narrow terminal the words of a row get lines of their own below it, and columns of lesser use give way before
anything is cut. Into a pipe every row is one line.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text

GAP = "  "
LEAST_ROOM = 40
"""Columns that words need beside the others to be read with ease."""
LABEL = 10
"""Columns that the label of a fact takes."""
PIPE_WIDTH = 10_000

_COLOURS = {
    "ready": "green",
    "installed": "green",
    "moved": "green",
    "done": "green",
    "suspect": "yellow",
    "joining": "yellow",
    "draining": "yellow",
    "unplaced": "yellow",
    "waiting": "yellow",
    "blocked": "red",
    "lost": "red",
    "failed": "red",
    "revoked": "red",
}


def console() -> Console:
    """As wide as the terminal; into a pipe nothing is wrapped."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def state_text(state: str) -> Text:
    return Text(state, style=_COLOURS.get(state, ""))


def ago(at: str | None) -> str:
    if at is None:
        return "-"
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{max(seconds, 0)}s"


def size(count: int | None) -> str:
    if count is None:
        return "?"
    for unit, length in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= length:
            return f"{count / length:.0f} {unit}" if count >= 10 * length else f"{count / length:.1f} {unit}"
    return f"{count} B"


def amount(count: float) -> str:
    """``512``, ``9.1k``, ``3.2M``."""
    for unit, length in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= length:
            return f"{count / length:.1f}{unit}"
    return f"{count:.0f}"


def title(what: str, answer: dict[str, Any]) -> Text:
    """The first line of a description: what it is, its id, its state and since when."""
    since = f" for {ago(answer['since'])}"
    return Text.assemble(f"{what:<{LABEL}}", (answer["id"], "bold"), "  ", state_text(answer["state"]), since)


def fact(out: Console, label: str, words: Text | str, *, indent: int = LABEL) -> None:
    """One line of a description: its label, and beside it words that wrap in whatever room is left."""
    text = _text(words)
    first = Text(label.ljust(indent))
    if not out.is_terminal or indent + text.cell_len <= out.width:
        _line(out, first + text)
        return
    for number, part in enumerate(text.wrap(out, max(out.width - indent, LEAST_ROOM))):
        _line(out, (first if number == 0 else Text(" " * indent)) + part)


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    gives_way: int = 0
    """Where the terminal is too narrow, columns with the highest number go first; 0: never."""


def wrapped(text: str, width: int, *, hang: bool = False) -> list[str]:
    """Lines of at most that width, broken between words: names with hyphens stay whole. ``hang``: what an indented
    text goes on with is indented more."""
    indent = len(text) - len(text.lstrip())
    more = " " * (indent + 4 if hang and indent else 0)
    return textwrap.wrap(text, width, break_on_hyphens=False, subsequent_indent=more)


def print_rows(out: Console, columns: Sequence[Column], words: str, rows: Sequence[Sequence[Text | str]]) -> None:
    """Each row: a cell for each column, and last its words, whose heading is ``words``."""
    cells = [[_text(cell) for cell in row[:-1]] for row in rows]
    said = [_text(row[-1]) for row in rows]
    width = out.width if out.is_terminal else None
    kept = _kept(columns, cells, width)
    widths = [max([len(columns[n].name), *(row[n].cell_len for row in cells)]) for n in kept]
    used = sum(widths) + len(GAP) * len(widths)
    beside = width is None or width - used >= LEAST_ROOM
    head = GAP.join(columns[n].name.ljust(size) for n, size in zip(kept, widths, strict=True))
    any_words = any(text.plain for text in said)
    _line(out, Text((head + GAP + words if beside and any_words else head).rstrip(), style="bold"))
    for row, text in zip(cells, said, strict=True):
        line = Text(GAP).join(_padded(row[n], size) for n, size in zip(kept, widths, strict=True))
        if not text.plain:
            _line(out, line)
        elif width is None:
            _line(out, Text(GAP).join([line, text]))
        elif beside:
            for number, part in enumerate(wrapped(text.plain, width - used)):
                _line(out, Text(GAP).join([line if number == 0 else Text(" " * line.cell_len), Text(part, text.style)]))
        else:
            _line(out, line)
            for part in wrapped(text.plain, width - 4):
                _line(out, Text("    " + part, style="dim"))


def _kept(columns: Sequence[Column], cells: Sequence[Sequence[Text]], width: int | None) -> list[int]:
    kept = list(range(len(columns)))
    sizes = [max([len(columns[n].name), *(row[n].cell_len for row in cells)]) for n in kept]
    while width is not None and sum(sizes[n] + len(GAP) for n in kept) - len(GAP) > width:
        weakest = max(kept, key=lambda n: columns[n].gives_way)
        if columns[weakest].gives_way == 0:
            break
        kept.remove(weakest)
    return kept


def _text(cell: Text | str) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _padded(cell: Text, size: int) -> Text:
    padded = cell.copy()
    padded.append(" " * (size - cell.cell_len))
    return padded


def _line(out: Console, line: Text) -> None:
    line.rstrip()
    out.print(line, soft_wrap=True)
