"""What happened, in order, for whoever has to find out why an invariant broke."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, TextIO

from .timeline import Timeline

LINES_KEPT = 4000


class Violation(BaseException):
    """Something that must always hold did not. ``rule`` is its number among the invariants, or a word.

    Not an Exception: what is under test catches those, to go on after a fault of its own.
    """

    def __init__(self, rule: str, words: str) -> None:
        super().__init__(f"[{rule}] {words}")
        self.rule = rule


class Story:
    """Lines are put into words only where they are read."""

    __slots__ = ("_lines", "_timeline", "aloud")

    def __init__(self, timeline: Timeline, aloud: TextIO | None = None) -> None:
        self._timeline = timeline
        self._lines: deque[tuple[float, str, str, tuple[Any, ...]]] = deque(maxlen=LINES_KEPT)
        self.aloud = aloud

    def tell(self, who: str, words: str, *arguments: Any) -> None:
        """``words`` with ``arguments`` in its places, as ``str.format`` takes them."""
        line = (self._timeline.now, who, words, arguments)
        self._lines.append(line)
        if self.aloud is not None:
            print(_text(line), file=self.aloud)

    def last(self, count: int) -> list[str]:
        lines = list(self._lines)[-count:]
        return [_text(line) for line in lines]


def _text(line: tuple[float, str, str, tuple[Any, ...]]) -> str:
    at, who, words, arguments = line
    return f"{at:9.3f} {who:<10} {words.format(*arguments) if arguments else words}"


def aloud() -> TextIO:
    return sys.stdout
